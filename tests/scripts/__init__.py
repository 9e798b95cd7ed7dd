"""Scripts as people write them for one process, run on two workers and compared with plain Keras."""
