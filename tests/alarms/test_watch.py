"""Alarms are a pure function of the rows: since when, until when, and the same whoever reads them and when."""

import json
from pathlib import Path

import pytest

from marl_jax.alarms.monitors import MONITORS, History
from marl_jax.alarms.watch import Watch, judge
from marl_jax.run_folder.json_lines import plain

FLAT = {
    "groups/judge/groups": 10,
    "groups/judge/singletons": 0,
    "groups/judge/zero_variance": 10,
    "reward": 0.5,
}
ALONE = {**FLAT, "groups/judge/singletons": 10, "groups/judge/zero_variance": 0}


def rows(count, **columns):
    """Lines by column: a value for all steps, or one for each."""
    at = lambda value, i: value[i] if isinstance(value, list) else value
    return [{"step": i + 1, **{key: at(value, i) for key, value in columns.items()}} for i in range(count)]


def evaluation(step, low, high, **more):
    by = None if step == 0 else {"mean": (low + high) / 2, "low": low, "high": high}
    return {"step": step, "split": "val", "mode": "trained", "accuracy": 0.5, "difference": by, **more}


def told(watch):
    return [(alarm.monitor.name, alarm.who, alarm.step, alarm.until) for alarm in watch.alarms]


def test_an_alarm_begins_where_its_window_is_full_of_it_and_ends_where_it_is_not():
    flat = [3, 10, 10, 10, 10, 2, 10, 10, 10, 10]
    lines = rows(10, **FLAT | {"groups/judge/zero_variance": flat})
    assert told(judge(lines[:3])) == []
    assert told(judge(lines[:4])) == [("nothing to learn", "judge", 4, None)]
    assert told(judge(lines[:6])) == [("nothing to learn", "judge", 4, 6)]
    assert told(judge(lines)) == [("nothing to learn", "judge", 4, 6), ("nothing to learn", "judge", 9, None)]
    watch = Watch()
    assert [len(watch.row(line)) for line in lines] == [0] * 3 + [1] + [0] * 6  # it is told once
    assert judge(lines[:6]).holding == [] and len(judge(lines).holding) == 1


def test_it_says_its_numbers_what_they_mean_and_what_to_look_at():
    (alarm,) = judge(rows(5, **FLAT)).alarms
    assert alarm.to_json() == {
        "name": "nothing to learn",
        "who": "judge",
        "step": 3,
        "evidence": {"share": 1.0, "groups": 30.0},
    }
    assert alarm.title == "nothing to learn (judge)"
    assert alarm.text.startswith("100% of 30 groups of judge teach nothing. Calls that are compared")
    assert "Look at entropy and temperature" in alarm.text


def test_an_alarm_of_an_evaluation_stands_in_the_line_of_the_next_step():
    watch = Watch()
    assert watch.evaluation(evaluation(0, 0, 0)) == []
    assert watch.row({"step": 1, "reward": 0.5}) == []
    (begun,) = watch.evaluation(evaluation(1, -0.2, -0.1))
    assert watch.evaluation(evaluation(1, -0.2, -0.1)) == []  # known already
    assert watch.row({"step": 2, "reward": 0.5}) == [begun]
    assert watch.row({"step": 3, "reward": 0.5}) == []
    assert (begun.title, begun.step) == ("below base", 1)


def test_only_evaluations_along_the_run_count():
    others = [{"split": "test"}, {"mode": "single"}, {"checkpoint": "latest"}]
    assert told(judge([], [evaluation(5, -0.2, -0.1, **more) for more in others])) == []


def test_whoever_begins_anew_at_any_moment_says_the_same():
    """A run that was killed reads its rows and goes on; what it writes does not depend on when."""
    lines = rows(12, **FLAT | {"groups/judge/zero_variance": [0] * 4 + [10] * 8, "reward/judge": 0.1 + 0.2})
    points = [
        evaluation(0, 0, 0),
        evaluation(4, -0.3, -0.1),
        evaluation(8, -0.1, 0.1),
        evaluation(12, -0.3, -0.2),
    ]
    events = sorted(
        [(x["step"], 0, x) for x in lines] + [(x["step"], 1, x) for x in points], key=lambda e: e[:2]
    )

    def feed(watch, some):
        return [
            [one.to_json() for one in (watch.evaluation if kind else watch.row)(x)] for _, kind, x in some
        ]

    whole = feed(Watch(), events)
    assert sum(map(len, whole)) == 3  # two, and one of them again in the line after its evaluation
    for cut in range(len(events)):
        on_disk = json.loads(json.dumps(plain([x for *_, x in events[:cut]])))
        kinds = [kind for _, kind, _ in events[:cut]]
        watch = judge(*([x for x, kind in zip(on_disk, kinds) if kind == of] for of in (0, 1)))
        assert feed(watch, events[cut:]) == whole[cut:], cut


