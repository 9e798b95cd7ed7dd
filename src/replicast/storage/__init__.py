"""What outlives a process: the journal of a run directory, and what it says of each update.

`journal.py`        the journal: one process writes, any may read
`entry_files.py`    an entry as it lies in its file
`counted.py`        which entries count, read with few files opened
`index.py`          many entries in one file; derived from the entries
`updates.py`        all that is known of each update, for the command line
"""
