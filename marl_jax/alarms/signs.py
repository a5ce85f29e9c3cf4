"""Signs in a step's table that a role decides without reading, as numbers for metrics and evaluations.

choice, grades of the answers read ──choices──► share of the commonest choice, balanced accuracy
prompt, tokens ──copied──► the share of a completion that is copied from its prompt
tokens ──repeated──► the share of a completion that repeats itself
"""

from typing import Any

import numpy as np

from marl_jax.rewards.credit import answers_read, last_answer_read, own_work
from marl_jax.rewards.grading import RIGHT
from marl_jax.table import JUDGE, PICKER, VERDICTS, Ragged, Table

COPY = 8  # a run of this number of tokens that is also in the prompt is a copy; a shorter one may be chance
AT_ONCE = 1 << 20  # tokens that are compared in one batch
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that products modulo 2^64 keep all bits


def signs(table: Table) -> dict[str, Any]:
    """{"choice/ROLE/NAME", "copied/ROLE", "repeated/ROLE"} of a graded table, for its line of `metrics.jsonl`."""
    values: dict[str, Any] = {}
    shares = {"copied": copied(table), "repeated": repeated(table)}
    for role in table.present():
        calls = table.having(role=role)
        values |= {f"choice/{role}/{name}": value for name, value in choices(table, calls).items()}
        for name, share in shares.items():
            if len(known := share[calls & ~np.isnan(share)]):
                values[f"{name}/{role}"] = float(known.mean())
    return values


def choices(table: Table, calls: np.ndarray) -> dict[str, Any]:
    """How the judges or pickers among these calls choose; empty for other roles. Shares over no calls are None.

    A judge decides on the last answer that it read. `recall_right` is the share of right answers that it accepts,
    `recall_wrong` that of wrong answers that it rejects, and the balanced accuracy their mean: 0.5 for a judge that
    always says the same, however many answers are right.

    A picker's call counts if it read both right and wrong answers; otherwise all picks are equally good. `accuracy` is
    the share of right picks, `chance` that of a blind pick, and the balanced accuracy is 0.5 for a blind picker and 1
    for a perfect one.

    `commonest` is the share of the most frequent choice among `calls` choices: a judge's readable verdicts on answers
    of a solver, or a picker's picks that count.
    """
    calls = calls & table.sound
    kinds = set(table.kind[calls].tolist())
    if kinds == {JUDGE}:
        return _judged(table, calls)
    return _picked(table, calls) if kinds == {PICKER} else {}


def copied(table: Table, run: int = COPY) -> np.ndarray:
    """Float[N]: the share of sampled tokens in runs of `run` or more that are also in the prompt.

    NaN for completions that are shorter than that.
    """
    shares = np.full(len(table), np.nan)
    long = np.flatnonzero(table.length >= run)
    if not len(long):
        return shares
    prompts, tokens = table.prompt.take(long), table.tokens.take(long)
    # A prompt that several rows share is hashed once.
    keys = prompts.starts * (int(prompts.lengths.max()) + 1) + prompts.lengths
    _, first, prompt_of = np.unique(keys, return_index=True, return_inverse=True)
    size = prompts.lengths[first] + np.bincount(prompt_of, tokens.lengths)
    batch, order = np.cumsum(size) // AT_ONCE, np.argsort(prompt_of, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(batch[prompt_of[order]])) + 1):
        used, which = np.unique(prompt_of[rows], return_inverse=True)
        prompt_hashes, owner, _ = _windows(prompts.take(first[used]), run)
        hashes, row, place = _windows(tokens.take(rows), run)
        is_copy = _among(_salted(hashes, which[row]), _salted(prompt_hashes, owner))
        shares[long[rows]] = _covered(place[is_copy], tokens.lengths[rows], run)
    return shares


