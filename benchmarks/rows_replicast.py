"""replicast itself in the `rows` table: some rows, and the whole table."""

from __future__ import annotations

import replicast
from benchmarks.update_replicast import Propose


class AddRows(Propose):
    """An `Update` with the rows alone."""

    def check(self, rounds: int) -> None:
        (table,) = self.weights()
        self.task.check_rows(table, rounds)

    def update(self, index: int) -> replicast.Update:
        return replicast.Update().add_rows("part_0", self.task.indices(index), self.task.rows(index))


class AssignTable(Propose):
    """An `Update` with the table."""

    def check(self, rounds: int) -> None:
        (table,) = self.weights()
        self.task.check_table(table, rounds)

    def update(self, index: int) -> replicast.Update:
        table = self.task.table(index)
        table.flags.writeable = False  # not used elsewhere: no copy is needed
        return replicast.Update().assign("part_0", table)
