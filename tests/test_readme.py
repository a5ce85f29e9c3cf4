"""What the README and the pages in docs/ say is so: programs, commands, links, places, fields and counted sizes."""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import re
import runpy
import shlex
import textwrap
import tomllib
import types
import typing
from pathlib import Path

import pytest
from absl import flags

from marl_jax import fields
from marl_jax.commands import cli
from marl_jax.config.run_config import RunConfig, load_config, load_file, split_argv
from marl_jax.planning.devices import KINDS
from marl_jax.planning.plan import demand_of, find_models, make_plan
from marl_jax.study.jobs.matrix import make_jobs
from marl_jax.study.run_tables import runs_table
from marl_jax.tasks import Task
from marl_jax.tasks.datasets import NAMES, SOURCES
from marl_jax.workflows import BUILT_IN, Completion, load_prompts

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
}
README, MEASURED = PAGES["README.md"], PAGES["docs/measured.md"]
PROGRAMS = [path.read_text() for path in (*ROOT.glob("examples/*.py"), ROOT / "marl_jax/workflows/voting.py")]
CELL = "configs/micro.py:voting-isolated-s-math"


def everywhere(pattern):
    """(page, match) of a pattern, over all pages."""
    found = {
        (page, match) for page, text in PAGES.items() for match in re.findall(pattern, text, re.MULTILINE)
    }
    assert found
    return sorted(found)


