"""torch's DistributedDataParallel over gloo, in its own environment: the same models and the same batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.step_task import Training


class ConstantBatch(Training):
    """A loop on one batch, as in torch's own tutorial on DDP."""

    def setup(self) -> None:
        torch.manual_seed(0)
        widths = [self.task.features, *self.task.units]
        hidden = [
            layer
            for before, after in pairwise(widths)
            for layer in (torch.nn.Linear(before, after), torch.nn.ReLU())
        ]
        last = torch.nn.Linear(widths[-1], self.task.classes)
        self.model = self.wrapped(torch.nn.Sequential(*hidden, last))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.loss = torch.nn.CrossEntropyLoss()
        x, y = self.task.arrays()
        mine = self.task.batch // self.workers
        self.x, self.y = torch.from_numpy(x[:mine]), torch.from_numpy(y[:mine].astype(np.int64))
        self.steps = 0

    def wrapped(self, model: Any) -> Any:
        return torch.nn.parallel.DistributedDataParallel(model)

    def trained(self) -> int:
        return self.steps

    def train(self) -> None:
        for _ in range(self.task.steps):
            self._step(self.x, self.y)

    def _step(self, x: Any, y: Any) -> None:
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()
        self.steps += 1


class Arrays(ConstantBatch):
    """A loop over shuffled arrays, of which every worker takes its share of each batch."""

    def setup(self) -> None:
        super().setup()
        self.examples, labels = (torch.from_numpy(array) for array in self.task.arrays())
        self.labels = labels.long()

    def train(self) -> None:
        mine = self.task.batch // self.workers
        for epoch in range(self.task.epochs):
            order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(epoch))
            for first in range(self.rank * mine, len(order), self.task.batch):
                rows = order[first : first + mine]
                self._step(self.examples[rows], self.labels[rows])


class _MeanOfRows(torch.nn.Module):
    """The mean of some rows of a table, and a layer on it."""

    def __init__(self, rows: int, width: int, classes: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(rows, width, sparse=True)
        self.last = torch.nn.Linear(width, classes)

    def forward(self, ids: Any) -> Any:
        return self.last(self.table(ids).mean(1))


class TableArrays(Arrays):
    """A loop over shuffled arrays of ids, with row-sparse gradients of the table."""

    def setup(self) -> None:
        super().setup()
        torch.manual_seed(0)
        model = _MeanOfRows(self.task.table, self.task.width, self.task.classes)
        self.model = self.wrapped(model)
        rows, dense = list(model.table.parameters()), list(model.last.parameters())
        if self.task.optimizer == "LazyAdam":
            self.optimizers = [torch.optim.SparseAdam(rows), torch.optim.Adam(dense)]
        else:
            kind = getattr(torch.optim, self.task.optimizer)
            self.optimizers = [kind([*rows, *dense], lr=0.01)]

    def _step(self, x: Any, y: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1


class NoExchange(ConstantBatch):
    """The same loop on the same share, in every process by itself."""

    def wrapped(self, model: Any) -> Any:
        return model
