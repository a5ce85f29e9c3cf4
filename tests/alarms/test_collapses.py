"""Alarms over runs that were made: healthy ones are left in peace, each collapse is told before its last accuracy.

The fixtures are the thinned lines of runs of configs/micro.py; `make.py` beside them says how they were thinned, and
each says in `what` which command it was. Thresholds were set by the runs CALIBRATION; TESTED were made afterwards, of
other seeds, and set none. The runs LONG, of 200 steps, tested those thresholds and then set one anew; seeds 2, and seed
1 of the token-matched agent, were made after that (docs/alarms.md).
"""

import json
from pathlib import Path

import pytest

from marl_jax.alarms.monitors import MONITORS
from marl_jax.alarms.watch import judge
from marl_jax.run_folder.json_lines import read_lines
from marl_jax.study import run_sentences
from marl_jax.study.record import Run

FIXTURES = Path(__file__).parents[1] / "fixtures" / "alarms"


def read(name):
    """(rows, evaluations) of a thinned run."""
    data = json.loads((FIXTURES / f"{name}.json").read_text())
    columns = data["columns"]
    count = len(columns["step"])
    rows = [
        {key: values[i] for key, values in columns.items() if values[i] is not None} for i in range(count)
    ]
    return rows, data["evaluations"]


def names(kind):
    return sorted(path.stem for path in FIXTURES.glob(f"{kind}-*.json"))


CALIBRATION, TESTED = names("calibration"), names("tested")


def told(watch):
    return [(alarm.monitor.name, alarm.who, alarm.step) for alarm in watch.alarms]


def test_healthy_runs_are_left_in_peace():
    assert CALIBRATION and TESTED
    for name in CALIBRATION + TESTED:
        *_, last = read(name)[1]
        assert last["difference"]["mean"] > 0, name
        assert last["split"] == ("test" if name in TESTED else "val"), name
    false = {name: found for name in CALIBRATION + TESTED if (found := told(judge(*read(name))))}
    assert false == {}


# Of the study, 200 steps each. {run: the alarms at the windows that the fixture keeps}
LONG = {
    **{
        f"long-{cell}-shared-{seed}": []
        for cell in ("single", "single_matched", "token_matched")
        for seed in (0, 1, 2)
    },
    **{f"long-orch_workers-shared-{seed}": [] for seed in (1, 2)},
    # Plans that cannot be read: a quarter for some steps, half of them, all of them.
    "long-orch_workers-isolated-0": ["readability orchestrator"],
    "long-orch_workers-isolated-1": ["length orchestrator", "readability orchestrator"],
    "long-orch_workers-shared-0": ["length orchestrator", "readability orchestrator"],
    "long-orch_workers-isolated-2": ["length orchestrator", "readability orchestrator"],
    # Aggregators that pick without looking, or write until they are cut off.
    "long-voting-isolated-0": [f"{name} aggregator" for name in ("entropy", "length", "truncation")],
    "long-voting-isolated-1": [
        f"{name} aggregator" for name in ("entropy", "length", "one choice", "truncation")
    ],
    "long-voting-shared-0": ["length aggregator", "one choice aggregator"],
    "long-voting-shared-1": ["length aggregator", "one choice aggregator"],
    # Two thirds and a third of whose picks cannot be read at the end.
    "long-voting-isolated-2": [
        f"{name} aggregator" for name in ("entropy", "length", "one choice", "readability", "truncation")
    ],
    "long-voting-shared-2": [f"{name} aggregator" for name in ("length", "one choice", "readability")],
    # Evaluators that always say Correct.
    **{
        f"long-eval_opt-isolated-{seed}": [
            "calls ",
            *(f"{name} evaluator" for name in ("entropy", "length", "one choice")),
        ]
        for seed in (0, 1)
    },
    "long-eval_opt-isolated-2": ["calls ", "length evaluator", "one choice evaluator"],
    **{
        f"long-eval_opt-shared-{seed}": ["calls ", "capture p0", "length evaluator", "one choice evaluator"]
        for seed in (0, 1, 2)
    },
}


