"""The encoder side: from image files to embedding records in the cache."""
