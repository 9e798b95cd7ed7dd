"""The demo and the examples read their data from scikit-learn: no process that a test starts goes without."""

import os

os.environ["REPLICAST_TEST_SKLEARN"] = "1"
