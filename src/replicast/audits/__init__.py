"""What an audit found, and whose value counts. Data and arithmetic."""
