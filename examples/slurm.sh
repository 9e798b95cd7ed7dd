#!/bin/bash
# Two machines with two workers each; resumes after preemption, a failed node and the time limit:
#   sbatch examples/slurm.sh                                    trains examples/restart.py
#   sbatch --nodes=4 examples/slurm.sh train.py --epochs 90     another script with its arguments
# To end it for good: scancel JOB. See docs/hosts.md.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=00:30:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM to the workers two minutes before the time limit: they save and exit with 143.
#SBATCH --signal=TERM@120
set -uo pipefail

# Seconds for the last checkpoint: less than the GraceTime of the partition, and than the two minutes above.
GRACE=${GRACE:-90}
WORKERS=${WORKERS:-2}
# The same list, in the same order, on every machine; SLURM_NODEID is the machine's index in it.
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
# Two jobs may share a machine: use ports that depend on the job.
PORT=$((10000 + SLURM_JOB_ID % 1000 * 20))  # 20 ports for each job, below those that the system gives out
# TensorFlow's ports ask nobody for credentials (SECURITY.md): name the network of the compute nodes here.
# export REPLICAST_TRUSTED_NETWORKS=10.1.0.0/16
# A requeued job has the same id, so it finds the checkpoints of its earlier starts.
RUN=runs/$SLURM_JOB_ID
export GRACE WORKERS HOSTS PORT RUN
[ $# -gt 0 ] || set -- examples/restart.py

mkdir -p "$RUN"
rm -f "$RUN"/exit-code-*
# The trap keeps this shell alive when Slurm signals the whole step; the launcher gets the signal as usual.
srun --kill-on-bad-exit=1 bash -c '
    trap : TERM
    replicast run -n "$WORKERS" --hosts "$HOSTS" --node-rank "$SLURM_NODEID" --port "$PORT" \
        --max-restarts 3 --grace "$GRACE" --run-dir "$RUN" "$@"
    code=$?
    echo "$code" > "$RUN/exit-code-$SLURM_NODEID"
    exit "$code"' replicast "$@"
code=$?

# 143 on every machine: the workers were told to end and have saved. To Slurm that is a failed job: put it into
# the queue again. After a failure, srun ends the other machines, which then also exit with 143: so look at all.
# A job that is being cancelled never comes here: scancel ends this script too.
ended=$(cat "$RUN"/exit-code-* | grep -cx 143)
if [ "$ended" -eq "$SLURM_JOB_NUM_NODES" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
