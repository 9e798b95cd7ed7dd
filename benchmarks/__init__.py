"""What training costs, as ratios of contestants that take turns in one run: `make bench`."""
