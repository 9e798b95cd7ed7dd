"""`replicast bench`: the cost of each operation on this machine, measured on real workers."""
