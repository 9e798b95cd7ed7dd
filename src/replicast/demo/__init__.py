"""`replicast demo`: two real workers play in acts, and the screen shows what happened to their replicas.

    runner    starts the workers and says in the end whether all of it really happened
    audience  follows the workers' notes and shows each act when all of its moments are in
    acts      what an act is, and the programme: one file per act (act_one, act_two, act_three)
    errands   what a process outside of the job does in the middle of an act
    worker    the program of each worker; the only file here that loads TensorFlow
    notes     what a worker tells the runner, as lines of JSON in the run directory
    screen    the texts, the tables and the one progress bar

An act has two halves: `play` runs on every worker; `tell`, `errand` and `show` in the command line.
Workers that the launcher has started again skip the acts that are over, and play the one that they died in
from its beginning.
"""
