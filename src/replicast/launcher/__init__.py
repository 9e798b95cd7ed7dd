"""Starts the workers of a job on this machine, watches them, and ends them together."""
