"""Typical scripts for one process, run on two workers and compared with plain Keras."""
