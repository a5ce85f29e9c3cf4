"""Runs of several seeds together: means worked out by hand, intervals over problems and seeds, fair comparisons."""

import numpy as np
import pytest
from study_folders import answers, config, course, evaluation, metrics, policies, run, with_about, write_run

from marl_jax.study import contrasts, seed_tables, seeds
from marl_jax.study.intervals import over_seeds
from marl_jax.study.record import read_run
from marl_jax.study.report.cell_map import cell_map
from marl_jax.study.wording import NONE, plain


def compared(cells):
    """The table of all pairs of these cells."""
    return seed_tables.contrasts(contrasts.pairs_of(cells)[0])


def along(*values):
    """Four evaluations of two problems."""
    return {10 * k: answers(*value) for k, value in enumerate(values)}


RISE = along((0, 0), (1, 0), (1, 1), (1, 0))
FALL = along((0, 1), (1, 1), (0, 0), (0, 0))


def test_runs_are_of_a_cell_where_they_are_equal_but_for_their_seed(tmp_path):
    runs = [
        run(tmp_path / "a", 1, RISE),
        run(tmp_path / "b", 0, RISE),
        run(tmp_path / "copy of b", 0, RISE),
        run(tmp_path / "c", 0, RISE, rollout={"samples": 4}),
        run(tmp_path / "d", 0, RISE, cell="voting-shared-s-math"),
    ]
    runs.append(run(tmp_path / "e", 1, RISE, val="other problems"))
    runs.append(run(tmp_path / "f", None, RISE))  # no seed
    runs.append(
        run(tmp_path / "g", 2, RISE, cell="voting-shared-s-math", engine={"max_prompt": 99, "lanes": 4})
    )
    cells = seeds.by_cell(runs)
    assert [(cell.label, cell.name, [run.folder.name for run in cell.runs]) for cell in cells] == [
        ("voting-isolated-s-math (rollout.samples 8, data val v)", "voting-isolated-s-math", ["b", "a"]),
        ("voting-isolated-s-math (rollout.samples 4)", "voting-isolated-s-math", ["c"]),
        ("voting-shared-s-math (engine.max_prompt 512)", "voting-shared-s-math", ["d"]),
        (
            "voting-isolated-s-math (data val other proble, rollout.samples 8)",
            "voting-isolated-s-math",
            ["e"],
        ),
        ("voting-shared-s-math (engine.max_prompt 99)", "voting-shared-s-math", ["g"]),
    ]


def test_a_second_run_of_a_cell_and_seed_is_told_of_and_a_copy_is_not(tmp_path):
    runs = {
        "a/0": run(tmp_path / "a", 0, RISE),
        "b/0": run(tmp_path / "b", 0, FALL),
        "copy": run(tmp_path / "c", 0, RISE),
        "b/1": run(tmp_path / "d", 1, FALL),
    }
    assert seeds.uncounted(runs) == ["'b/0' is left out of tables of cells: 'a/0' has the same cell and seed"]


def test_a_folder_that_is_called_more_than_its_cell_names_it_and_others_say_their_settings(tmp_path):
    votes = lambda number: {"workflow": {"name": "voting", "settings": {"votes": number}}}
    runs = [
        run(tmp_path / "voting-isolated-s-math" / "seed-0", 0, RISE, **votes(5)),
        run(tmp_path / "voting-isolated-s-math+votes6" / "seed-0", 0, RISE, **votes(6)),
        run(
            tmp_path / "voting-isolated-s-math+votes6+long" / "seed-0",
            0,
            {**RISE, 40: answers(1, 0)},
            **votes(6),
        ),
    ]
    rows = cell_map({str(k): one for k, one in enumerate(runs)}).rows
    assert [row for row, _ in rows] == [
        "voting isolated (votes 5)", "voting isolated + votes6", "voting isolated + votes6 + long",
    ]  # fmt: skip


def test_a_run_that_was_evaluated_at_its_start_alone_has_no_gain_on_the_map(tmp_path):
    assert (
        cell_map({"0": run(tmp_path / "voting-isolated-s-math" / "seed-0", 0, {0: answers(1, 0)})}).rows == []
    )


