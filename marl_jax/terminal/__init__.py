"""Output of a run on a terminal: the first page, the live view, tables."""
