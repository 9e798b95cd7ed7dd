"""The launchers of one job on several hosts: they start, restart and end its workers together.

    launcher of host 1 ─┐  reports: what runs here, what has failed here
    launcher of host 2 ─┼─────────────────────────────────────────────→  launcher of host 0, with the `Leader`
    launcher of host 3 ─┘  ←─────────────────────────────────────────────
                              orders: wait, run attempt K, end it, the job is over

`leader.py` and `member.py` are state machines without I/O. A report and an order hold the whole state of
their side, and are sent again every second: a lost connection needs no repetition, and silence is noticed.
`wire.py` authenticates the lines of a connection, `first.py` and `other.py` have the sockets,
`link.py` has their thread. `rivals.py` looks for a second launcher that takes itself for the first one.
"""
