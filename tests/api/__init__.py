"""Tests of the HTTP application over real engines."""
