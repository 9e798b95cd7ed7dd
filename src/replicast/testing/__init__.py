"""For tests of jobs that use replicast: a simulation of the whole protocol (`replicast.testing.simulation`)."""
