"""Trains the small checkpoint: `python -m training --help`."""
