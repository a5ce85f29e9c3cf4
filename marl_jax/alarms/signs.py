"""Signs in a step's table that a role decides without reading: columns to numbers, for metrics and evaluations.

choice, grades of the answers read ──choices──► how common the commonest choice is, balanced accuracy
prompt, tokens ──copied──► the share of a completion that is copied from its prompt
tokens ──repeated──► the share of a completion that repeats itself
"""

from typing import Any

import numpy as np

from marl_jax.rewards.credit import last_read, own_work, shown
from marl_jax.rewards.grading import RIGHT
from marl_jax.table import JUDGE, PICKER, VERDICTS, Ragged, Table

COPY = 8  # tokens in a row that also stand in the prompt are copied; fewer may meet by chance
AT_ONCE = 1 << 20  # tokens that are looked at together
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


def choices(table: Table, mine: np.ndarray) -> dict[str, Any]:
    """How the judges or pickers among these rows choose; nothing for other roles. A share of nothing is None.

    A judge decides on the last answer that it read. `recall_right` is the share of right answers that it accepts,
    `recall_wrong` that of wrong ones that it rejects, and the balanced accuracy their mean: 0.5 for a judge that always
    says one thing, however many answers are right.

    A picker counts where it read right and wrong answers; elsewhere every pick is as good. `accuracy` is then
    the share of right picks, `chance` that of a blind one, and the balanced accuracy 0.5 for a blind pick and 1 for a
    perfect one.

    `commonest` is the share of the choice that is made most, `calls` of how many: of a judge its readable verdicts
    on answers of a solver, of a picker the picks that count.
    """
    mine = mine & table.sound
    kinds = set(table.kind[mine].tolist())
    if kinds == {JUDGE}:
        return _judged(table, mine)
    return _picked(table, mine) if kinds == {PICKER} else {}


def copied(table: Table, run: int = COPY) -> np.ndarray:
    """Float[N]: the share of sampled tokens in stretches of `run` or more that are also in the prompt.

    NaN for completions that are shorter than that.
    """
    share = np.full(len(table), np.nan)
    long = np.flatnonzero(table.length >= run)
    if not len(long):
        return share
    prompts, tokens = table.prompt.take(long), table.tokens.take(long)
    # A prompt that several rows share is looked at once.
    keys = prompts.starts * (int(prompts.lengths.max()) + 1) + prompts.lengths
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    size = prompts.lengths[first] + np.bincount(which, tokens.lengths)
    part, order = np.cumsum(size) // AT_ONCE, np.argsort(which, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(part[which[order]])) + 1):
        used, mine = np.unique(which[rows], return_inverse=True)
        there, owner, _ = _windows(prompts.take(first[used]), run)
        hashes, row, place = _windows(tokens.take(rows), run)
        same = _among(_of(hashes, mine[row]), _of(there, owner))
        share[long[rows]] = _covered(place[same], tokens.lengths[rows], run)
    return share


def repeated(table: Table, run: int = COPY) -> np.ndarray:
    """Float[N]: the share of sampled tokens in stretches of `run` or more that occurred earlier in the completion.

    NaN for completions that are shorter than that.
    """
    share = np.full(len(table), np.nan)
    long = np.flatnonzero(table.length >= run)
    if len(long):
        hashes, row, place = _windows(table.tokens.take(long), run)
        again = np.ones(len(hashes), bool)
        again[np.unique(_of(hashes, row), return_index=True)[1]] = False  # the first of each is no repeat
        share[long] = _covered(place[again], table.length[long], run)
    return share


# ---------------------------------------------------------------- details


def _judged(table: Table, mine: np.ndarray) -> dict[str, Any]:
    was, asked = last_read(table)
    verdicts, right, wrong = table.choice[mine & asked], mine & asked & was, mine & asked & ~was
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


def _picked(table: Table, mine: np.ndarray) -> dict[str, Any]:
    solved, good = shown(table)
    count, right = solved.sum(axis=1), good.sum(axis=1)
    asked = mine & (right > 0) & (right < count)
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
    """Of the choices that can be read."""
    counts = np.unique(choice[choice >= 0], return_counts=True)[1]
    return {
        "calls": int(counts.sum()),
        "commonest": float(counts.max() / counts.sum()) if len(counts) else None,
    }


def _windows(rows: Ragged, run: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every stretch of `run` tokens: a hash, its row, and its place among the tokens of all rows end to end."""
    offsets = np.cumsum(rows.lengths) - rows.lengths
    counts = np.maximum(rows.lengths - run + 1, 0)
    row = np.repeat(np.arange(len(rows)), counts)
    inside = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    source = rows.starts[row] + inside
    hashes = np.zeros(len(row), np.uint64)
    for k in range(run):
        hashes = hashes * _BASE + rows.values[source + k].astype(np.uint64) + np.uint64(1)
    return hashes, row, offsets[row] + inside


def _among(values: np.ndarray, those: np.ndarray) -> np.ndarray:
    """As `numpy.isin`, which takes twice as long."""
    if not len(those):
        return np.zeros(len(values), bool)
    those = np.sort(those)
    return those[np.minimum(np.searchsorted(those, values), len(those) - 1)] == values


def _covered(places: np.ndarray, lengths: np.ndarray, run: int) -> np.ndarray:
    """For texts end to end: the share of each that lies in some stretch of `run` tokens that begins at these places."""
    ends = np.cumsum(lengths)
    edges = np.zeros(int(ends[-1]) + run + 1, np.int64)
    np.add.at(edges, places, 1)
    np.add.at(edges, places + run, -1)
    covered = np.cumsum(edges)[: ends[-1]] > 0
    return np.add.reduceat(covered.astype(np.int64), ends - lengths) / lengths


def _of(hashes: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """The hashes, made distinct by the prompt that they belong to."""
    return (hashes ^ (owner.astype(np.uint64) + np.uint64(1)) * _BASE) * _BASE


def share(values: np.ndarray) -> float | None:
    """The share of true values; None without values."""
    return float(np.mean(values)) if len(values) else None
