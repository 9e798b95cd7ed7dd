"""The names of the package: each can be imported, and there are no others."""

from __future__ import annotations

import inspect
import json

import pytest

import replicast
from replicast import errors
from replicast.codec import encode
from replicast.core.entries import Stage
from replicast.storage.journal import UpdateView

ERRORS = [one for one in vars(errors).values() if inspect.isclass(one) and issubclass(one, Exception)]


def test_every_exported_name_is_there_and_sorted() -> None:
    assert sorted(replicast.__all__) == replicast.__all__ == dir(replicast)
    for name in replicast.__all__:
        assert getattr(replicast, name) is not None


def test_what_is_waited_for_and_how_large_an_update_may_be_can_be_set() -> None:
    assert replicast.Timeouts(join_secs=5).join_secs == 5
    assert replicast.Limits(max_bytes=512).max_bytes == 512


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_is_exported_and_arrives_in_another_process_as_it_was_raised(kind: type) -> None:
    assert getattr(replicast, kind.__name__) is kind
    numbers = {"worker": 1, "step": 7, "status": 503, "digests": {0: "ab"}}
    fields = {name: numbers.get(name, f"the {name}") for name in inspect.signature(kind).parameters}
    raised = kind(**fields)
    arrived = errors.ReplicastError.from_json(json.loads(json.dumps(raised.to_json())))
    assert (type(arrived), str(arrived), vars(arrived)) == (kind, str(raised), vars(raised))


def test_a_view_reads_the_error_in_it_as_the_error_itself_does() -> None:
    why = errors.UpdateRefused.from_json({"type": "UpdateIdInUse", "problem": "it is taken", "worker": True})
    view = UpdateView(id="a", stage=Stage.REFUSED, refusal=why)
    arrived = UpdateView.from_json(json.loads(json.dumps(view.to_json()))).refusal
    assert (type(arrived), vars(arrived)) == (errors.UpdateIdInUse, vars(why))
    with pytest.raises(TypeError, match="JobFailed"):  # no process may send one without its class
        encode([errors.JobFailed("worker 1 has died")])
