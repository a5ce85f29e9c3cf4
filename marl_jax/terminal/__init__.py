"""What a person sees of a run in a terminal: its first page, its live view, tables."""
