"""One worker of a job: `Replicas`, the threads, messages and files behind it, and the Keras callback.

This file imports nothing: the job of threads of the tests needs the session, and no TensorFlow.
"""
