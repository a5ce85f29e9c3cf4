"""For griffe: the comment at a field is its documentation.

    slot: int = 0  # which of several parallel calls of the role this is

A comment on the line of the field is taken, else the comment lines directly above it.
"""

import ast
import re
from typing import Any

import griffe

COMMENT = re.compile(r"^\s*# (?P<text>.*)$")


class FieldComments(griffe.Extension):
    """Gives attributes without a docstring their comment."""

    def on_attribute_instance(self, *, node: ast.AST, attr: griffe.Attribute, **rest: Any) -> None:
        """Called for every attribute of the code that is read."""
        lines = attr.lines_collection[attr.filepath]
        if attr.docstring is None and attr.lineno and (text := _comment(lines, attr)):
            text = re.sub(r"^[a-z]+(?= )", lambda word: word[0].capitalize(), text)
            attr.docstring = griffe.Docstring(text, parent=attr)


def _comment(lines: list[str], attr: griffe.Attribute) -> str:
    """The text of the comment at an attribute; "" if there is none."""
    first, last = attr.lineno - 1, (attr.endlineno or attr.lineno) - 1
    _, found, behind = lines[last].partition("  # ")
    if found:
        return behind
    above = []
    while first > 0 and (match := COMMENT.match(lines[first - 1])):
        above.insert(0, match["text"])
        first -= 1
    return " ".join(above)
