"""How many replicas, how much Redis: a discrete-event model of the pools, and what an operator reads from it."""
