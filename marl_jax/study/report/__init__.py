"""Runs as a page, as figures, and as Markdown."""
