"""What is read and worked out from a run's folder: episodes, shares, warnings."""

import numpy as np
from study_folders import config, evaluation, metrics, write_run

from marl_jax.study import record, run_sentences, run_tables
from marl_jax.study.record import Series, find_runs, read_run
from marl_jax.study.report import drawing
from marl_jax.study.report.html_page import write_report


def test_shares_of_gradient_mass_are_norms_over_their_sum():
    norms = {
        "a": Series(np.array([1.0, 2, 3]), np.array([1.0, 3.0, 0.0])),
        "b": Series(np.array([1.0, 3]), np.array([3.0, 0.0])),
    }
    shares = record.gradient_shares(norms)
    np.testing.assert_array_equal(shares["a"].values, [0.25, 1.0, np.nan])
    np.testing.assert_array_equal(shares["b"].values, [0.75, 0.0, np.nan])


def test_a_role_of_several_policies_has_a_curve_for_each(tmp_path):
    line = {
        "step": 1,
        "reward/g": 0.5,
        "gradient/p1/norm/g": 2.0,
        "gradient/p0/norm/g": 1.0,
        "gradient/p0/norm/a": 3,
    }
    about = config()
    about["config"]["policies"]["map"] = {"a": "p0", "g/0": "p0", "g/1": "p1"}
    run = read_run(write_run(tmp_path / "run", about=about, lines=[line]))
    assert run.roles == ("a", "g")
    norms = record.gradient_norms(run)
    assert {name: series.values.tolist() for name, series in norms.items()} == {
        "a": [3.0], "g (p1)": [2.0], "g (p0)": [1.0],
    }  # fmt: skip
    assert next(iter(norms)) == "a"


def test_amplification_is_that_of_parallel_slots_where_they_were_kept_apart(tmp_path):
    slots = {
        "gradient/p0/slots/generator/amplification": 2.5,
        "gradient/p1/slots/aggregator/amplification": 1.0,
        **{f"gradient/p0/slots/generator/norm/{slot}": 1.0 for slot in range(3)},
    }
    lines = [metrics(step) for step in (1, 2)]
    apart = read_run(write_run(tmp_path / "apart", lines=[line | slots for line in lines]))
    found = lambda run: {
        name: [one.values.tolist() for one in both] for name, both in record.amplifications(run).items()
    }
    assert found(apart) == {"generator": [[2.5, 2.5], [3, 3]]}
    # Of a role on two policies each has its own: one slot on the second is no reason to drop three on the first.
    slots = {
        f"gradient/{policy}/slots/generator/amplification": k for policy, k in (("p0", 2.5), ("p1", 1.0))
    }
    partial = read_run(write_run(tmp_path / "partial", lines=[line | slots for line in lines]))
    assert found(partial)["generator (p0)"][0] == [2.5, 2.5] and len(found(partial)) == 1
    isolated = read_run(write_run(tmp_path / "isolated", lines=lines))
    assert record.amplifications(isolated) == {}
    shared = read_run(
        write_run(tmp_path / "shared", lines=[metrics(step, isolated=False) for step in (1, 2)])
    )
    assert found(shared) == {"p0": [[1.4, 1.4], [2, 2]]}


def test_results_that_keep_no_number_of_episodes_have_that_of_their_configuration(tmp_path):
    lines = [{"step": step, "reward": 0.5} for step in (1, 2)]
    bare = read_run(write_run(tmp_path / "bare", lines=lines))
    sizes = bare.config["data"]["problems"] * bare.config["rollout"]["samples"]
    assert record.episodes(bare).values.tolist() == [sizes, sizes]
    counted = read_run(write_run(tmp_path / "counted", lines=[line | {"episodes": 5} for line in lines]))
    assert record.episodes(counted).values.tolist() == [5, 5]
    again = read_run(write_run(tmp_path / "again", lines=[line | {"draws/kept": 0.5} for line in lines]))
    assert not len(record.episodes(again).steps)
    about = config()
    about["config"]["rollout"] = None
    untold = read_run(write_run(tmp_path / "untold", about=about, lines=lines))
    assert not len(record.episodes(untold).steps)


