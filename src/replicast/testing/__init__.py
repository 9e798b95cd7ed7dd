"""For tests: `simulation` runs the whole protocol in one thread, in virtual time, from a seed."""
