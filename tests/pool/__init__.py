"""Long-lived worker processes that run many test functions: starting TensorFlow takes seconds."""

from tests.pool.pool import Pool, WorkerFailed

__all__ = ["Pool", "WorkerFailed"]
