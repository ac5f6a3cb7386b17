"""Tool calls in what a model writes: one file for each format, found by name in `formats`."""