def test_cells_of_one_name_say_their_steps_and_changes_at_a_resume_and_none_is_lost_from_the_map(tmp_path):
    rate = lambda peak: {"optimiser": {"schedule": {"peak": peak}}}
    place = tmp_path / "voting-isolated-s-math"
    runs = [
        run(place / f"seed-{seed}", seed, RISE, learner=rate(0.1 if seed > 1 else 0.2)) for seed in range(4)
    ]
    runs.append(run(tmp_path / "longer", 0, {**RISE, 40: answers(1, 0)}))
    again = run(place / "seed-4", 4, RISE, learner=rate(0.1))
    changes = "versions.jax: '0.10' -> '0.11'", "config.learner.optimiser.schedule.peak: 0.2 -> 0.1"
    runs += [with_about(again, changes=[[change]]) for change in changes]
    rates = [f"30 steps, learner.optimiser.schedule.peak {peak}" for peak in (0.2, 0.1)]
    assert {
        cell.label.partition(" ")[2]: [run.config["seed"] for run in cell.runs]
        for cell in seeds.by_cell(runs)
    } == {
        f"({rates[0]})": [0, 1],
        f"({rates[1]})": [2, 3, 4],  # another version of JAX is no change of what is run
        "(40 steps)": [0],
        "(30 steps, changed at a resume)": [4],
    }
    rows = cell_map({str(k): one for k, one in enumerate(runs)}).rows
    shown = [label for _, cells in rows for cell in cells for _, label in cell["links"]]
    assert len(rows) == 4 and shown == [0, 1, 2, 3, 4, 0, 4]


def test_measures_are_of_each_run(tmp_path):
    one = seeds.measures(run(tmp_path / "a", 0, RISE, test=(answers(0, 1, 0), answers(1, 1, 0))))
    # The odd problem chooses step 20 for the even one, the even problem step 10 for the odd one.
    assert one["base"].right.tolist() == [0, 0] and one["peak"].right.tolist() == [1, 0]
    np.testing.assert_allclose(one["terminal"].right, [1, 1 / 3])
    assert seeds.difference(one["test final"], one["test base"]).tolist() == [1, 0, 0]
    assert seeds.difference(one["test final"], one["base"]) is None  # other problems
    short = seeds.measures(run(tmp_path / "b", 0, along((0, 0), (1, 1))))
    assert list(short) == ["base"] and seeds.difference(short.get("test final"), short["base"]) is None


def test_the_test_split_counts_as_it_was_played_last_and_beside_its_own_base(tmp_path):
    one = run(tmp_path / "a", 0, RISE, test=(answers(0, 0), answers(1, 0)))
    more = {"split": "test", "seed": 0, "problems": 2, "data": "t"}
    later = [
        evaluation(30, 1.0, per_problem=answers(1, 1), **more),
        evaluation(20, 0.0, per_problem=answers(0, 0), **more),  # an earlier checkpoint
        evaluation(30, 0.0, per_problem=answers(0), **{**more, "problems": 1}),  # not all of them
        evaluation(0, 0.5, per_problem=answers(1), **{**more, "problems": 1}),
        evaluation(30, 0.0, per_problem=answers(0, 0), **more, mode="swapped"),
    ]
    write_run(one.folder, about=one.about, evaluations=[*one.evaluations, *later])
    again = seeds.measures(read_run(one.folder))
    assert again["test final"].right.tolist() == [1, 1] and again["test base"].right.tolist() == [0, 0]


def test_the_table_has_means_over_seeds_with_their_intervals(tmp_path):
    flat = along((0, 0), (0, 0), (0, 0), (0, 0))
    runs = [run(tmp_path / name, seed, of) for seed, (name, of) in enumerate(zip("abc", (RISE, FALL, flat)))]
    (table,) = [table for table in seed_tables.tables_of(runs) if table.title == "Cells"]
    (row,) = table.rows
    low, high = 100 * np.array(over_seeds(np.array([[0, 0], [0, 1], [0, 0]]))[1:])
    assert row[:3] == ("voting-isolated-s-math", "3", f"16.7%\n{low:.1f} – {high:.1f}")
    # Peak: (1 + 0 + 1 + 1) / 6, terminal: (1 + 1/3 + 1/3 + 1/3) / 6.
    assert [text.partition("\n")[0] for text in row[3:]] == ["50.0%", "33.3%", "+16.7", "0 of 3"]
    assert "voting-isolated-s-math      3  16.7% (" in plain(table)


