"""Whatever can be named in a configuration is in a list, with a line of what it is and where it stands."""

import pytest

from marl_jax import fields
from marl_jax.commands import listing as module
from marl_jax.commands.listing import KINDS, listing
from marl_jax.config.cells import all_cells, of_study
from marl_jax.config.run_config import RunConfig, cells_of, load_config
from marl_jax.errors import UserError
from marl_jax.packaged import HOME
from marl_jax.rewards.credit import NAMED
from marl_jax.tasks import NAMES
from marl_jax.workflows import BUILT_IN


def names(kind):
    return [entry.name for entry in KINDS[kind].entries()]


def test_everything_that_there_is_is_listed():
    assert names("workflows") == list(BUILT_IN)
    assert names("tasks") == list(NAMES)
    assert set(names("rewards")) == {*NAMED, "team_and_local", "format_penalty", "length_penalty"}
    assert names("fields") == list(fields.paths(RunConfig))


@pytest.mark.parametrize("kind", ["workflows", "tasks", "rewards", "fields"])
def test_every_entry_says_what_it_is_and_where(kind):
    for entry in KINDS[kind].entries():
        assert len(entry.what) > 10, entry
        if entry.where.startswith("marl_jax/"):
            file, _, line = entry.where.partition(":")
            source = (HOME.parent / file).read_text().splitlines()
            if kind == "fields":
                assert source[int(line) - 1].strip().startswith(entry.name.rpartition(".")[2] + ":"), entry


def test_a_field_says_its_type_its_default_and_the_comment_at_its_declaration():
    found = {entry.name: entry.what for entry in KINDS["fields"].entries()}
    assert found["policies.base"] == "directory of the model that policies start from; str; default -"
    assert found["rollout.draws"].startswith("Above 1, dynamic sampling: problems that teach nothing")
    assert found["learner.loss.clip_low"].endswith("default 0.2")
    assert found["steps"] == "training steps of the whole run; int, at least 0; default 200"
    assert found["policies.dtype"].endswith("float32 or bfloat16 or none; default none")


def test_every_workflow_is_a_cell_for_each_family_that_it_declares():
    there = {(cell.workflow, cell.task) for cell in all_cells(("xs",))}
    assert there == {(name, family) for name, flow in BUILT_IN.items() for family in flow.families}
    cells = cells_of("micro")
    for name, flow in BUILT_IN.items():
        policies = ["shared", "isolated"] if len(flow.roles) > 1 else ["shared"]
        for family in flow.families:
            assert {f"{name}-{policy}-xs-{family}" for policy in policies} <= set(cells)
    assert (
        load_config("micro:self_refine_with_tests-isolated-xs-code").cell
        == "self_refine_with_tests-shared-xs-code"
    )


def test_cells_say_whether_they_are_the_studys():
    entry = module._cell("micro", "debate-shared-xs-math")
    assert "not of the study" in entry and not of_study("debate-shared-xs-math")
    assert "not of the study" not in module._cell("micro", "voting-shared-xs-math")


def test_a_word_narrows_the_list_and_the_text_fits_a_terminal(capsys):
    text = listing("workflows")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "marl_jax/workflows/debate.py" in text
    assert listing("workflows", "debater").startswith("debate ") and "voting" not in listing(
        "workflows", "debater"
    )
    for line in listing("fields").splitlines():
        assert len(line) <= 80 or " " not in line.strip(), line


@pytest.mark.long
def test_without_a_word_it_says_what_can_be_listed_and_cells_are_named_by_their_parts():
    kinds = listing().splitlines()
    assert [line.split()[2] for line in kinds] == list(KINDS) and all(len(line) <= 80 for line in kinds)
    cells = listing("cells")
    assert len(cells.splitlines()) < 40 and all(len(line) <= 80 for line in cells.splitlines())
    words = " ".join(cells.split())
    assert (
        "micro:CELL" in words
        and "scale xs, s, m;" in words
        and "--config=qwen3:single-shared-0.6b-math" in words
    )
    assert listing("cells", "micro").count("micro:") == len(cells_of("micro"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("workflow",), "there is nothing to list under 'workflow': did you mean 'workflows'"),
        (("tasks", "nonsense"), "no entry of 'tasks' contains 'nonsense'"),
    ],
)
def test_what_cannot_be_listed_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        listing(*words)