def test_the_long_runs_are_all_there_and_all_gained_on_test():
    assert names("long") == sorted(LONG)
    for name in LONG:
        *_, last = read(name)[1]
        assert (last["split"], last["mode"], last["step"]) == ("test", "trained", 200), name
        assert last["difference"]["low"] > 0.3, name


@pytest.mark.parametrize("name", LONG)
def test_a_long_run_is_told_of_the_role_that_lost_its_work_and_of_no_other(name):
    found = {f"{monitor} {who}": step for monitor, who, step in reversed(told(judge(*read(name))))}
    assert sorted(found) == LONG[name]
    assert min(found.values(), default=0) < 200


def test_a_role_that_is_sure_because_it_is_right_is_no_alarm():
    """The synthesizer of orch_workers copies what its workers agree on."""
    rows, evaluations = read("long-orch_workers-shared-1")
    entropy = [row["role/synthesizer/entropy"] for row in rows]
    assert min(entropy) < 0.05 * entropy[0] and rows[-1]["reward"] > 3 * rows[0]["reward"]
    assert told(judge(rows, evaluations)) == []


# {run: the alarms that its cause must raise}
COLLAPSES = {
    "collapse-copying": [
        *((name, "aggregator") for name in ("paid for less", "length", "truncation")),
        ("below base", ""),
    ],
    "collapse-evaluator": [("one choice", "evaluator"), ("calls", "")],
    "collapse-orchestrator": [("readability", "orchestrator"), ("length", "orchestrator")],
    "collapse-picker": [("one choice", "aggregator"), ("nothing to learn", "aggregator"), ("below base", "")],
    "collapse-rate": [
        *(
            (name, role)
            for name in ("readability", "truncation", "length")
            for role in ("generator", "aggregator")
        ),
        *((name, "generator") for name in ("nothing to learn", "entropy")),
        ("below base", ""),
    ],
    "collapse-capture": [("capture", "p0")],
    "collapse-length": [("length", "generator")],
    "collapse-sampler": [("sampler apart", "generator")],
    # At six times the learning rate, under an anchor: the gradient of one token is most of that of step 155.
    "collapse-jolt": [("jolt", "p0")],
    "collapse-small-batch": [("below base", ""), ("one choice", "aggregator"), ("readability", "aggregator")],
}


@pytest.mark.parametrize("name", COLLAPSES)
def test_a_collapse_is_told_before_its_last_accuracy_shows_it(name):
    rows, evaluations = read(name)
    found = {(alarm.monitor.name, alarm.who): alarm for alarm in judge(rows, evaluations).alarms}
    for key in COLLAPSES[name]:
        assert key in found, (key, sorted(found))
        assert found[key].step < evaluations[-1]["step"]
        assert found[key].text


def test_a_run_that_gained_by_an_evaluator_that_always_says_correct_is_not_called_better():
    """15 steps of eval_opt-shared-xs-math: from 45% to 76%, while the evaluator stops to look."""
    rows, evaluations = read("collapse-evaluator")
    assert "eval_opt-shared-xs-math" in json.loads((FIXTURES / "collapse-evaluator.json").read_text())["what"]
    assert evaluations[-1]["step"] == 15 and evaluations[-1]["difference"]["low"] > 0.2
    run = Run(Path("run"), {"config": {"steps": 15}}, tuple(rows), tuple(evaluations))
    said = " ".join(run_sentences.in_words(run))
    assert "better" not in said and "one choice (evaluator) since step 12" in said
    assert (
        "balanced accuracy of 0.49" in dict(run_sentences.alarms(run))["one choice (evaluator) since step 12"]
    )


