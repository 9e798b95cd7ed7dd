"""What happens at boundaries: of each operation the script of the coordinator and the part of the workers.

apply.py      every replica applies an update at one boundary, given or computed there, perhaps on trial
revert.py     an update that undoes another one; the values that updates overwrite become durable for it
audit.py      compares the replicas and heals them; sync makes all equal to one worker's
attempt.py    begin, save, meet, close and leave: how an attempt begins, what it leaves behind, how it ends
pull.py       the live values of one variable, or of some rows of it
"""