def test_a_cell_that_fell_says_whether_its_texts_lost_their_form(tmp_path):
    down = course(np.random.default_rng(0), 0.2, 0.95, 0.2, 0.2, 0.2, problems=200)

    def told(share, **more):
        lines = [
            metrics(step, **{"role/generator/unreadable_share": share * (step > 1)}, **more)
            for step in range(1, 41)
        ]
        runs = [run(tmp_path / f"{share}-{seed}", seed, down, lines=lines) for seed in (0, 1)]
        return seed_tables.on_val(seeds.by_cell(runs)).rows[0][-1]

    assert told(0.0, **{"repeated/generator": 0.0}) == "2 of 2\na cliff, form: kept"
    # Results of before repetition was measured say so.
    assert told(0.9) == "2 of 2\na cliff, form: readability (generator); repetition not recorded"


def test_a_run_that_lacks_a_measure_is_left_out_and_counted(tmp_path):
    runs = [run(tmp_path / "a", 0, RISE), run(tmp_path / "b", 1, {0: answers(1, 1), 30: answers(1, 1)})]
    (table,) = seed_tables.tables_of(runs)
    assert table.rows[0][3].endswith(", 1 of 2 seeds") and ", " not in table.rows[0][2]
    assert table.rows[0][6] == "0 of 1"
    odd = [run(tmp_path / "c", 0, RISE), run(tmp_path / "d", 1, along((1, 0, 1), *[(1, 1, 1)] * 3))]
    (cell,) = seeds.by_cell(odd)
    assert not seed_tables.on_val([cell]).rows  # not of as many problems


def test_a_run_that_was_stopped_early_stands_apart_and_is_compared_with_none(tmp_path):
    up = (answers(0, 0), answers(1, 1))
    early = run(tmp_path / "b", 1, RISE, test=up)
    write_run(early.folder, about={**early.about, "config": {**early.config, "steps": 40}})
    runs = [
        run(tmp_path / "a", 0, {**RISE, 40: answers(1, 0)}, test=up),
        read_run(early.folder),
        run(tmp_path / "c", 1, {**RISE, 40: answers(1, 0)}, "voting-shared-s-math"),
    ]
    cells = seeds.by_cell(runs)
    assert [cell.label for cell in cells] == [
        "voting-isolated-s-math", "voting-isolated-s-math (stopped at step 30)", "voting-shared-s-math",
    ]  # fmt: skip
    assert list(seeds.measures(runs[1])) == ["base", "peak", "terminal"]
    assert compared(cells).rows == []


@pytest.mark.parametrize("odd", ["abc", {"a": 1}, 3, [[1, 0], [0, 1]], [1, None], [], ["x"], [True]])
def test_an_odd_record_is_no_measure(tmp_path, odd):
    one = run(tmp_path / "a", 0, RISE)
    records = [{**record, "per_problem": odd} for record in one.evaluations]
    write_run(one.folder, about=one.about, evaluations=records)
    again = read_run(one.folder)
    assert seeds.measures(again) == {}
    assert seed_tables.tables_of([again, run(tmp_path / "b", 1, RISE)])[0].rows[0][2].endswith("1 of 2 seeds")


UP, DOWN = (answers(0, 0), answers(1, 1)), (answers(0, 0), answers(0, 1))


def shown(runs):
    table = compared(seeds.by_cell(runs))
    return [(*row[:2], row[3], *(cell.partition("\n")[0] for cell in row[4:-1])) for row in table.rows]


def test_cells_are_compared_over_the_seeds_and_problems_that_both_have(tmp_path):
    runs = [
        run(tmp_path / "i0", 0, RISE, test=UP),
        run(tmp_path / "i1", 1, RISE, test=UP),
        run(tmp_path / "i2", 2, FALL, test=UP),
        run(tmp_path / "s0", 0, FALL, "voting-shared-s-math", test=DOWN),
        run(tmp_path / "s1", 1, FALL, "voting-shared-s-math", test=DOWN),
        run(tmp_path / "g0", 0, FALL, "single-shared-s-math", val="other problems", test=DOWN),
        run(tmp_path / "m0", 0, FALL, "voting-shared-m-math", val="of another scale"),
    ]
    assert shown(runs) == [
        # base 0, 0 against 0, 1; peak 1, 0 against 1, 1; terminal 1, 1/3 against 1/3, 1/3; test 1, 1 against 0, 1
        ("voting-isolated-s-math", "voting-shared-s-math", "2", "-50.0", "-50.0", "+33.3", "+50.0"),
        ("voting-isolated-s-math", "single-shared-s-math", "1", NONE, NONE, NONE, "+50.0"),
        ("voting-shared-s-math", "single-shared-s-math", "1", NONE, NONE, NONE, "+0.0"),
    ]
    assert "Peaks are chosen on one half of the problems" in compared(seeds.by_cell(runs)).how


