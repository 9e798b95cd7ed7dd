"""A script that only starts, and stays between the meeting of the workers and TensorFlow's connecting them.

It says ``met`` there and continues when the file ``go`` exists.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import replicast
from replicast import rendezvous

reports = Path(os.environ["JOB_REPORTS"])
meet = rendezvous.meet


def meet_and_wait(*arguments: Any) -> float:
    agreed = meet(*arguments)
    (reports / f"met-{arguments[0].rank}").touch()
    while not (reports / "go").exists():
        time.sleep(0.01)
    return agreed


with mock.patch.object(rendezvous, "meet", meet_and_wait):
    replicast.Strategy()
