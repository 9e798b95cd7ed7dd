"""`python -m replicast.cli`, for where the `replicast` script is not on the path."""

from replicast.cli import main

main(prog_name="replicast")