def test_the_same_warning_of_many_steps_is_told_once(tmp_path):
    lines = [{"step": k, "warnings": [f"gap 1e-0{k} apart", "other"][: 1 + (k == 2)]} for k in (1, 2, 3)]
    lines[1] |= {"failed": 3, "policy/p0/skipped": 1}
    lines[2] |= {"failed": 2, "policy/p0/skipped": 2}
    about = config(changes=[["config.steps: 1 -> 2"]])
    assert run_sentences.warnings(read_run(write_run(tmp_path / "run", about=about, lines=lines))) == [
        "3 steps, 1 to 3; the last: gap 1e-03 apart",
        "step 2: other",
        "5 episodes ended by an error",
        "policy p0: 2 updates were skipped for gradients that were not finite",
        "resumed with another configuration: config.steps: 1 -> 2",
    ]


def test_a_running_mean_looks_back_only_and_past_gaps():
    values = np.array([2.0, 4.0, np.nan, 6.0, 8.0])
    np.testing.assert_allclose(drawing.running_mean(values, 3), [2, 3, 3, 5, 7])
    np.testing.assert_array_equal(drawing.running_mean(np.array([np.nan, 1.0]), 1), [np.nan, 1.0])


def test_evaluations_of_other_casts_and_noise_are_told_apart(tmp_path):
    alone = {"split": "test", "mode": "single_transfer", "checkpoint": "10", "seed": 7}
    records = [
        evaluation(10, 0.5, role="generator", **alone),
        evaluation(10, 0.4, role="aggregator", **alone),
    ]
    records += [evaluation(10, 0.6, **alone | {"mode": "trained", "seed": 8})]
    run = read_run(write_run(tmp_path / "run", about=config(), evaluations=records))
    modes = [row[3] for row in run_tables.evaluations(run).rows]
    assert modes == ["single_transfer generator", "single_transfer aggregator", "trained noise 8"]


def test_each_role_is_shown_by_its_own_work_at_the_first_and_the_last_evaluation(tmp_path):
    def roles(own, pick):
        generator = {"kind": "solver", "calls": 9, "unreadable": 0.25, "accuracy": own}
        return {
            "generator": generator,
            "aggregator": {"kind": "picker", "pick_when_possible": pick, "possible": 4},
        }

    records = [evaluation(0, 0.4, roles=roles(0.3, None)), evaluation(9, 0.5, roles=roles(0.45, 0.8))]
    table = run_tables.own_work(read_run(write_run(tmp_path / "run", evaluations=records)))
    assert table.head == (
        "", "generator\nstep 0", "generator\nstep 9", "aggregator\nstep 0", "aggregator\nstep 9",
    )  # fmt: skip
    assert table.rows == [
        ("own answer or verdict right", "30.0%", "45.0%", "–", "–"),
        ("right picks where one was possible", "–", "–", "–", "80.0%"),
        ("unreadable", "25.0%", "25.0%", "–", "–"),
        ("calls", "9", "9", "–", "–"),
        ("picks with a right candidate", "–", "–", "4", "4"),
    ]
    assert (
        run_tables.own_work(
            read_run(write_run(tmp_path / "none", evaluations=[evaluation(0, 0.4, roles={})]))
        ).rows
        == []
    )


def test_a_group_of_one_teaches_where_its_advantage_is_its_reward(tmp_path):
    counts = {
        "groups/generator/groups": 8,
        "groups/generator/singletons": 4,
        "groups/generator/zero_variance": 2,
    }
    for singleton, share in (("zero", "75.0%"), ("reward", "25.0%")):
        about = config()
        about["config"]["advantages"] = {"singleton": singleton}
        run = read_run(write_run(tmp_path / singleton, about=about, lines=[{"step": 1, **counts}]))
        rows = [row for table in run_tables.tables(run) for row in table.rows]
        assert [row[1] for row in rows if row[0] == "groups that teach nothing"] == [share]


def judged(accuracy, recall_right, recall_wrong):
    """A judge's numbers in an evaluation."""
    choice = {"recall_wrong": recall_wrong, "balanced_accuracy": (recall_right + recall_wrong) / 2}
    return {
        "evaluator": {"kind": "judge", "calls": 64, "unreadable": 0.0, "accuracy": accuracy, "choice": choice}
    }


