"""The epoch at which `fit` goes on after a restore."""

from __future__ import annotations

import keras


def start_at_epoch(model: keras.Model, epoch: int) -> None:
    """Has the `fit` that is about to begin start at this epoch. To be called in `on_train_begin`.

    Private: `fit` looks at this attribute after `on_train_begin`, because Keras' own BackupAndRestore
    callback sets it there; there is no public way. `tests/workers/test_private_apis.py` notices when it
    changes.
    """
    model._initial_epoch = epoch
