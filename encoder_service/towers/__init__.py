"""The vision networks, one file per family."""