def test_what_is_not_there_is_not_judged():
    assert told(judge([])) == told(judge(rows(8, reward=0.5), [evaluation(0, 0, 0)])) == []
    holes = rows(8, **FLAT | {"groups/judge/zero_variance": [10, None, 10, 10, None, 10, 10, None]})
    assert told(judge(holes)) == []  # never WINDOW numbers in a row


def test_times_are_never_read():
    past = History()
    for line in rows(6, **{"time/rollout": 1.0, "role/judge/entropy": 0.5}):
        past.row(line)
    assert past.names("(.*)") == ["step", "role/judge/entropy"]


@pytest.mark.parametrize(
    ("columns", "alarm"),
    [
        ({"role/judge/unreadable_share": [0.1, *[0.3] * 5]}, "readability"),
        ({"role/judge/unreadable_share": [0.1, *[0.2999] * 5]}, None),
        ({**FLAT, "reward": 0.9499}, "nothing to learn"),
        ({**FLAT, "reward": 0.95}, None),
        ({**ALONE, "role/judge/advantage_zero_share": 0.95}, "nothing to learn"),
        ({**ALONE, "role/judge/advantage_zero_share": 0.9499}, None),  # advantages.singleton=reward
        ({"reward": [*[0.6] * 3, *[0.5] * 3], "reward/judge": [*[0.1] * 3, *[0.2] * 3]}, "paid for less"),
        ({"reward": [*[0.6] * 3, *[0.51] * 3], "reward/judge": [*[0.1] * 3, *[0.2] * 3]}, None),
    ],
)
def test_a_limit_that_is_met_but_for_rounding_is_met(columns, alarm):
    assert [name for name, *_ in told(judge(rows(6, **columns)))] == ([alarm] if alarm else [])


def test_a_number_that_began_at_zero_has_no_multiple():
    assert told(judge(rows(6, **{"role/judge/entropy": 0.0, "role/judge/length": [0, 9, 9, 9, 9, 9]}))) == []


@pytest.mark.parametrize(
    ("episodes", "calls"),
    [([0, 4, 4, 4, 4], [0, 4, 4, 4, 4]), ([4, 0, 0, 0, 0], [4, 0, 0, 0, 0]), (4, [0, 4, 4, 4, 4])],
    ids=["none at first", "none at last", "no calls at first"],
)
def test_steps_without_episodes_or_calls_have_no_ratio_to_compare(episodes, calls):
    assert told(judge(rows(5, episodes=episodes, calls=calls))) == []


def test_a_role_that_does_not_train_is_no_rival_for_a_policy():
    alone = rows(6, **{"gradient/p0/share/coder": 1.0, "gradient/p0/share/planner": 0.0})
    assert told(judge(alone)) == []
    both = rows(6, **{"gradient/p0/share/coder": 0.95, "gradient/p0/share/planner": 0.05})
    assert told(judge(both)) == [("capture", "p0", 3, None)]


def test_a_frozen_role_has_nothing_to_learn_and_is_not_told_so():
    """Its groups are counted as others are; numbers of its tokens are of roles that train alone."""
    training = {"role/generator/entropy": 0.3}
    assert told(judge(rows(6, **FLAT, **training))) == []
    assert told(judge(rows(6, **FLAT, **training, **{"role/judge/entropy": 0.3}))) == [
        ("nothing to learn", "judge", 3, None)
    ]


def test_the_steps_of_a_phase_are_compared_with_its_own():
    lines = rows(8, calls=[30] * 4 + [10] * 4, episodes=10)
    assert told(judge(lines)) == [("calls", "", 6, None)]
    phases = [line | {"phase": "play" if line["step"] < 5 else "read"} for line in lines]
    assert told(judge(phases)) == []


@pytest.mark.parametrize("monitor", MONITORS, ids=lambda monitor: monitor.name)
def test_every_monitor_is_told_whole(monitor):
    assert "{" not in monitor.condition and monitor.means.endswith(".") and not monitor.where.endswith(".")


def test_the_page_says_of_every_monitor_what_the_code_says():
    page = (Path(__file__).parents[2] / "docs" / "alarms.md").read_text()
    for one in MONITORS:
        assert f"| {one.name} | {one.condition} | {one.means} | {one.where} |" in page, one.name
