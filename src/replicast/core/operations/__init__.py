"""What happens at boundaries: of each operation the script of the coordinator and the part of the workers.

apply.py      every replica applies an update at one boundary, given or computed there, or to revert
              another one, perhaps on trial; what it overwrites becomes durable
audit.py      compares the replicas and heals them; sync makes all equal to one worker's; pull reads values
attempt.py    begin, save, meet, close and leave: how an attempt begins, what it leaves behind, how it ends
"""
