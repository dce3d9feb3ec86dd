"""What both services and the command line share: images, keys, records, cache, settings, errors."""
