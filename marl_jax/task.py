"""A task: one problem, with all that is needed to show, grade and identify it.

A task is plain frozen data. It crosses every boundary of the library (data set -> workflow -> grader ->
episode record), so it contains no arrays, no functions and nothing that cannot be written as JSON.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

Family = Literal["math", "code"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem of a data set."""

    id: str  # unique within its data set, the same in all runs
    family: Family  # decides how answers are read and graded
    question: str  # shown to the roles
    gold: str = ""  # math: the reference answer
    tests: tuple[Mapping[str, Any], ...] = ()  # code: hidden tests, see `rewards.run_program`
    public_tests: tuple[Mapping[str, Any], ...] = ()  # code: tests that a role may be shown
    level: int = 0  # difficulty, if the data set states one
    # Further fields of the data set, as JSON.
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Task":
        """The task that was stored as these fields; JSON has lists for tuples."""
        return cls(**{**value, **{name: tuple(value[name]) for name in ("tests", "public_tests")}})

    @functools.cached_property
    def tests_digest(self) -> str:
        """A hash of the hidden tests, which may be many."""
        return hashlib.sha256(repr(self.tests).encode()).hexdigest()

    @functools.cached_property
    def fault(self) -> str | None:
        """The reason why the task cannot be shown or stored; None if it can."""
        for name in ("id", "question"):
            if fault := text_fault(name, getattr(self, name)):
                return fault
        if self.family not in get_args(Family):
            return f"field 'family' is {self.family!r}, not {' or '.join(get_args(Family))}"
        if not isinstance(self.gold, str):
            return f"field 'gold' is {type(self.gold).__name__}, not text"
        if not isinstance(self.meta, Mapping):
            return f"field 'meta' is {type(self.meta).__name__}, not a dict"
        stored = (self.level, self.meta, self.tests, self.public_tests)
        try:
            json.dumps(stored)
        except (ValueError, TypeError, RecursionError) as error:
            return f"its level, meta or tests cannot be written as JSON: {error}"
        return (
            None if _keys_are_texts(stored) else "its meta or tests have a dict with keys that are no texts"
        )


def text_fault(name: str, value: Any) -> str | None:
    """The reason why a value is not a non-empty text; None if it is one."""
    if not isinstance(value, str):
        return f"field {name!r} is {type(value).__name__}, not text"
    if not value.strip():
        return f"field {name!r} is empty"
    if any("\ud800" <= char <= "\udfff" for char in value):
        return f"field {name!r} holds half of a surrogate pair, which is no text"
    return None


def _keys_are_texts(value: Any) -> bool:
    """Whether all keys are texts. JSON turns other keys into texts, so a stored task would come back different."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _keys_are_texts(inner) for key, inner in value.items())
    return not isinstance(value, list | tuple) or all(map(_keys_are_texts, value))
