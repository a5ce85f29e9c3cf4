"""The configuration of a run: what can be set, what is refused, and its way from the command line and to JSON."""
