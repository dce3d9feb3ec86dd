"""Small random checkpoints of every layout that is read here, for tests and for looking around."""
