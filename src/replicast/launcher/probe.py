"""The tiny workers of `replicast doctor --deep`: each gives 1, all must receive the sum. Run as a script."""

from __future__ import annotations

import os
import sys


def main() -> int:
    import tensorflow as tf

    import replicast

    strategy = replicast.Strategy()
    total = tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None))
    received, expected = float(total().numpy()), float(os.environ["WORLD_SIZE"])
    sys.stdout.write(f"sum over all workers: {received}, expected {expected}\n")
    return 0 if received == expected else 1


if __name__ == "__main__":
    sys.exit(main())
