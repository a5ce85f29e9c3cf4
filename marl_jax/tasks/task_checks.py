"""Checks of tasks, for rows of files and for the results of a user's function alike.

A task that cannot be shown or graded is refused when it is loaded, not in the middle of a run.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from marl_jax.task import Family, Task
from marl_jax.tasks.row_files import DataError, RowError
from marl_jax.tasks.schemas import check_text

_MAX_WORDS = 12  # words of a final answer that is no number
_NAMED = 3  # broken tasks that a message names


def check_task(task: Task, family: Family | None = None, graded: bool = True) -> None:
    """Raise a `RowError` if a task cannot be shown, graded or stored, or is of another family."""
    if task.family not in ((family,) if family else ("math", "code")):
        raise RowError(f"has the family {task.family!r}, and {family or 'math or code'!r} is required")
    if task.family == "code" and (graded or task.tests):  # existing tests are run whatever the reward is
        _check_tests(task)
    elif task.family == "math" and graded:
        _check_gold(task)
    if task.fault:
        raise RowError(task.fault)


def check_tasks(made: Any, name: str, split: str, family: Family, graded: bool = True) -> list[Task]:
    """The tasks that a user's data set returned for a split, as a list; all mistakes are one `DataError`."""
    tasks: list[Any] = list(made) if isinstance(made, Iterable) else [made]
    broken: list[str] = []
    seen: dict[str, int] = {}
    for index, task in enumerate(tasks):
        what = f"task {index}"
        try:
            if not isinstance(task, Task):
                raise RowError(f"is {type(task).__name__}, not a marl_jax.tasks.Task")
            what += f" (id {task.id!r:.60})"
            check_task(task, family, graded)
            if (first := seen.setdefault(task.id, index)) != index:
                raise RowError(f"has the id of task {first}: give each its own")
        except RowError as error:
            broken.append(f"{what}: {error}" if len(broken) < _NAMED else "")
    if broken:
        more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        raise DataError(
            f"data set '{name}', {split}: {len(broken)} of its {len(tasks)} tasks cannot be used (counted from 0): "
            + "; ".join(broken[:_NAMED])
            + more
        )
    return tasks


def mark(question: str) -> str:
    """A short hash of a question."""
    return hashlib.sha256(question.strip().encode()).hexdigest()[:16]


def shared(tasks: Sequence[Task], train: Sequence[Task]) -> list[int]:
    """Indices of the tasks whose question is also in train. Ids are not compared: they may repeat across splits."""
    trained_on = set(_marks(train))
    return [i for i, mark in enumerate(_marks(tasks)) if mark in trained_on]


def _marks(tasks: Sequence[Task]) -> list[str]:
    prepared = getattr(tasks, "marks", None)
    return [mark(task.question) for task in tasks] if prepared is None else prepared


def _check_tests(task: Task) -> None:
    from marl_jax.rewards.code import parse_tests

    for tests in (task.tests, task.public_tests) if task.public_tests else (task.tests,):
        try:
            parse_tests(tests)
        except (ValueError, TypeError, RecursionError) as error:
            raise RowError(f"its tests cannot be run: {error}") from None


def _check_gold(task: Task) -> None:
    from marl_jax.rewards.math import equivalent
    from marl_jax.rewards.math.boxed import extract_boxed
    from marl_jax.rewards.math.equivalence import MAX_CHARS

    gold = check_text("gold", task.gold)
    answer = extract_boxed(gold) or gold
    # A long number can still be compared character by character; a worked solution cannot.
    words = gold.split()
    too_long = len(gold) > MAX_CHARS
    in_words = answer == gold and 2 * sum(word.rstrip(".,:").isalpha() for word in words) > len(words)
    if (too_long and answer != gold) or (in_words and (too_long or len(words) > _MAX_WORDS)):
        raise RowError(f"its answer is a text of {len(gold)} characters: give the final answer alone")
    if answer == gold and "\\boxed" in gold:
        raise RowError(f"its answer {gold!r:.80} has a box that is empty or does not close")
    if not equivalent(answer, gold):
        raise RowError(f"its answer {gold!r} is empty: nothing can be equal to it")
