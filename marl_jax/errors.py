"""Errors that a user can put right."""

__all__ = ["RunError", "UserError"]


class UserError(Exception):
    """The text is written for the user: a command prints it and ends with the exit code of a refusal."""


class RunError(Exception):
    """A run cannot go on. The text is written for the user: a command prints it and ends with the code of a failure."""