def repeated(table: Table, run: int = COPY) -> np.ndarray:
    """Float[N]: the share of sampled tokens in runs of `run` or more that occurred earlier in the completion.

    NaN for completions that are shorter than that.
    """
    shares = np.full(len(table), np.nan)
    long = np.flatnonzero(table.length >= run)
    if len(long):
        hashes, row, place = _windows(table.tokens.take(long), run)
        repeat = np.ones(len(hashes), bool)
        repeat[np.unique(_salted(hashes, row), return_index=True)[1]] = False  # the first of equal runs
        shares[long] = _covered(place[repeat], table.length[long], run)
    return shares


# ---------------------------------------------------------------- details


def _judged(table: Table, calls: np.ndarray) -> dict[str, Any]:
    correct, asked = last_answer_read(table)
    verdicts, right, wrong = table.choice[calls & asked], calls & asked & correct, calls & asked & ~correct
    recalls = {
        "recall_right": share(table.choice[right] == VERDICTS["Correct"]),
        "recall_wrong": share(table.choice[wrong] == VERDICTS["Incorrect"]),
    }
    known = [recall for recall in recalls.values() if recall is not None]
    return {
        **_commonest(verdicts),
        "right": int(right.sum()),
        "wrong": int(wrong.sum()),
        **recalls,
        "balanced_accuracy": sum(known) / 2 if len(known) == 2 else None,
    }


def _picked(table: Table, calls: np.ndarray) -> dict[str, Any]:
    solver, is_right = answers_read(table)
    count, right = solver.sum(axis=1), is_right.sum(axis=1)
    asked = calls & (right > 0) & (right < count)
    accuracy = share(own_work(table)[0][asked] >= RIGHT)
    chance = float(np.mean(right[asked] / count[asked])) if asked.any() else None
    balanced = None
    if accuracy is not None and chance is not None:
        balanced = 0.5 + 0.5 * (accuracy - chance) / (1 - chance)
    return {
        **_commonest(table.choice[asked]),
        "asked": int(asked.sum()),
        "accuracy": accuracy,
        "chance": chance,
        "balanced_accuracy": balanced,
    }


def _commonest(choice: np.ndarray) -> dict[str, Any]:
    """Number of readable choices, and the share of the most frequent one."""
    counts = np.unique(choice[choice >= 0], return_counts=True)[1]
    return {
        "calls": int(counts.sum()),
        "commonest": float(counts.max() / counts.sum()) if len(counts) else None,
    }


def _windows(rows: Ragged, run: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hash, row, offset in the tokens of all rows end to end) of every run of `run` tokens."""
    offsets = np.cumsum(rows.lengths) - rows.lengths
    counts = np.maximum(rows.lengths - run + 1, 0)
    row = np.repeat(np.arange(len(rows)), counts)
    inside = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    source = rows.starts[row] + inside
    hashes = np.zeros(len(row), np.uint64)
    for k in range(run):
        hashes = hashes * _BASE + rows.values[source + k].astype(np.uint64) + np.uint64(1)
    return hashes, row, offsets[row] + inside


def _among(values: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Like `numpy.isin`, which takes twice as long."""
    if not len(candidates):
        return np.zeros(len(values), bool)
    candidates = np.sort(candidates)
    return candidates[np.minimum(np.searchsorted(candidates, values), len(candidates) - 1)] == values


def _covered(places: np.ndarray, lengths: np.ndarray, run: int) -> np.ndarray:
    """For texts end to end: the share of each text that is in runs of `run` tokens that begin at `places`."""
    ends = np.cumsum(lengths)
    edges = np.zeros(int(ends[-1]) + run + 1, np.int64)
    np.add.at(edges, places, 1)
    np.add.at(edges, places + run, -1)
    covered = np.cumsum(edges)[: ends[-1]] > 0
    return np.add.reduceat(covered.astype(np.int64), ends - lengths) / lengths


def _salted(hashes: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """The hashes mixed with their owners, so that equal runs of different owners do not match."""
    return (hashes ^ (owner.astype(np.uint64) + np.uint64(1)) * _BASE) * _BASE


def share(values: np.ndarray) -> float | None:
    """The share of true values; None if there are no values."""
    return float(np.mean(values)) if len(values) else None
