"""One file per kind of operation: the coordinator's script and the worker's part, side by side.

update.py     every replica applies an update at one boundary; also how the journal is replayed
function.py   one worker computes an update from the live values, at the boundary where it is applied
sync.py       every replica becomes equal to one worker's
save.py       a checkpoint of one boundary
audit.py      compares the replicas; heals them
trial.py      an update that is kept if a metric allows it, or reverted by every replica
leave.py      save, and exit together
pull.py       the live values of one variable, or of some rows of it
revert.py     an update that undoes another one
keep.py       the values that an update has overwritten become durable, for a revert
"""
