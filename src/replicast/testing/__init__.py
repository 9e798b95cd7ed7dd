"""A job of N threads, for the tests of users."""
