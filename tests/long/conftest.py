"""Processes that these tests start do so as those of users: the demo and the examples need scikit-learn."""

import os

os.environ["REPLICAST_TEST_AS_USERS"] = "1"
