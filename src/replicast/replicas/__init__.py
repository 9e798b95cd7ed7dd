"""One worker of a job: `Replicas`, the threads, messages and files behind it, and the Keras callback.

This file imports nothing: a job of threads (`replicast.testing`) needs the session, and no TensorFlow.
"""
