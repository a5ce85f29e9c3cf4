"""Rewards from peers: scores of answers, texts or turns by comparison in their group, without a gold answer.

    answers of a group ──agreement, wins──► worth of each        texts of a batch ──crowding──► how common each is
    worth turn by turn ──changes──► what each turn has changed

Plain functions of lists, for use in a user's reward: with `rewards.batch=task` that sees all episodes of a
problem, with `rewards.batch=step` all of a step.
"""

import collections
import operator
from collections.abc import Callable, Sequence
from typing import Any


def consensus(answers: Sequence[str | None]) -> tuple[str | None, float]:
    """The first of the commonest readable answers, and its share of all answers; (None, 0) if none can be read."""
    counts = collections.Counter(answer for answer in answers if answer is not None)
    if not counts:
        return None, 0.0
    answer, count = counts.most_common(1)[0]
    return answer, count / len(answers)


def agreement(answers: Sequence[str | None]) -> list[float]:
    """1 for each answer that is the consensus, else 0: the majority as the label."""
    label, _ = consensus(answers)
    return [float(answer is not None and answer == label) for answer in answers]


def wins(values: Sequence[Any], beats: Callable[[Any, Any], bool] = operator.gt) -> list[float]:
    """The share of the other values that each value beats; a draw counts half, and a single value gets 1/2.

    `beats` may be any preference, also a noisy or a cyclic one.
    """
    count = len(values)
    if count == 1:
        return [0.5]

    def against(i: int, j: int) -> float:
        won, lost = beats(values[i], values[j]), beats(values[j], values[i])
        return 0.5 if won == lost else float(won)

    return [sum(against(i, j) for j in range(count) if j != i) / (count - 1) for i in range(count)]


def crowding(texts: Sequence[str], near: float = 0.5, size: int = 3) -> list[float]:
    """The share of the texts that each text is near to, itself included, by their common runs of `size` characters.

    Two texts are near if their common runs are at least this share of all runs of both. A penalty on this share keeps a
    batch diverse.
    """
    grams = [{text[i : i + size] for i in range(max(len(text) - size + 1, 1))} for text in texts]
    return [sum(len(a & b) / len(a | b) >= near for b in grams) / len(grams) for a in grams]


def changes(values: Sequence[float], start: float = 0.0) -> list[float]:
    """The change that each turn made: the first against `start`, every other against the turn before."""
    return [now - before for before, now in zip([start, *values], values)]
