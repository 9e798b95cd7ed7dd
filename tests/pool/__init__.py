"""Worker processes that stay up and run many test functions: starting TensorFlow costs seconds."""

from tests.pool.pool import Pool, WorkerFailed

__all__ = ["Pool", "WorkerFailed"]
