"""A task: one problem, with all that is needed to show, grade and identify it.

A task is plain frozen data. It crosses every boundary of the library (data set -> workflow -> grader ->
episode record), so it holds no arrays, no functions and nothing that cannot be written as JSON.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["Family", "Task"]

Family = Literal["math", "code"]


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem of a data set."""

    id: str  # unique within its data set, stable across runs
    family: Family  # decides how answers are read and graded
    question: str  # shown to the roles
    gold: str = ""  # math: the reference answer
    tests: tuple[Mapping[str, Any], ...] = ()  # code: hidden tests, see `rewards.run_program`
    public_tests: tuple[Mapping[str, Any], ...] = ()  # code: tests that a role may be shown
    level: int = 0  # difficulty, where the data set states one
    # Further fields of the data set, as JSON.
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def tests_digest(self) -> str:
        """A hash of the hidden tests, which may be many."""
        return hashlib.sha256(repr(self.tests).encode()).hexdigest()
