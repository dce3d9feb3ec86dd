"""Pixels to patches, one file per family."""
