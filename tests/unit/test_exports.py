"""The names of the package: each can be imported, and there are no others."""

from __future__ import annotations

import replicast


def test_every_exported_name_is_there_and_sorted() -> None:
    assert sorted(replicast.__all__) == replicast.__all__ == dir(replicast)
    for name in replicast.__all__:
        assert getattr(replicast, name) is not None


def test_what_is_waited_for_and_how_large_an_update_may_be_can_be_set() -> None:
    assert replicast.Timeouts(join_secs=5).join_secs == 5
    assert replicast.Limits(max_bytes=512).max_bytes == 512
