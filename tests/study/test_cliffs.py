"""Peak, terminal accuracy and cliff of made-up runs, against values worked out by hand."""

import dataclasses

import numpy as np
import pytest
from study_folders import config, evaluation, metrics, write_run

from marl_jax.study.cliffs import course, drop_of, form_lost, form_of, is_cliff, why_none
from marl_jax.study.record import read_run
from marl_jax.study.run_sentences import in_words


def run(folder, evaluations, steps=None):
    """A run with {step: per_problem}."""
    last = max(evaluations)
    records = [evaluation(step, np.mean(v), per_problem=v) for step, v in evaluations.items()]
    about = config(steps=steps or last)
    return read_run(write_run(folder, about=about, lines=[metrics(last)], evaluations=records))


def share(right, of=20):
    """The first so many of the problems, right."""
    return [float(k < right) for k in range(of)]


def test_each_half_of_the_problems_chooses_for_the_other(tmp_path):
    # Even problems 0, 2 do best at step 20, odd ones 1, 3 at step 10.
    one = course(run(tmp_path / "a", {0: [0.0] * 4, 10: [0, 1, 0, 1], 20: [1, 0.5, 1, 0], 30: [0.0] * 4}))
    assert one.peak_steps == (20, 10)
    # Even problems as they were at step 10, odd ones as at step 20: what was best by luck is not counted.
    assert one.peak.tolist() == [0, 0.5, 0, 0]
    np.testing.assert_allclose(one.terminal, [1 / 3, 1.5 / 3, 1 / 3, 1 / 3])


def test_of_equal_checkpoints_the_earliest_is_chosen_though_rounding_tells_them_apart(tmp_path):
    # Of three samples each: nine of twelve are right in either half both times, whose thirds add up to less than 3.
    thirds, whole = np.repeat([1, 1 / 3, 1, 2 / 3], 2).tolist(), np.repeat([1.0, 0.0, 1.0, 1.0], 2).tolist()
    for first, second in ((thirds, whole), (whole, thirds)):
        one = course(run(tmp_path / "a", {0: [0.0] * 8, 10: first, 20: second, 30: [0.0] * 8}))
        assert one.peak_steps == (10, 10)


def test_the_highest_of_many_equal_checkpoints_gains_nothing_by_luck(tmp_path):
    rng = np.random.default_rng(0)
    noise = [
        {step: [float(x) for x in rng.random(60) < 0.5] for step in range(0, 500, 10)} for _ in range(20)
    ]
    ends = [course(run(tmp_path / str(k), one)) for k, one in enumerate(noise)]
    highest = np.mean([end.right.mean(axis=1).max() for end in ends])
    assert highest > 0.6  # what the highest of 49 shows
    error = np.sqrt(0.25 / (20 * 60))
    assert np.mean([end.peak.mean() for end in ends]) == pytest.approx(0.5, abs=5 * error)


def test_a_cliff_is_a_drop_whose_interval_excludes_zero_and_that_counts_beside_the_gain(tmp_path):
    falls = course(
        run(tmp_path / "falls", {0: share(2), 10: share(18), **{s: share(3) for s in (20, 30, 40)}})
    )
    stays = course(run(tmp_path / "stays", {0: share(2), **{s: share(18) for s in (10, 20, 30, 40)}}))
    assert falls.peak.mean() == 0.9 and falls.terminal.mean() == pytest.approx(0.15)
    assert drop_of([falls]).mean == pytest.approx(0.75) and is_cliff([falls]) and not is_cliff([stays])
    # A sure drop of 5 points after a gain of 90: less than a tenth.
    of = 400
    little = {0: share(20, of), 10: share(380, of), **{s: share(360, of) for s in (20, 30, 40)}}
    small = course(run(tmp_path / "small", little))
    assert drop_of([small]).low > 0 and not is_cliff([small])
    # A tenth itself, 8 of 80 points, though 0.1 * 0.8 is more than 0.08 as floats.
    tenth = {0: share(10, 100), 10: share(90, 100), **{s: share(82, 100) for s in (20, 30, 40)}}
    assert is_cliff([course(run(tmp_path / "tenth", tenth))])
    assert is_cliff([falls, falls, falls]) and is_cliff([falls, small]) is None  # not of as many problems


