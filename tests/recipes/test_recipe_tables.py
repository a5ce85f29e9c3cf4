"""What the tables say of constructed numbers."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from marl_jax import fields
from marl_jax.config.run_config import ConfigError
from recipes import report
from recipes import run as runner
from recipes.recipe import Claim, find, names
from recipes.run import run


def record(**arms):
    """Two seeds of two problems; {arm: (accuracy of each problem, seed by seed; another measure)}."""

    def one(values, length, seed):
        base = {"accuracy": [0.0, 0.0], "tokens": 1.0}
        found = {"accuracy": values[seed], "tokens": 1.0, "length": length + seed / 100}
        return {"step": 1, "sampled": 10, "seconds": 1.0, "base": base, "values": found}

    runs = [{arm: one(*given, seed) for arm, given in arms.items()} for seed in range(2)]
    about = {"command": "python -m recipes.run dr_mas", "machine": "none", "seconds": 60.0}
    return {"recipe": "dr_mas", **about, "arms": {arm: {} for arm in arms}, "runs": runs}


ALL = [title for titles in report.PAGES.values() for title in titles]
RAN = sorted(path.stem for path in report.RESULTS.glob("*.json"))
WANTED = {"metaagent_x", "at_grpo", "core_code", "dr_mas", "absolute_zero", "comas", "malt", "optima"}
MADE = record(agent=([[1, 1], [1, 1]], 1.0), task=([[0, 0], [0, 1]], 0.5))


def test_the_interval_of_a_claim_is_that_of_paired_differences():
    """Against the t interval by hand: of gaps 0.49 and 0.51 over two seeds, 0.5 +- 12.706 x 0.01."""
    more, less = report.sides(Claim("length", "agent", "task"), MADE)
    assert more == [1.0, 1.01] and less == [0.5, 0.51]
    found = report.interval([0.49, 0.51])
    assert np.allclose(found, [0.5, 0.5 - 12.7062 * 0.01, 0.5 + 12.7062 * 0.01], atol=1e-5)


def test_the_root_may_lie_below_the_home_directory(monkeypatch):
    """A run goes there whatever is asked of it, so its numbers have to be looked for there, too."""
    asked = []
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(runner, "run", lambda *of: asked.append(of))
    monkeypatch.setattr(runner, "FLAGS", SimpleNamespace(seeds=1, root="~/recipes", arms=[]))
    runner.main(None, ["dr_mas"])
    assert asked == [("dr_mas", 1, Path("/home/me/recipes"), [])]


def test_a_claim_is_shown_not_shown_or_its_opposite_is():
    assert (
        report.verdict(0.5, 0.05, 3) == "shown" and report.verdict(-0.5, 0.05, 3) == "the opposite is shown"
    )
    assert {report.verdict(0.5, *of) for of in [(0.051, 3), (0.01, 2), (None, 3)]} == {"not shown"}


@pytest.mark.parametrize("gaps", [[0.1, 0.2, 0.45], [-3.0, -3.5, -2.0, 1.0]])
def test_the_p_of_single_numbers_is_that_of_the_t_test(gaps):
    assert report.chance(np.array(gaps)) == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue, rel=1e-9)
    assert report.chance(np.array([*gaps, np.nan])) is report.chance(np.zeros(3)) is None
    assert report.chance(np.array([2.0, 2.0, 2.0])) == 0


def test_claims_of_a_recipe_are_corrected_for_each_other():
    """Three seeds, two claims: the p of the stronger counts twice, by hand from the t of 2 degrees of freedom."""
    made = {
        "arms": {"a": {}, "b": {}},
        "runs": [
            {"a": {"values": {"x": x, "y": y}}, "b": {"values": {"x": 0, "y": 0}}}
            for x, y in [(9.0, 1.0), (10.0, -1.0), (11.0, 0.5)]
        ],
    }
    two = dataclasses.replace(
        find("dr_mas"),
        arms={"a": {}, "b": {}},
        measures={"x": None, "y": None},
        claims=(Claim("x", "a", "b"), Claim("y", "a", "b")),
    )
    (*_, one, said), (*_, other, unsaid) = report.claim_rows("mine", two, made)
    p = 2 * stats.t.sf(10 / np.sqrt(1 / 3), 2)
    assert one == f"{2 * p:.2g}" and said == "shown" and float(other) > 0.5 and unsaid == "not shown"


def test_a_claim_about_what_could_not_be_measured_is_a_line_like_any_other():
    """A file of numbers has null where a run had nothing to measure."""
    lacking = json.loads(json.dumps(MADE))
    lacking["runs"][1]["agent"]["values"]["length"] = None
    one = dataclasses.replace(
        find("dr_mas"), measures={"length": None}, claims=(Claim("length", "agent", "task"),)
    )
    assert report.claim_rows("mine", one, lacking) == [
        ["`mine`", "length: agent > task", "– : 0.505", "–", "–", "not shown"]
    ]


def test_the_interval_of_an_accuracy_ends_at_0_and_1():
    far_apart = [[0.0, 0.0], [1.0, 1.0]]
    assert report.interval(far_apart, (0.0, 1.0))[1:] == (0.0, 1.0) and report.interval(far_apart).low == -1.0


def test_sides_of_a_claim_are_two_arms_or_two_measures_of_one():
    assert report.sides(Claim("length", "agent", "elsewhere"), MADE) is None
    assert report.sides(Claim("length", "agent", "=tokens"), MADE) == ([1.0, 1.01], [1.0, 1.0])


def test_the_tables_of_a_file(tmp_path):
    (tmp_path / "dr_mas.json").write_text(json.dumps(MADE))
    text = report.tables(ALL, tmp_path)
    assert "| `dr_mas` | accuracy: agent > task | 100.0 : 25.0 | +75.0 [" in text
    assert "| `dr_mas` | agent | 0.0 [" not in text and re.search(
        r"\| `dr_mas` \| agent \| 0.0 \| 100.0 \[", text
    )
    assert "length 1" in text and "`python -m recipes.run dr_mas`" in text


def test_recipes_without_numbers_are_rows_that_say_how_to_get_them(tmp_path):
    text = report.tables(ALL, tmp_path)
    assert all(f"`python -m recipes.run {name} --seeds=3`" in text for name in names())
    assert "### Claims" not in text


@pytest.mark.parametrize("name", report.PAGES)
def test_a_page_has_the_tables_of_the_files_beside_it(name):
    text = (report.DOCS / name).read_text(encoding="utf-8")
    assert report.page(text, report.PAGES[name]) == text, "run python -m recipes.report"


def test_the_most_wanted_are_run():
    assert set(RAN) >= WANTED


@pytest.mark.parametrize("name", RAN)
def test_what_was_run_has_three_seeds_of_every_arm_and_says_with_what(name):
    made = json.loads((report.RESULTS / f"{name}.json").read_text())
    assert made["recipe"] == name in names() and made["machine"] and made["versions"]
    assert made["command"].startswith(f"python -m recipes.run {name} --seeds=") and len(made["runs"]) >= 3
    arms = {arm: fields.to_json(values) for arm, values in find(name).arms.items()}
    assert made["arms"] == json.loads(json.dumps(arms)), "an arm is newer than the runs"
    assert all(set(run) == set(arms) for run in made["runs"])
    default = next(iter(arms))  # on cores that others used, too
    assert np.median([run[default]["seconds"] for run in made["runs"]]) < 600


@pytest.mark.parametrize("name", ["dr_mass", "./dr_mass.py", "recipes.nothing", "recipes.words"])
def test_what_is_no_recipe_is_told_in_a_line(name, tmp_path):
    with pytest.raises(ConfigError, match=r"dr_mas'|cannot be imported|has no RECIPE"):
        run(name, 1, tmp_path)


def test_every_arm_can_be_named_one_with_a_comma_too():
    """Quotes keep a name together, as in a line of a CSV file."""
    said = ",".join(f'"{arm}"' for arm in find("unitymas_o").arms)
    assert runner.FLAGS["arms"].parser.parse(said) == [*find("unitymas_o").arms]
    assert (
        runner.FLAGS["arms"].parser.parse("agent,task") == ["agent", "task"]
        and runner.FLAGS["arms"].default == []
    )


def test_an_arm_that_does_not_exist_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ConfigError, match="'agents' is no arm of dr_mas"):
        run("dr_mas", 1, tmp_path, ["agents"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "where", [{"examined": {"workflow.setings.loops": 1}}, {"also": {"more": {"seeed": 1}}}]
)
def test_a_mistake_in_what_is_evaluated_is_refused_before_anything_is_trained(where, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "find", lambda name: dataclasses.replace(find("dr_mas"), **where))
    monkeypatch.setattr(runner, "trained", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(ConfigError, match=r"setings|seeed"):
        run("dr_mas", 1, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_numbers_of_a_recipe_of_ones_own_are_beside_its_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "trained", lambda config, folder: None)
    one = {
        "step": 1,
        "seconds": 1.0,
        "sampled": 1,
        "values": {"late": [None, 1.0], "early": None},
        "base": {},
    }
    monkeypatch.setattr(runner, "compared", lambda recipe, configs, root: dict.fromkeys(configs, one))
    run("examples.own_recipe", 1, tmp_path, results=tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["examples.own_recipe.json"]
    run("dr_mas", 1, tmp_path, results=tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["dr_mas.json"]


@pytest.mark.parametrize(
    ("claim", "told"),
    [
        (Claim("accuracy", "agnet", "task"), "'agnet' is no arm of the recipe: did you mean 'agent'"),
        (Claim("accuracy", "agent", "tasks"), "'tasks' is no arm of the recipe: did you mean 'task'"),
        (Claim("acuracy", "agent", "base"), "'acuracy' is no measure of the recipe: did you mean 'accuracy'"),
        (Claim("accuracy", "agent", "=toks"), "'toks' is no measure of the recipe"),
    ],
)
def test_a_claim_about_what_there_is_not_is_refused(claim, told):
    with pytest.raises(ConfigError, match=told):
        dataclasses.replace(find("dr_mas"), claims=(claim,))


def test_no_arm_is_called_as_the_start_of_an_arm_is():
    """A claim against it would silently be one against the start."""
    recipe = find("dr_mas")
    with pytest.raises(ConfigError, match="in claims 'base' is the start of an arm"):
        dataclasses.replace(recipe, arms={**recipe.arms, "base": {}})
