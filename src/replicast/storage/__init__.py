"""The run directory: what outlives a process.

`claims.py`       the groups of workers, the log of each, and which of its lines count
`journal.py`      the journal: one process writes, any may read
`inbox.py`        requests from outside to a job, and their answers
`checkpoints.py`  the checkpoints of a run, and the files of each; one patched by an update, and two compared
`run_files.py`    what the job says of itself: notes, states, metrics, audits; whether it runs
"""
