"""The configuration of a run: its fields, its checks, parsing from the command line, and JSON."""
