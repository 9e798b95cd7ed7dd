"""What outlives a process: the journal of a run directory, and what it says about each update.

`journal.py`        the journal: one process writes, any may read
`entry_files.py`    the file of an entry
`counted.py`        which entries count, read with few files opened
`index.py`          many entries in one file; derived from the entries
`updates.py`        everything known about each update, for the command line
"""
