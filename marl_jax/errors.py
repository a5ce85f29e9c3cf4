"""Errors that a user can put right."""


class UserError(Exception):
    """The text is written for the user: a command prints it and ends with the exit code of a refusal."""