def test_cells_that_were_asked_other_test_problems_are_not_compared_there(tmp_path):
    one, other = run(tmp_path / "i0", 0, RISE, test=UP), run(tmp_path / "s0", 0, FALL, "voting-shared-s-math")
    played = [evaluation(step, 0.5, split="test", seed=0, per_problem=answers(0, 1)) for step in (0, 30)]
    write_run(other.folder, about=other.about, evaluations=[*other.evaluations, *played])
    ((*_, on_test),) = shown([one, read_run(other.folder)])
    assert on_test == NONE


def test_cells_are_paired_by_what_their_settings_differ_in_whatever_they_are_called(tmp_path):
    reward = config()["config"]["rewards"] | {"name": "own_correctness"}
    one, other = (
        run(tmp_path / "a", 0, RISE, "mine", test=UP),
        run(tmp_path / "b", 0, FALL, "yours", test=DOWN),
    )
    paid = run(tmp_path / "c", 0, FALL, "mine", rewards=reward, test=DOWN)
    row = compared(seeds.by_cell([one, paid])).rows[0]
    labels = "mine (rewards.name own_correctness)", "mine (rewards.name rubric)"
    assert row[:4] == (*labels, "rewards.name", "1")
    assert row[7].startswith("-50.0")
    pairs, lines = contrasts.pairs_of(seeds.by_cell([one, other]))
    assert not pairs and lines == ["yours with mine: they differ only in their names"]


@pytest.mark.parametrize("name", ["base configs/bases/micro-s", "prompts"])
def test_weights_or_prompts_that_changed_under_their_name_are_a_difference(tmp_path, name):
    isolated, shared = run(tmp_path / "a", 0, RISE), run(tmp_path / "b", 0, FALL, "voting-shared-s-math")
    digests = {one: {**one.about["digests"], name: place} for one, place in ((isolated, "f"), (shared, "e"))}
    cells = seeds.by_cell([with_about(one, digests=of) for one, of in digests.items()])
    (pair,), _ = contrasts.pairs_of(cells)
    assert pair.differ == ("policies.map", name) and not pair.planned
    assert compared(cells).rows[0][2] == f"policies.map, {name}"


def test_two_matrices_are_told_apart_and_what_differs_in_several_things_stands_last(tmp_path):
    runs = [
        run(tmp_path / place / cell / "seed-0", 0, RISE, f"voting-{cell}-s-math", learner={"rate": rate})
        for place, rate in (("low", 1), ("high", 2))
        for cell in ("isolated", "shared")
    ]
    *planned, first, last = compared(seeds.by_cell(runs)).rows
    isolated, shared = (
        [f"voting-{cell}-s-math (learner.rate {rate})" for rate in (1, 2)] for cell in ("isolated", "shared")
    )
    assert [row[:3] for row in planned] == [
        (isolated[0], shared[0], "policies.map"),
        (isolated[1], isolated[0], "learner.rate"),
        (isolated[1], shared[1], "policies.map"),
        (shared[1], shared[0], "learner.rate"),
    ]
    assert first[:3] == (isolated[0], shared[1], "policies.map, learner.rate")
    assert last[:3] == (isolated[1], shared[0], "policies.map, learner.rate")


def test_cells_of_one_folder_are_told_apart_by_how_a_long_value_ends(tmp_path):
    places = "configs/bases/micro-s", "configs/bases/micro-xs"
    runs = [
        run(
            tmp_path / f"seed-{seed}",
            seed,
            RISE,
            "mine",
            policies={**policies(generator="p0"), "base": place},
        )
        for seed, place in enumerate(places)
    ]
    assert [cell.label for cell in seeds.by_cell(runs)] == [
        f"mine (policies.base {place})" for place in places
    ]


