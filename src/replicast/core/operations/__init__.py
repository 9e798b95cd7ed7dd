"""One file per kind of operation: the coordinator's script and the worker's part, side by side.

update.py     every replica applies an update at one boundary; also how the journal is replayed
function.py   one worker computes an update from the live values, at the boundary where it is applied
trial.py      an update that is kept if a metric allows it, or reverted by every replica
revert.py     an update that undoes another one; the values that updates overwrite become durable for it
sync.py       every replica becomes equal to one worker's; all workers wait for each other
save.py       a checkpoint of one boundary
audit.py      compares the replicas; heals them
pull.py       the live values of one variable, or of some rows of it
attempt.py    begin, close and leave: how an attempt begins and ends
"""