def test_a_gain_under_an_evaluator_that_always_says_correct_is_not_called_better(tmp_path):
    """A run whose accuracy rose: 57 of 107 verdicts Correct at first, 64 of 64 at the end."""
    by = {"mean": 0.1, "low": 0.04, "high": 0.16}
    honest, constant = judged(72 / 107, 36 / 50, 36 / 57), judged(51 / 64, 1.0, 0.0)
    records = [evaluation(0, 0.5, roles=honest), evaluation(15, 0.6, by, roles=constant)]
    chosen = lambda step: (64 / 3, 1.0, 0.5) if step > 12 else (107 / 3, 57 / 107, 0.676)
    names = [f"choice/evaluator/{name}" for name in ("calls", "commonest", "balanced_accuracy")]
    lines = [
        {"step": step, "reward": 0.5, "reward/evaluator": 0.5} | dict(zip(names, chosen(step)))
        for step in range(1, 16)
    ]
    run = read_run(write_run(tmp_path / "run", lines=lines, evaluations=records))
    ((name, text),) = run_sentences.alarms(run)
    assert name == "one choice (evaluator) since step 15"
    assert text.startswith(
        "evaluator makes the same choice in 100% of 64 calls, at a balanced accuracy of 0.50."
    )
    said = " ".join(run_sentences.in_words(run))
    assert "better" not in said and "accuracy is higher" in said and name in said
    rows = {row[0]: row[1:] for row in run_tables.own_work(run).rows}
    assert rows["own answer or verdict right"] == ("67.3%", "79.7%")
    assert rows["wrong answers that were rejected"] == ("63.2%", "0.0%")  # 36 of 57, none of 13
    assert rows["balanced accuracy"] == ("67.6%", "50.0%")  # with 36 of 50 and 51 of 51
    page = write_report(run.folder).read_text()
    assert page.index(name) < page.index("<figure") and "became better" not in page


def test_an_alarm_that_comes_again_is_one_with_several_marks(tmp_path):
    """Unreadable at steps 11 to 16 and from 25 on, and cut off from 8 on."""
    unreadable = lambda step: 0.9 if 10 < step < 17 or step > 24 else 0.0
    cut = lambda step: 0.9 if step > 7 else 0.0
    lines = [
        metrics(step)
        | {
            "role/generator/unreadable_share": unreadable(step),
            "role/generator/truncated_share": cut(step),
        }
        for step in range(1, 31)
    ]
    run = read_run(write_run(tmp_path / "run", lines=lines, evaluations=[]))
    names = [name for name, _ in run_sentences.alarms(run)]
    times = {str(number): [] for number in range(1, len(names) + 1)}
    for mark in run_sentences.breaks(run):
        assert names[int(mark["number"]) - 1].startswith(mark["title"])
        times[mark["number"]].append(mark["step"])
    assert names == [
        "truncation (generator) since step 8",
        "readability (generator) since step 25 (1 before, the first at step 11)",
    ]
    assert times == {"1": [8], "2": [11, 25]}


def test_curves_mark_where_episodes_and_updates_were_first_and_last_lost(tmp_path):
    skips = (0, 1, 1, 2, 2)
    lines = [{"step": k, "failed": int(k == 3), "policy/p0/skipped": n} for k, n in enumerate(skips, 1)]
    marks = run_sentences.breaks(read_run(write_run(tmp_path / "run", lines=lines)))
    assert [(mark["step"], mark["number"], mark["title"]) for mark in marks] == [
        (3, "!", "episodes ended by an error"),
        (2, "!", "updates of policy p0 skipped"),
        (4, "!", "updates of policy p0 skipped"),
    ]


def test_peak_and_terminal_say_why_there_are_none(tmp_path):
    some = [evaluation(step, 0.5) for step in (0, 10, 20)]
    run = read_run(write_run(tmp_path / "run", lines=[metrics(s) for s in range(1, 21)], evaluations=some))
    (sentence,) = [text for text in run_sentences.in_words(run) if "Peak" in text]
    assert sentence.startswith("Peak and terminal accuracy need 3 evaluations after the start")
    assert sentence.endswith("there are 2.")
    (row,) = run_tables.runs_table({"a": run}).rows
    assert "–\n2 of 3 evaluations" in row
    # Those that are on other problems than the last do not count, in sentence and table alike.
    other = evaluation(10, 0.5, data="other")
    changed = write_run(tmp_path / "changed", lines=[metrics(30)], evaluations=[*some[:1], other, some[2]])
    alone = [evaluation(step, 1.0, per_problem=[1.0], problems=1) for step in (0, 10, 20, 30)]
    one = write_run(tmp_path / "one", lines=[metrics(30)], evaluations=alone)
    for folder, words, short in (
        (changed, "there is 1.", "1 of 3 evaluations"),
        (one, "there are 3 of one problem.", "one problem"),
    ):
        run = read_run(folder)
        assert [text for text in run_sentences.in_words(run) if text.endswith(words)]
        assert f"–\n{short}" in run_tables.runs_table({"a": run}).rows[0]


