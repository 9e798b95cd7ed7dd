from __future__ import annotations

import os
import subprocess
import sys

from replicast.processes import is_alive, is_on_this_host, this_process


def test_a_process_is_told_from_another_that_has_its_number() -> None:
    me = this_process()
    assert is_on_this_host(me)
    assert is_alive(me) is True
    assert is_alive(me | {"started": me["started"] + 1}) is False
    assert is_alive({"pid": os.getpid()}) is None
    assert not is_on_this_host(me | {"host": "another host"})
    assert not is_on_this_host(me | {"machine": "one with the same host name"})


def test_a_process_that_has_ended_is_not_alive() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert is_alive({"pid": ended.pid}) is False
    assert is_alive({"pid": ended.pid, "started": 1}) is False


def test_what_is_no_number_of_a_process_is_not_alive() -> None:
    for pid in (None, "1", True, 0, -1, 2**70):
        assert not is_alive({"pid": pid, "started": 1})
