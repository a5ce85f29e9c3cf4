"""The program in a model's response: the choice of the fenced block, and its start and end.

Models do not always follow Markdown. A response is first read by its rules, then with fences that may also open after
text or close after code, then with blocks that end where the next begins. The first reading in which every fence has a
partner is used.
"""

import operator
import re
import textwrap
from collections.abc import Sequence


def extract_program(response: str) -> str | None:
    """The last non-blank fenced block of a response, in any language; None without a block.

    Fences are those of Markdown, also inside a list, whose indentation is removed. A block without an end counts. If
    the fences pair up better that way, a fence may also open after text, or close after code, or before punctuation,
    ** or a tag, or before words if it begins its line.
    """
    blocks = _best_blocks(_LINE_END.split(response))
    written = [block for block in blocks if _is_written(block)] or blocks
    return _unindented("\n".join(written[-1])) if written else None


_LINE_END = re.compile(r"\r\n?|\n")
_INDENT = re.compile(r"\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)?")
_OPENING = re.compile(_INDENT.pattern + r"(?P<fence>`{3,}(?=[^`]*$)|~{3,})")
_CLOSING = re.compile(r"\s*(`{3,}|~{3,})\s*")
# The same after other text; trailing blanks of the line are removed before matching.
_LATE_OPENING = re.compile(r"(?<!`)(?P<fence>`{3,})\s*(?P<language>[\w+#.-]*)$")
_LATE_CLOSING = re.compile(
    r"(?<!`)(?P<fence>`{3,})(?:\s*(?:</|<\||[.,;:!?)*}\]$]|(?<=^```)\s*\w\S*\s+\S).*)?$"
)


def _best_blocks(lines: Sequence[str]) -> list[list[str]]:
    """The blocks of the first reading without a penalty, or else of the first with the smallest penalty."""
    best = _read_blocks(lines)
    for liberties in ({"late_open"}, {"late_close"}, {"late_close", "late_open"}, {"unclosed"}):
        if best[0] == 0:
            break
        best = min(best, _read_blocks(lines, **dict.fromkeys(liberties, True)), key=operator.itemgetter(0))
    return best[1]


def _read_blocks(
    lines: Sequence[str], late_close: bool = False, late_open: bool = False, unclosed: bool = False
) -> tuple[int, list[list[str]]]:
    """(penalty, fenced blocks) of one reading of a response; the penalty is 0 if all fences pair up."""
    blocks: list[list[str]] = []
    fence, indent, inner, strings, malformed, cut = "", 0, 0, 0, False, False
    for line in lines:
        late = _first_fence(_LATE_OPENING, line)
        before = line[: late.start()].strip() if late else ""
        opens = bool(late and late["language"] and late["fence"].startswith(fence) and not before)
        if unclosed and fence and opens and not strings and _INDENT.match(line).end() == indent:  # type: ignore[union-attr]
            fence, malformed, cut = "", malformed or inner % 2 == 1, True
        if not fence:
            if (opening := _OPENING.match(line) or (late if late_open else None)) is not None:
                fence, indent, inner, strings = opening["fence"], _INDENT.match(line).end(), 0, 0  # type: ignore[union-attr]
                blocks.append([])
            continue
        closing = _CLOSING.fullmatch(line)
        if closing and closing[1].startswith(fence) and closing.start(1) < indent + 4:
            fence, malformed = "", malformed or inner % 2 == 1
            continue
        end = _first_fence(_LATE_CLOSING, line) if late_close else None
        if end and end["fence"].startswith(fence) and not strings ^ _open_strings(line[: end.start()]):
            code = line[: end.start()].rstrip()
            comment = code.lstrip().startswith("#")
            if not comment and (code or end.start() < indent + 4):
                blocks[-1].extend([code] if code else [])
                fence, malformed = "", malformed or inner % 2 == 1
                continue
        if late and late["fence"].startswith(fence) and not strings ^ _open_strings(line[: late.start()]):
            inner += 1  # a fence of a pair inside the code, as in a comment with an example
            malformed |= opens and late.start() < indent + 4
        blocks[-1].append(line)
        strings ^= _open_strings(line)
    if not any(map(_is_written, blocks)):
        return 3, blocks
    if malformed or (fence and (inner % 2 or not _is_written(blocks[-1]))):
        return 2, blocks
    return int(cut or bool(fence)), blocks  # an open last block may have been cut off


def _first_fence(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    """The match of the pattern if it is the line's first fence; a second fence would end inline code."""
    match = pattern.search(line.rstrip())
    return None if match is None or "```" in line[: match.start()] else match


def _open_strings(text: str) -> int:
    """A bit for each kind of triple quotes that a text leaves open or closes; lines are combined by `^`."""
    return text.count('"""') % 2 | text.count("'''") % 2 << 1


def _is_written(block: Sequence[str]) -> bool:
    return any(line.strip() for line in block)


def _unindented(program: str) -> str:
    """The program without the indentation that all of its lines share, as inside a list."""
    return textwrap.dedent(program) if program.lstrip("\n")[:1].isspace() else program
