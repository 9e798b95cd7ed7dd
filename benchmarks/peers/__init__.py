"""What the `update` table compares with: other ways to add one worker's change on every worker."""