def import_name(name):
    """A module, or what a module has."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, member = name.rpartition(".")
        return getattr(importlib.import_module(module), member)


# ---------------------------------------------------------------- programs and commands


def test_a_program_that_imports_cli_by_its_old_name_runs():
    text = (ROOT / "examples/own_reward.py").read_text()
    old = text.replace("from marl_jax.commands import cli", "from experiments import cli")  # all that differs
    assert old != text
    exec(old, names := {"__name__": "old"})
    for name in cli.__all__:
        assert getattr(names["cli"], name) is getattr(cli, name)


BLOCKS = [block for text in PAGES.values() for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_program_on_a_page_is_one_that_is_executed(block):
    assert any(block in program for program in PROGRAMS)  # see test_examples.py


LINES = [
    block
    for text in PAGES.values()
    for block in re.findall(r"^    (?:import|from) .*\n(?:(?:    .*)?\n)*", text, re.MULTILINE)
]


@pytest.mark.parametrize("block", LINES)
def test_lines_of_python_on_a_page_can_be_compiled(block):
    compile(textwrap.dedent(block), "page", "exec")


IMPORTS = everywhere(r"^ *from (marl_jax[\w.]*) import ([\w, ]+)")


@pytest.mark.parametrize("module, names", sorted({match for _, match in IMPORTS}))
def test_what_lines_on_a_page_import_is_there(module, names):
    for name in names.split(","):
        import_name(f"{module}.{name.strip()}")


COMMANDS = sorted({match for _, match in everywhere(r"(?:^    (?:\w+=\S+ )?|`)(python -m [^`\n]+)")})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_module_that_takes_its_flags_and_a_cell_that_exists(command, monkeypatch):
    _, _, module, *arguments = shlex.split(command, comments=True)
    assert importlib.util.find_spec(module), module
    monkeypatch.chdir(ROOT)
    spec, texts, rest = split_argv(arguments)
    if module == "experiments.pretrain":
        get_recipe, scale = load_file(spec, "get_recipe")
        _, mistakes = fields.change(get_recipe(scale), texts)
        assert not mistakes
    elif module == "experiments.matrix":
        (cells,) = (word.removeprefix("--cells=") for word in rest if word.startswith("--cells="))
        assert make_jobs(spec, texts, Path("runs"), cells)
    elif spec or texts:
        load_config(spec or CELL, texts)
    left = parse(module, rest, monkeypatch)
    assert module.startswith(("examples.", "recipes.")) or not left, left


def parse(module, arguments, monkeypatch):
    """What the flags that the module defines leave over of the arguments; a flag it has not is an error."""
    defined = flags.FlagValues()
    for name in dir(flags):
        if name.startswith("DEFINE_") and "flag_values" in inspect.signature(getattr(flags, name)).parameters:
            monkeypatch.setattr(flags, name, functools.partial(getattr(flags, name), flag_values=defined))
    monkeypatch.setattr(flags, "FLAGS", defined)
    if not module.startswith("examples."):  # which define none, and run at once
        runpy.run_module(module, run_name="described")
    return defined([module, *arguments])[1:]


def test_the_page_of_the_report_names_the_columns_of_runs():
    (row,) = re.findall(r"^\| Runs \|.*", PAGES["docs/report.md"], re.MULTILINE)
    heads = [head.split(",\npoints")[0].replace("\n", " ") for head in runs_table({}).head if head]
    assert heads and not [head for head in heads if head not in row]


@pytest.mark.parametrize("target", sorted({match for _, match in everywhere(r"(?:`|^    )make ([\w-]+)")}))
def test_a_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("extra", sorted({match for _, match in everywhere(r"pip install -e '\.\[(\w+)\]'")}))
def test_an_extra_exists(extra):
    assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


MARKS = {
    line.partition(":")[0]
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "markers"
    ]
}


@pytest.mark.parametrize(
    "command", sorted({match for _, match in everywhere(r"(?:^    |`)(pytest [^`\n]+)")})
)
def test_a_pytest_command_has_files_and_a_mark_that_exist(command):
    files = [ROOT / word.partition("::")[0] for word in shlex.split(command) if word.startswith("tests")]
    marks = set(re.findall(r" -m '?(\w+)", command))
    assert files and marks <= MARKS
    for file in files:
        text = "".join(path.read_text() for path in ([file] if file.is_file() else file.rglob("test_*.py")))
        assert all(f"mark.{mark}" in text for mark in marks)


# ---------------------------------------------------------------- places


LINKS = everywhere(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page, target", [link for link in LINKS if not link[1].startswith("https://")])
def test_a_link_leads_somewhere(page, target):
    file, _, anchor = target.partition("#")
    place = (ROOT / page).parent / file if file else ROOT / page
    assert place.exists()
    if anchor:
        heads = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]


@pytest.mark.parametrize(
    "page, place",
    everywhere(
        r"`((?:marl_jax|configs|experiments|examples|benchmarks|tests|docs|constraints)(?:/[\w./-]*)?)`"
    ),
)
def test_a_place_that_is_named_exists(page, place):
    assert (ROOT / place).exists()


def test_a_file_that_the_map_names_is_in_its_room():
    rows = re.findall(r"^\| `(marl_jax/\w+)` \| (.*) \|$", README, re.MULTILINE)
    named = [f"{room}/{file}" for room, words in rows for file in re.findall(r"`(\w+\.py)`", words)]
    found = {"marl_jax/workflows/voting.py", "marl_jax/learning/losses.py", "marl_jax/rewards/credit.py"}
    assert found <= set(named) and all((ROOT / file).exists() for file in named)


@pytest.mark.parametrize("page, name", everywhere(r"`(marl_jax(?:\.\w+)+)"))
def test_a_name_of_the_library_exists(page, name):
    import_name(name)


def test_a_room_of_the_library_is_on_the_map():
    rooms = {path.parent.name for path in (ROOT / "marl_jax").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `marl_jax/(\w+)`", README, re.MULTILINE))


# ---------------------------------------------------------------- the configuration


def leaf(path):
    """(dataclass, field) of a path such as learner.loss.kind."""
    cls, *rest = RunConfig, *path.split(".")
    for name in rest[:-1]:
        cls = typing.get_type_hints(cls)[name]
    return cls, next(field for field in dataclasses.fields(cls) if field.name == rest[-1])


def documented():
    text = PAGES["docs/config.md"] + PAGES["docs/config-learner.md"]
    rows = re.findall(r"^\| `([\w.]+)` \| (?:`(.+?)`|required) \| (.+) \|$", text, re.MULTILINE)
    return {path: (text, what) for path, text, what in rows}


def test_every_field_of_the_configuration_is_documented_and_no_other():
    assert list(documented()) and set(documented()) == set(fields.paths(RunConfig))


@pytest.mark.parametrize("path", list(fields.paths(RunConfig)))
def test_the_documented_default_is_the_one_of_the_dataclass(path):
    text, what = documented()[path]
    assert what.endswith((".", ",", ";"))
    cls, field = leaf(path)
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if default is dataclasses.MISSING:
        assert not text
        return
    base = load_config(str(ROOT / CELL)) if cls is RunConfig else cls()
    typed, mistakes = fields.change(base, [(field.name, "" if text == "-" else text)])
    assert not mistakes and getattr(typed, field.name) == default


@pytest.mark.parametrize("family", ["math", "code"])
def test_the_control_makes_as_many_calls_as_the_page_says_that_a_workflow_does(family):
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|", PAGES["docs/study.md"], re.MULTILINE)
    said = {name: int(math if family == "math" else code) for name, math, code in rows}
    assert set(said) == {"voting", "eval_opt", "orch_workers"}

    def calls(name, *texts):
        config = load_config(f"{ROOT}/configs/micro.py:{name}-shared-s-{family}", texts)
        return demand_of(config).most_calls

    assert calls("single_matched") == said["voting"]
    for name, most in said.items():
        assert calls("single_matched", ("workflow.settings.calls", str(most))) == calls(name) == most
    assert calls("voting", ("workflow.settings.votes", "7")) == 8
    assert calls("eval_opt", ("workflow.settings.rounds", "7")) == 14
    assert calls("orch_workers", ("workflow.settings.workers", "7")) == 9


OF_VERL = {"rollout.n", "rollout.name"}
GROUPS = {path.partition(".")[0] for path in fields.paths(RunConfig) if "." in path}
FLAGS = everywhere(r"--config\.([\w.]+)")
FIELDS = everywhere(rf"`((?:{'|'.join(GROUPS)})\.[a-z_.]+)[=`]")


@pytest.mark.parametrize("page, name", sorted({*FLAGS, *FIELDS}))
def test_a_field_that_a_page_names_exists(page, name):
    known = fields.paths(RunConfig)
    assert name in OF_VERL or any(
        name == path or name.startswith(f"{path}.") or path.startswith(f"{name}.") for path in known
    )


def test_the_reward_of_the_page_pays_drafts_by_their_verdicts_and_others_by_the_outcome():
    (block,) = (text for text in PAGES["docs/how-to.md"].split("\n\n") if "def by_verdict" in text)
    start = PAGES["docs/how-to.md"].index(block)
    lines = itertools.takewhile(
        lambda line: not line or line.startswith("    "), PAGES["docs/how-to.md"][start:].splitlines()
    )
    space = {}
    exec(textwrap.dedent("\n".join(lines)), space)
    said = lambda role, answer, *reads: types.SimpleNamespace(role=role, answer=answer, reads=reads)
    calls = [said("generator", "7"), said("evaluator", "Incorrect", 0), said("generator", "8", 1)]
    calls.append(said("evaluator", "Correct", 2))
    assert space["by_verdict"]([types.SimpleNamespace(calls=calls, outcome=0.25)]) == [[0.0, 0.25, 1.0, 0.25]]


def test_the_debate_of_the_page_hears_its_judge_and_pays_the_answer_that_was_picked():
    page = PAGES["docs/how-to.md"]
    block = page[page.index("    import functools") : page.index("Both debaters are one role")]
    space = {}
    exec(textwrap.dedent(block), space)
    flow, prompts = space["judged_debate"], load_prompts("math", "micro")
    said = lambda place, text: Completion(text, (), (), "stop", text, place)
    script = flow(Task("t", "math", "6+1=?", gold="7"), prompts)
    first = next(script)
    replies = script.send([said(0, "7"), said(1, "8")])
    last = [said(2, "7"), said(3, "9")]
    verdict = script.send(last)
    assert [call.role for call in (*first, *replies, verdict)] == ["debater"] * 4 + ["judge"]
    assert [call.after.call for call in replies] == [0, 1]
    assert [[one.call for one in call.reads] for call in (*replies, verdict)] == [[1], [0], [2, 3]]
    assert verdict.read(r"\boxed{2}") == "2"
    with pytest.raises(StopIteration) as ended:
        script.send(said(4, "2"))
    assert ended.value.value is last[1]
    calls = [types.SimpleNamespace(role="debater", answer="7", reads=()) for _ in range(4)]
    calls.append(types.SimpleNamespace(role="judge", answer="2", reads=(2, 3)))
    assert space["by_the_judge"]([types.SimpleNamespace(calls=calls)]) == [[0.0, 0.0, 0.0, 1.0, 0.0]]


def test_the_page_of_prompts_lists_every_section_of_the_built_in_files_with_its_fields():
    rows = re.findall(
        r"^\| `(\w+)`(?: \(code\))? \| `(\w+)`(?: \(code\))? \| (.+?) \|", PAGES["docs/prompts.md"], re.M
    )
    said = {(role, section): set(re.findall(r"`(\w+)`", given)) for role, section, given in rows}
    found = {}
    for family, size in itertools.product(("math", "code"), ("full", "micro")):
        prompts = load_prompts(family, size)
        for role in prompts.files:
            parts = getattr(prompts, role).sections
            found |= {(role, name): set(re.findall(r"{{(\w+)}}", text)) for name, text in parts.items()}
    assert said == {key: given for key, given in found.items() if key[1] != "system"}


# ---------------------------------------------------------------- what plan counts


def test_the_page_of_numbers_says_what_the_plan_of_its_qwen3_command_counts(monkeypatch):
    monkeypatch.chdir(ROOT)
    (command,) = (
        c for c in COMMANDS if "experiments.train --config=configs/qwen3.py" in c and "runs/qwen3" in c
    )
    spec, texts, _ = split_argv(shlex.split(command))
    config = load_config(spec, texts)
    models, _ = find_models(config)
    plans = [make_plan(config, models, kind) for kind in KINDS[:3]]
    rows = dict(re.findall(r"^\| ([^|`]+) \| (.*) \|$", MEASURED, re.MULTILINE))
    numbers = lambda name: [float(text.split()[0]) for text in rows[name].split(" | ")]
    near = lambda values: pytest.approx(values, rel=0.03)
    assert all(plan.fits for plan in plans)
    assert numbers("memory at the peak") == near([plan.total / 2**30 for plan in plans])
    assert numbers("memory a program can have") == near([kind.memory / 2**30 for kind in KINDS[:3]])
    assert numbers("lanes of all lengths") == [plan.each_shape[0].lanes for plan in plans]
    assert numbers("lanes, of 25,600 tokens") == [plan.each_shape[0].lanes_at[-1] for plan in plans]
    days = 500 * numbers("a step of 512 episodes")[1] / (60 * 24)
    assert f"500 steps are {days:.0f} days on an H100" in MEASURED
    assert numbers("a step of 512 episodes") == near([sum(plan.seconds.values()) / 60 for plan in plans])


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_can_be_read_in_one_sitting(page):
    assert len(PAGES[page].splitlines()) < 200


def test_every_page_is_in_the_navigation_of_the_documentation():
    named = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {path.removeprefix("docs/") for path in PAGES} | {"BUILD_NOTES.md"}


def test_a_built_in_workflow_is_on_its_page_with_its_roles_kinds_families_and_settings():
    page = PAGES["docs/built-in-workflows.md"]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+? \| .+?) \|", page, re.MULTILINE))
    assert set(rows) == set(BUILT_IN)
    for name, found in BUILT_IN.items():
        roles = ", ".join(f"{role}: {found.kind_of(role)}" for role in found.roles)
        assert rows[name] == f"{roles} | {', '.join(found.families)}"
        values = [setting for setting, value in found.settings.items() if not callable(value)]
        assert all(re.search(rf"`{setting}(=\w+)?`", page) for setting in values), (name, values)


def test_a_data_set_is_on_the_page_of_tasks_with_its_family():
    rows = dict(re.findall(r"^\| (`.+`) \| (math|code|either) \|", PAGES["docs/tasks.md"], re.MULTILINE))
    families = {name: source.family or "either" for name, source in SOURCES.items()}
    families |= {"micro_math": "math", "micro_code": "code", "module:function": "either"}
    assert rows == {f"`{name}`": family for name, family in families.items()}
    assert set(NAMES) < set(families)


# ---------------------------------------------------------------- the reference


DOCUMENTED = [name for _, name in everywhere(r"^::: (\S+)$")]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_name_of_the_reference_can_be_imported(name):
    import_name(name)


@pytest.mark.parametrize(
    "room", ["learning", "models", "rewards", "rollouts", "runs", "sampling", "tasks", "workflows"]
)
def test_what_a_room_offers_is_in_the_reference(room):
    offered = importlib.import_module(f"marl_jax.{room}")
    for name in offered.__all__:
        home = getattr(getattr(offered, name), "__module__", None)
        if home and home.startswith("marl_jax"):
            assert home in DOCUMENTED or f"{home}.{name}" in DOCUMENTED, f"{home}.{name}"
