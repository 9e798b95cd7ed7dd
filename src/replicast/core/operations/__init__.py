"""One file per kind of operation: the coordinator's script and the worker's part, side by side.

update.py     every replica applies an update at one boundary, given or computed there, perhaps on trial
revert.py     an update that undoes another one; the values that updates overwrite become durable for it
sync.py       every replica becomes equal to one worker's; all workers wait for each other
save.py       a checkpoint of one boundary
audit.py      compares the replicas; heals them
pull.py       the live values of one variable, or of some rows of it
attempt.py    begin, close and leave: how an attempt begins and ends
"""
