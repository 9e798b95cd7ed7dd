"""What an own training loop says and asks about its data."""

from __future__ import annotations

from replicast.replicas.facts import Facts
from replicast.strategy.passes import Batches


class OwnLoop(Facts):
    """The part of `Replicas` with which an own loop goes on in the middle of its data."""

    def resume(self, dataset: Batches) -> Batches:
        """For an own loop: the next pass over its data. `fit` with the callback does this by itself.

        Ask for every pass. The first time after a restore it is the rest of the pass in which the state was
        saved, and the orders of those before have been drawn; else it is the dataset as it is. A pass may end
        early, and its length need not be known. A list of batches can be given too; of an iterator, such as a
        Python generator, the batches that were done of the pass are read and thrown away, and worker 0 warns.

        Example:
            replicas.restore()
            while replicas.step < 300:
                for batch in replicas.resume(dataset.take(15)):
                    train_step(batch)
                    replicas.boundary()

        What is assumed: every boundary is one batch of this dataset for each of its steps. One that is not
        says so: `boundary(batches=2)` for two batches of it, `boundary(batches=0)` for a step on other data.
        A loop that leaves a pass by `break` leaves it after `boundary`: a checkpoint made just there knows of
        that batch but not of the break, and goes on with the rest of the pass. `dataset.take(n)` has no such
        place. `position` tells the pass, as `epoch`, and how many batches of it are done.
        """
        self.proposing.go_on()
        return self.recovery.resume(dataset)
