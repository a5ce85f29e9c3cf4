r"""Reading the boxed answer of a response: the last complete `\boxed{...}` or `\fbox{...}`.

Braces nest and may be escaped; a box inside a box belongs to the outer one; a box that was cut off before its
closing brace is no answer, so the last complete box before it counts.
"""

import collections
import operator
import re

MAX_ANSWER = 10_000  # characters of the longest answer
MAX_BOXES = 64  # boxes that are read, counted from the end

_NAME = re.compile(r"\\boxed|\\fbox")
_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t\r\n]{0,16}")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_CONTROL_SPACE = re.compile(r"(?<!\\)((?:\\\\)*)\\\s+$")  # a strip would leave its backslash
_BARE = re.compile(r"(?:[^\s${}\\]|\\[A-Za-z]+|\\[^A-Za-z\s]|\{[^{}$\n]*\}){1,200}")


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete box, stripped; None when there is no box or it is empty.

    `\boxed 5` (no braces) reads up to white space, $ or an unmatched brace, without punctuation at its end.
    """
    names = collections.deque(_NAME.finditer(text), MAX_BOXES)
    commands = (_COMMAND.match(text, match.start()) for match in reversed(names))
    boxes = [box for command in commands if command and (box := _read(text, command.end()))]
    if not boxes:
        return None
    _, content = max(boxes, key=operator.itemgetter(0))  # an earlier box that ends later contains the others
    content = _CONTROL_SPACE.sub(r"\1", content).strip()
    inner = _COMMAND.match(content)
    if inner is not None and (box := _read(content, inner.end())) and box[0] == len(content):
        return extract_boxed(content)  # the box contains nothing but a box
    return content or None


def _read(text: str, start: int) -> tuple[int, str] | None:
    """The end and content of the box argument that begins at `start`; None if it is cut off or missing."""
    if not text.startswith("{", start):
        bare = _BARE.match(text, start)
        return bare and (bare.end(), bare.group().rstrip(".,;:!?"))
    depth = 0
    for brace in _BRACE.finditer(text, start, start + MAX_ANSWER):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0 and brace.group() == "}":
            return brace.end(), text[start + 1 : brace.start()]
    return None
