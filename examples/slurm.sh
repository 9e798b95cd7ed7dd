#!/bin/bash
# Two machines with two workers each:  sbatch examples/slurm.sh
# srun starts one `replicast run` per machine; each writes TF_CONFIG for its own workers.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
set -euo pipefail

# The same list, in the same order, on every machine; SLURM_NODEID is the machine's index in it.
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
# Two jobs may share a machine: use ports that depend on the job.
PORT=$((20000 + SLURM_JOB_ID % 10000))
export HOSTS PORT

srun --kill-on-bad-exit=1 bash -c '
    exec replicast run -n 2 --hosts "$HOSTS" --node-rank "$SLURM_NODEID" --port "$PORT" \
        --run-dir "runs/$SLURM_JOB_ID" examples/train.py'
