"""`python -m replicast` is `replicast`."""

from replicast.cli import main

main(prog_name="replicast")
