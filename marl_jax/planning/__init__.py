"""Memory and time that a run needs on a machine, planned before it begins."""
