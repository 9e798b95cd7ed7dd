"""Benchmarks: ratios between contestants that take turns in one run: `make bench`."""
