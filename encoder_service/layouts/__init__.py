"""How checkpoints of each family store their tower."""
