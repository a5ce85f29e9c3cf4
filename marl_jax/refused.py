"""Refusals: what a user can put right is told in a line, without a traceback."""


class Refused(Exception):
    """The text is written for the user: what cannot be done, and the way out."""
