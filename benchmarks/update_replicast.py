"""replicast itself in the `update` table: from `propose` on one worker until the last one has applied."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.update_task import Array, Contestant


class Propose(Contestant):
    """An `Update` with one `add` for each variable, proposed by the source, without fsync."""

    def setup(self) -> None:
        raise NotImplementedError("the way of an update is not built yet")

    def weights(self) -> Iterable[Array]:
        raise NotImplementedError

    def arrange(self, index: int) -> None:
        raise NotImplementedError

    def round(self, index: int) -> tuple[int | None, int]:
        raise NotImplementedError
