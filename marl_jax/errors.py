"""Errors whose text is written for the user; commands print it without a traceback."""


class UserError(Exception):
    """A mistake that the user can correct. A command prints the text and ends with the exit code of a refusal."""


class RunError(Exception):
    """A run cannot go on. A command prints the text and ends with the exit code of a failure."""
