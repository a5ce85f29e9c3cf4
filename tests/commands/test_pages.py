"""The pages come with the package and are read in a terminal; the reference says of every field what it is."""

import dataclasses
import re

import pytest
import script

from marl_jax.commands.pages import examples, page, pages, reference
from marl_jax.episodes import CallRecord, Episode
from marl_jax.errors import UserError
from marl_jax.packaged import HOME
from marl_jax.table import Table
from marl_jax.workflows import Call, Completion

ROOT = HOME.parent


def test_every_page_can_be_named_and_is_shown_as_it_stands():
    there = pages()
    files = {*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "BUILD_NOTES.md"}
    assert set(there.values()) == files and next(iter(there)) == "README"
    assert page("rewards") == page("docs/rewards.md") == (ROOT / "docs/rewards.md").read_text()


def test_every_example_is_listed_with_its_first_line_and_copied_to_the_byte(capsys):
    files = {path for path in ROOT.glob("examples/**/*.*") if path.suffix != ".pyc"}
    assert set(examples().values()) == files and set(map(page, examples())) == {f.read_text() for f in files}
    assert all(len(line) <= 80 for line in page("examples").splitlines())
    listed = page("examples").replace("\n  ", " ")
    assert "- `examples/own_loop.py`: A GRPO loop of one's own: play, grade, compare, learn" in listed
    for line in listed.splitlines()[: len(files)]:
        assert re.match(r"- `examples/.+`: \w", line), line
    assert script.run("experiments.docs", "examples/own_reward") == 0
    assert capsys.readouterr().out == (ROOT / "examples" / "own_reward.py").read_text()


@pytest.mark.parametrize("name", [name for name in pages() if name.startswith("reference/")])
def test_a_page_of_the_reference_is_filled(name):
    text = page(name)
    named = re.findall(r"^::: (\S+)$", pages()[name].read_text(), re.MULTILINE)
    assert named and not re.search("^:::", text, re.MULTILINE)
    for module in named:
        assert re.search(rf"^##+ (\S+\.)?{module.rpartition('.')[2]}\b", text, re.MULTILINE), module


def test_a_module_shows_its_workflows_and_nothing_that_it_imports():
    text = reference("workflows.self_refine")
    assert "### self_refine_with_tests(" in text and "### Call" not in text


@pytest.mark.parametrize("cls", [Call, Completion, CallRecord, Episode, Table], ids=lambda cls: cls.__name__)
def test_every_field_says_what_it_is(cls):
    text = reference(f"{cls.__module__}.{cls.__name__}").replace("\n  ", " ")
    said = dict(re.findall(r"^- `(\w+)` \(.+?; .*?\): (.+)$", text, re.MULTILINE))
    assert not [field.name for field in dataclasses.fields(cls) if len(said[field.name].split()) < 2]


def test_an_object_of_the_library_is_named_with_or_without_its_first_word():
    text = page("workflows.Call")
    assert text == page("marl_jax.workflows.Call")
    assert "- `slot` (int; 0): which of several parallel calls of the role this is" in text
    assert page("rewards.outcome").startswith("### outcome(") and "The reward of every call" in page(
        "rewards.outcome"
    )
    assert page("workflows.voting").count("### voting(") == 1  # the workflow, under its function's words


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "examples/own_lop",
            r"page or object 'examples/own_lop' \(.*\): did you mean 'examples/own_loop\.py'",
        ),
        ("reward", r"there is no page or object 'reward' \(.*\): did you mean 'rewards'"),
        ("workflows.Cal", r"the library has no 'workflows\.Cal'"),
    ],
)
def test_what_there_is_not_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        page(name)


@pytest.mark.parametrize("name", [name for name in pages() if name.startswith("reference/")])
def test_signatures_name_their_values_and_show_no_address_or_folder_of_this_machine(name):
    heads = re.findall(r"^(?:###|- `).+$", page(name), re.MULTILINE)
    assert not [
        head for head in heads if re.search(r"<(class|function|module|built-in)|numpy\._| at 0x", head)
    ]