def test_what_is_missing_is_said_in_words(tmp_path):
    two = run(tmp_path / "two", {0: share(2), 10: share(3), 20: share(4)})
    assert course(two) is None and why_none(two).endswith("there are 2.")
    assert "none is recorded" in why_none(run(tmp_path / "none", {0: share(2)}))
    other = [evaluation(step, 0.5, per_problem=share(2), data=str(step)) for step in (0, 10, 20, 30)]
    mixed = read_run(
        write_run(tmp_path / "mixed", about=config(steps=30), lines=[metrics(30)], evaluations=other)
    )
    assert course(mixed) is None and why_none(mixed).endswith("there is 1.")


def test_an_end_above_the_peak_of_the_halves_is_above(tmp_path):
    # Each half chose a step at which the other has little: 0% beside a third at the end.
    odd = run(tmp_path / "a", {0: [0, 0], 10: [1, 0], 20: [0, 1], 30: [0, 0]})
    assert "terminal 33.3% (steps 10, 20, 30), 33.3 points above: no cliff" in in_words(odd)[-1]


def test_a_run_that_was_stopped_early_has_a_course_and_says_so(tmp_path):
    early = course(run(tmp_path / "early", {s: share(5) for s in (0, 10, 20, 30)}, steps=100))
    assert not early.finished and early.terminal.mean() == 0.25


def test_a_loss_of_form_is_told_apart_from_a_loss_of_accuracy_and_by_role(tmp_path):
    kept = {f"role/{role}/{name}": 0.0 for role in ("generator", "aggregator") for name in SHARES}
    kept |= {f"role/{role}/length": 10.0 for role in ("generator", "aggregator")}
    lost = {
        "role/aggregator/unreadable_share": 0.21,
        "role/generator/truncated_share": 0.3,
        "role/aggregator/length": 21.0,
        "repeated/generator": 0.5,
    }

    def of(last, first=kept, steps=(1, 2, 3, 4)):
        lines = [metrics(step, **(first if step == 1 else last)) for step in steps]
        return form_lost(read_run(write_run(tmp_path / "a", about=config(), lines=lines, evaluations=[])))

    assert of(kept) == []
    assert sorted(of({**kept, **lost}, {**kept, "repeated/generator": 0.1})) == [
        "length (aggregator)", "readability (aggregator)", "repetition (generator)", "truncation (generator)",
    ]  # fmt: skip
    assert of({**kept, "repeated/generator": 0.3}, {**kept, "repeated/generator": 0.1}) == [
        "repetition (generator)"
    ]
    assert of({**kept, "repeated/generator": 0.25}, {**kept, "repeated/generator": 0.1}) == []
    assert of({**kept, **lost}, steps=(1, 2)) == []  # too few steps to say
    assert form_of([run(tmp_path / "b", {0: share(1)})]) == "kept; repetition not recorded"
    bare = read_run(write_run(tmp_path / "c", about=config(), lines=[], evaluations=[]))
    assert form_of([bare]) == "not recorded"


def test_the_form_of_a_run_whose_alarms_are_known_is_what_they_say(tmp_path):
    """Of 90 steps every other has a long answer at the end: in 40 of them, thinned out, the last three are short."""
    key = "role/generator/length"
    lines = [metrics(step, **{key: 10.0 if step < 81 else 90.0}) for step in range(1, 91)]
    one = read_run(write_run(tmp_path / "a", about=config(steps=90), lines=lines, evaluations=[]))
    kept = tuple({**line, key: 10.0} for line in one.metrics[::3])
    thinned = dataclasses.replace(one, metrics=kept, alarms=None)
    told = [alarm.to_json() | {"until": alarm.until} for alarm in one.watch.alarms]
    assert "length (generator)" in form_lost(one) and "length (generator)" not in form_lost(thinned)
    assert form_lost(dataclasses.replace(thinned, alarms=tuple(told))) == form_lost(one)


SHARES = "unreadable_share", "truncated_share"