def test_the_table_of_runs_shows_the_test_split_where_it_was_played(tmp_path):
    along = [evaluation(0, 0.5), evaluation(20, 0.6)]
    more = {"split": "test", "seed": 7, "data": "t"}
    gained = {"mean": 0.25, "low": 0.125, "high": 0.375}
    played = [evaluation(0, 0.5, mode="base", **more), evaluation(20, 0.75, gained, **more)]
    for name, records in (("no", along), ("yes", along + played)):
        write_run(tmp_path / name, about=config(steps=20), lines=[metrics(20)], evaluations=records)
    runs = {name: read_run(tmp_path / name) for name in ("no", "yes")}
    table = run_tables.runs_table(runs)
    place = list(table.head).index("test: final,\nover its base")
    assert [row[place] for row in table.rows] == ["–\nnot evaluated", "75.0%\n+25.0 (+12.5 to +37.5)"]


def test_runs_behind_links_are_found_once_and_by_their_own_names_first(tmp_path):
    mine = write_run(tmp_path / "root" / "mine", lines=[metrics(1)])
    write_run(tmp_path / "disk" / "theirs", lines=[metrics(1)])
    (tmp_path / "root" / "latest").symlink_to(mine)
    (tmp_path / "root" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "back").symlink_to(tmp_path / "root")
    assert find_runs(tmp_path / "root", []) == [tmp_path / "root" / "linked" / "theirs", mine]


def test_of_a_run_that_lost_rows_no_alarm_is_known(tmp_path):
    rows = [metrics(step) for step in range(1, 11) if step != 4]
    lost = read_run(write_run(tmp_path / "lost", lines=rows))
    assert run_sentences.no_alarm(lost).startswith("Not judged: alarms need consecutive")
    whole = read_run(write_run(tmp_path / "whole", lines=[metrics(step) for step in range(1, 11)]))
    assert "monitors raised an alarm" in run_sentences.no_alarm(whole)


def test_a_run_that_lost_its_configuration_is_told_of(tmp_path):
    for name in ("whole", "lost", "copied"):
        write_run(tmp_path / name, lines=[metrics(1)], evaluations=[evaluation(0, 0.5)])
    (tmp_path / "lost" / "config.json").unlink()
    for name in ("metrics.jsonl", "lock"):
        (tmp_path / "copied" / name).unlink(missing_ok=True)
    unread: list[str] = []
    assert find_runs(tmp_path, unread) == [tmp_path / "copied", tmp_path / "whole"]
    assert unread == [f"'{tmp_path / 'lost'}' has metrics.jsonl and no config.json: restore it"]


def test_a_damaged_record_of_evaluations_is_told(tmp_path):
    every = 10  # by default
    lines = [metrics(step) for step in range(1, 3 * every + 1)]
    whole = [evaluation(step, 0.5) for step in range(0, 3 * every + 1, every)]
    assert (
        record.lost_evaluations(read_run(write_run(tmp_path / "whole", lines=lines, evaluations=whole))) == []
    )
    damaged = [whole[0], {"step": every}, whole[3]]  # one without its numbers, one gone
    warning = f"eval.jsonl is damaged: it lacks the evaluation of step {every}, {2 * every}"
    for changes, lost in (
        ((), True),
        ([["versions.jax: 1 becomes 2"]], True),
        ([["config.steps: 1 becomes 2"]], False),
    ):
        about = config() | {"changes": changes}
        run = read_run(write_run(tmp_path / "damaged", about=about, lines=lines, evaluations=damaged))
        assert (warning in run_sentences.warnings(run)) == lost


def test_of_several_lines_of_a_step_the_last_counts(tmp_path):
    lines = [metrics(1), metrics(2), metrics(2) | {"reward": 0.25}]
    steps, rewards = read_run(write_run(tmp_path / "run", lines=lines)).series("reward")
    assert steps.tolist() == [1, 2] and rewards[1] == 0.25
