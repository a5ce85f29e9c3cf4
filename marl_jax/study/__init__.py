"""Runs as data: the record of a folder, its curves, and the page a person reads."""