# Constructed rows, not runs: twelve steps, the last with an accuracy; the one number leaves its place at step 6.
CONSTRUCTED = {
    ("one choice", "picker"): {
        "choice/picker/calls": 60, "choice/picker/commonest": (0.4, 1.0), "choice/picker/balanced_accuracy": 0.5
    },
    ("calls", ""): {"episodes": 64, "calls": (128, 384)},
    ("entropy", "generator"): {"role/generator/entropy": (0.3, 0.001)},
    ("readability", "generator"): {"role/generator/unreadable_share": (0.01, 0.5)},
    ("length", "generator"): {"role/generator/length": (20.0, 55.0)},
    ("truncation", "generator"): {"role/generator/truncated_share": (0.0, 0.6)},
    ("copying", "worker"): {"copied/worker": (0.1, 0.9), "role/worker/length": 30.0},
    ("capture", "p0"): {"gradient/p0/share/judge": (0.5, 0.97), "gradient/p0/share/generator": (0.5, 0.03)},
    ("nothing to learn", "judge"): {
        "reward": 0.4, "groups/judge/groups": 32, "groups/judge/singletons": (0, 4),
        "groups/judge/zero_variance": (6, 28),
    },
    ("paid for less", "judge"): {"reward": (0.5, 0.3), "reward/judge": (0.2, 0.8)},
    ("sampler apart", "generator"): {"role/generator/chi2": (1e-6, 0.4)},
    ("jolt", "p0"): {"policy/p0/update_norm": (0.01, 0.02), "policy/p0/learning_rate": 3e-4},
}  # fmt: skip


def constructed(columns, turn=6, count=12):
    """Rows of a little noise, the second value from `turn` on."""
    noise = [1 + 0.02 * (-1) ** i for i in range(count)]
    at = lambda value, i: value[i + 1 >= turn] * noise[i] if isinstance(value, tuple) else value
    return [{"step": i + 1, **{key: at(value, i) for key, value in columns.items()}} for i in range(count)]


@pytest.mark.parametrize("key", CONSTRUCTED, ids=lambda key: key[0])
def test_a_number_that_leaves_its_place_is_told_and_one_that_stays_is_not(key):
    columns = CONSTRUCTED[key]
    (alarm,) = judge(constructed(columns)).alarms
    assert (alarm.monitor.name, alarm.who) == key and 6 <= alarm.step <= 10 and alarm.text
    stays = {name: value[0] if isinstance(value, tuple) else value for name, value in columns.items()}
    assert judge(constructed(stays)).alarms == []


@pytest.mark.parametrize(
    "updates, rates, told",
    [
        ([0.04, 0.01, 0.01, 0.01, 0.018], [1e-3] * 5, True),
        ([0.04, 0.01, 0.01, 0.01, 0.017], [1e-3] * 5, False),  # not 1.8 times as long as the one before
        ([0.08, 0.01, 0.01, 0.01, 0.019], [1e-3] * 5, False),  # not a quarter of the first
        ([0.04, 0.01, 0.01, 0.01, 0.02], [1e-3] * 4 + [2e-3], False),  # the rate has doubled
        ([0.0, 0.04, 0.01, 0.01, 0.02], [1e-3] * 5, True),  # nothing was learned in the first step
        ([0.04, 0.01, 0.01, 0.0, 0.02], [1e-3] * 5, False),  # nor in the one before
    ],
)
def test_a_jolt_is_long_beside_the_update_before_and_the_first_one(updates, rates, told):
    columns = zip(updates, rates)
    rows = [
        {"step": i + 1, "policy/p0/update_norm": update, "policy/p0/learning_rate": rate}
        for i, (update, rate) in enumerate(columns)
    ]
    found = [(alarm.monitor.name, alarm.who, alarm.step) for alarm in judge(rows).alarms]
    assert found == ([("jolt", "p0", 5)] if told else [])


def test_the_lines_of_an_earlier_version_are_read():
    rows = list(read_lines(FIXTURES.parent / "old_run" / "run" / "metrics.jsonl"))
    assert rows and not any(key.startswith("choice/") for row in rows for key in row)
    judge(rows, read_lines(FIXTURES.parent / "old_run" / "run" / "eval.jsonl"))


def test_every_monitor_has_a_collapse_that_was_made_or_one_that_is_constructed():
    made = {name for keys in COLLAPSES.values() for name, _ in keys}
    assert {monitor.name for monitor in MONITORS} - made == {"copying"}
    assert "copying" in {name for name, _ in CONSTRUCTED}
