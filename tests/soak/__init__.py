"""Jobs with planned faults that end with the bits of an undisturbed one; `python -m tests.soak` runs many."""