def test_a_reason_not_to_compare_is_one_line_however_many_pairs_have_it(tmp_path):
    runs = [run(tmp_path / str(k), 0, RISE, f"cell {k}", val=str(k), learner={"rate": k}) for k in range(5)]
    *_, table = seed_tables.tables_of(runs)
    assert table.rows == [
        ("cell 1 with cell 0; cell 2 with cell 0; cell 2 with cell 1; 7 more: their problems differ",)
    ]
    far = [
        run(tmp_path / f"far {k}", 0, RISE, f"cell {k}", learner={"rate": k}, data={"n": k}) for k in range(6)
    ]
    (table,) = seed_tables.tables_of(far)
    assert table.rows[0][0].endswith("; 12 more: they differ in several things")
    judged = run(tmp_path / "judged", 0, RISE, evaluation={"metric": "my:own"})
    assert contrasts.pairs_of(seeds.by_cell([runs[0], judged]))[1] == [
        "voting-isolated-s-math with cell 0: their evaluation.metric differs"
    ]
    assert contrasts.pairs_of(seeds.by_cell([runs[0], run(tmp_path / "late", 1, RISE, learner={})]))[1] == [
        "voting-isolated-s-math with cell 0: they have no seed in common"
    ]


def test_a_run_that_is_not_the_cell_of_its_name_says_so(tmp_path):
    whole, part = policies(generator="p0", aggregator="p1"), policies(generator="p0", aggregator="p0")
    part["map"]["generator/2"], as_named = "p1", policies(generator="p0", aggregator="p0")
    votes = {"name": "voting", "settings": {"votes": 5}, "prompts": "micro"}
    runs = [
        run(tmp_path / "a", 0, RISE, policies=part),
        run(tmp_path / "b", 1, RISE, policies=whole),
        run(tmp_path / "c", 0, FALL, "voting-shared-s-math", policies=whole),
        run(tmp_path / "d", 0, FALL, "voting-shared-s-math", policies=as_named),
        run(tmp_path / "e", 0, FALL, "voting-shared-s-math", policies=part, workflow=votes),
        run(tmp_path / "f", 0, FALL, "eval_opt-shared-s-math", policies=policies(generator="p0")),
    ]
    labels = [cell.label for cell in seeds.by_cell(runs)]
    assert labels == [
        "voting-isolated-s-math (generator → p0, aggregator → p0, generator/2 → p1)",
        "voting-isolated-s-math",
        "voting-shared-s-math (generator → p0, aggregator → p1)",
        "voting-shared-s-math",
        "voting-shared-s-math (generator → p0, aggregator → p0, generator/2 → p1, votes 5)",
        "eval_opt-shared-s-math (workflow voting)",
    ]


def test_the_budgets_of_both_sides_are_shown_and_marked_where_they_are_far_apart(tmp_path):
    single = run(tmp_path / "g", 0, FALL, "single-shared-s-math", policies=policies(generator="p0"), test=UP)
    voting = run(
        tmp_path / "v", 0, RISE, "voting-shared-s-math", policies=policies(generator="p0", aggregator="p0")
    )

    def spending(one, *tokens):
        records = [dict(of, tokens_per_episode=n) for of, n in zip(one.evaluations, tokens)]
        return read_run(write_run(one.folder, about=one.about, evaluations=records))

    def told(*runs):
        (row,) = compared(seeds.by_cell(runs)).rows
        return row[-1]

    assert told(single, voting) == NONE  # of before it was written down
    single, voting = spending(single, 1, 20, 25, 30), spending(voting, 1, 80, 90, 100)
    assert told(single, voting) == "90 : 25\nx3.6 tokens"
    assert told(single, spending(voting, 999, 23, 27, 32)) == "27 : 25"
    assert told(single, spending(voting, 1, 12, 13, 12.5)) == "12 : 25\nx0.5 tokens"
    assert told(single, spending(voting, 1, 80, None, 90)) == NONE


def test_nothing_is_said_of_one_run_or_none(tmp_path):
    assert seed_tables.tables_of([]) == [] and seed_tables.tables_of([run(tmp_path / "a", 0, RISE)]) == []


@pytest.mark.parametrize("cell", ["mine", "a-b-c-d", "voting-isolated-s-math", "single-shared-s-math"])
def test_a_cell_without_another_to_be_compared_with_is_in_no_comparison(tmp_path, cell):
    assert not compared(seeds.by_cell([run(tmp_path / "a", 0, RISE, cell)])).rows
