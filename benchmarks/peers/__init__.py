"""The peers in the `update` table: other ways to add a change of one worker on every worker."""
