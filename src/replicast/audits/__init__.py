"""Audit reports, and the choice of the reference value. Data and arithmetic."""
