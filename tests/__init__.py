"""The tests, as a package: a worker process imports a test module by the same name as pytest does."""
