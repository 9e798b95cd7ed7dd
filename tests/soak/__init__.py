"""Jobs that fail by plan and end with the bits of an undisturbed one; `python -m tests.soak` runs many."""
