"""What a user can put right is told in one line by every script, before anything is compiled."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import script
from absl import flags, logging
from stored_run import make_base

from marl_jax.commands import cli
from marl_jax.commands import train as command
from marl_jax.models import ModelConfig
from marl_jax.models.hf import write_json
from marl_jax.rollouts import EpisodesFailed
from marl_jax.study.jobs import matrix
from marl_jax.workflows import Call, workflow

SMALL = {
    "data.name": "stored_run:questions",
    "data.problems": 2,
    "rollout.samples": 2,
    "engine.lanes": 16,
    "engine.max_prompt": 320,
    "sampling.max_new_tokens": 8,
}
CELL = "--config=configs/micro.py:voting-isolated-s-math"
NOT_CALLABLE = 3


@workflow(roles=("generator", "aggregator"))
def longer(task, prompts):
    """Asks at length."""
    answer = yield Call("generator", prompts.generator(question=task.question * 40))
    return (yield Call("aggregator", prompts.aggregator(question=task.question, answers=[answer])))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def refused(capfd):
    """Run a script that refuses; its one line, after the headline of a configuration."""

    def run(module, *arguments):
        assert script.run(f"experiments.{module}", *arguments) == 2
        out, error = capfd.readouterr()
        lines = error.removeprefix("the configuration cannot be used:\n  ").splitlines()
        assert not out and len(lines) == 1, error
        return lines[0]

    return run


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((CELL, f"--config.seed={2**70}"), f"seed is {2**70}; it must be at most 2147483647"),
        (("--config=README.md:x",), "--config=README.md:x: 'README.md' is no Python file"),
        ((CELL, "--config.workflow.prompts_folder=/nowhere"), "no prompt files in '/nowhere/math_micro'"),
        ((CELL, f"--config.data.name={__name__}:NOT_CALLABLE"), "is a int: name a function that maps"),
        (
            (CELL, "config.steps=3"),
            "'config.steps=3' is no flag: fields of the configuration are set by --conf",
        ),
        ((CELL, "--config.role_sampling.generator.max_new_tokens=abc"), "is 'abc'; it must be an integer"),
        ((CELL, "--config.engine.max_prompt=4"), "before any question, and there is room for"),
        (
            (CELL, "--config.engine.max_prompt=72", "--config.workflow.name=test_scripts:longer"),
            "engine.max_prompt is 72, and the shortest prompt of 16 problems has ",
        ),
        ((CELL, "--config.data.train_size=8"), "data.problems is 64 and the train split has 8: lower"),
        (
            (CELL, "--config.workflow.name=test_scripts:longer", "--config.road=compiled"),
            "train it on the hosted road, --config.road=hosted",
        ),
        ((CELL, "--config.sampling.top_k=5000"), "sampling.top_k is 5000, and the model has 122 tokens"),
        ((), "--config is missing: give --config=FILE:CELL"),
    ],
)
@pytest.mark.parametrize("module", ["train", "plan"])
def test_a_configuration_that_cannot_be_is_one_line(refused, base, tmp_path, module, arguments, message):
    where = [f"--workdir={tmp_path / 'run'}"] if module == "train" else []
    base = [f"--config.policies.base={base}"] if CELL in arguments else []
    assert message in refused(module, *arguments, *base, *where)


@pytest.mark.parametrize(
    "module, argument, message",
    [
        ("train", "--workdir=", "--workdir is missing: give the directory of the run"),
        ("evaluate", "--workdir=", "--workdir is missing: give the directory of the run"),
        ("export", "--workdir=", "--workdir is missing: give the directory of the run"),
        ("export", "--format=atif --checkpoint=2 --policy=p0", "leave --policy, --checkpoint out"),
        ("report", "--workdir=", "give either --workdir=DIR of one run, or --root=DIR"),
        ("demo", "--problems=0", "flag --problems=0: 0 is not a positive integer"),
        ("demo", "--samples=0", "flag --samples=0: 0 is not a positive integer"),
        ("plan", "--completion=2", "--completion is '2'; it must be a share"),
        ("list", "cells voting extra", "'extra' is one word too many: 2 at most"),
        ("train", "--workdr=x", "Unknown command line flag 'workdr'"),
        (
            "train",
            "--steps=5",
            "flag 'steps': fields of the configuration are set by --config.FIELD=VALUE, and",
        ),
        ("report", "--steps=5", "Unknown command line flag 'steps': --helpshort tells what there is to set"),
        (
            "report",
            "--workdir=configs/bases/micro-xs",
            "configs/bases/micro-xs' (its config.json is not a run's)",
        ),
    ],
)
def test_a_flag_that_cannot_be_is_one_line(refused, module, argument, message):
    cell = [CELL] if module in ("train", "plan") else []
    assert message in refused(module, *cell, *argument.split())
    assert not (script.ROOT / "configs/bases/micro-xs/report.html").exists()


def test_a_demo_of_several_seeds_is_refused_before_it_trains(refused, tmp_path):
    place = tmp_path / "demo"
    assert "the demo trains one seed and seeds is 2" in refused(
        "demo", CELL, "--config.seeds=2", f"--workdir={place}"
    )
    assert not place.exists()


@pytest.mark.parametrize("module", ["evaluate", "export", "report"])
def test_words_and_configurations_are_refused_where_they_mean_nothing(refused, tmp_path, module):
    assert "'samples=4' is no flag: --helpshort" in refused(module, f"--workdir={tmp_path}", "samples=4")
    theirs = "the run has its own configuration: leave {} out; --helpshort tells what there is to set"
    for given in ("--config=no/file.py:x", "--config.workflow.name=single", "--config.nonsense"):
        line = refused(module, f"--workdir={tmp_path}", given)
        assert line == theirs.format(given.partition("=")[0])


def test_a_field_of_a_script_about_a_run_that_is_a_flag_of_it_is_told(refused, tmp_path):
    line = refused(
        "evaluate", f"--workdir={tmp_path}", CELL, "--config.seed=1", "--config.evaluation.samples=4"
    )
    assert line == (
        "the run has its own configuration: leave --config, --config.seed, --config.evaluation.samples out: "
        "did you mean --seed=1 --samples=4?"
    )


def test_a_tokenizer_without_a_chat_template_is_refused_when_it_is_loaded(refused, base, tmp_path):
    dumb = shutil.copytree(base, tmp_path / "dumb")
    (dumb / "chat_template.jinja").unlink(missing_ok=True)
    about = json.loads((dumb / "tokenizer_config.json").read_text())
    about.pop("chat_template", None)
    (dumb / "tokenizer_config.json").write_text(json.dumps(about))
    line = refused("train", CELL, f"--config.policies.base={dumb}", f"--workdir={tmp_path / 'run'}")
    assert line == f"the tokenizer in '{dumb}' has no chat template: start from a model that chats"


def test_a_role_without_words_is_refused(refused, base, tmp_path):
    (tmp_path / "math_micro").mkdir()
    (tmp_path / "math_micro" / "generator.md").write_text("## user\n{{question}}\n")
    flags = (CELL, f"--config.policies.base={base}", f"--config.workflow.prompts_folder={tmp_path}")
    message = "workflow.prompts_folder: no prompt file for role 'aggregator'; there is: generator"
    assert refused("train", *flags, f"--workdir={tmp_path / 'run'}") == message


def test_a_run_that_cannot_fit_is_refused_before_its_weights_are_read(refused, tmp_path):
    huge = dataclasses.replace(ModelConfig.preset("xs"), hidden_size=1 << 16, num_hidden_layers=1000)
    write_json(tmp_path / "config.json", huge.to_hf())  # no weights, no tokenizer
    line = refused("train", CELL, f"--config.policies.base={tmp_path}", f"--workdir={tmp_path / 'run'}")
    assert "the biggest permanent part is optimiser states" in line  # no engine, no update would save it


@pytest.mark.parametrize(
    "given, found",
    [
        ("", "--xla_gpu_deterministic_ops=true"),
        ("--xla_a=1", "--xla_a=1 --xla_gpu_deterministic_ops=true"),
        ("--xla_gpu_deterministic_ops=false", "--xla_gpu_deterministic_ops=false"),
    ],
)
def test_every_script_asks_for_deterministic_kernels_unless_the_user_chose(monkeypatch, given, found):
    monkeypatch.setenv("XLA_FLAGS", given)
    monkeypatch.setattr(sys, "argv", ["script"])
    seen = []
    with pytest.raises(SystemExit):
        cli.run(lambda config, left: seen.append(os.environ["XLA_FLAGS"]))
    assert seen == [found]


@pytest.mark.parametrize(
    "said, advice",
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.12GiB on device 0.", "same command"),
        ("Unable to initialize backend 'cuda': INTERNAL: no supported devices", "JAX_PLATFORMS=cpu"),
    ],
)
def test_what_jax_says_of_a_device_is_shown_with_a_way_out(tmp_path, monkeypatch, capsys, said, advice):
    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError(f"{said}\nand a long account of the allocator")

    monkeypatch.setattr(command, "train_and_report", fails)
    config = "--config=configs/micro.py:voting-shared-xs-math"
    assert script.run("experiments.train", config, f"--workdir={tmp_path}") == cli.FAILED
    first, second = capsys.readouterr().err.splitlines()
    assert first == said and advice in second
    said = "INTERNAL: something else"
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):  # an error of another kind keeps its trace
        script.run("experiments.train", config, f"--workdir={tmp_path}")


@pytest.mark.long
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="a GPU is here")
def test_a_gpu_that_is_not_here_is_told_in_a_line(tmp_path):
    command = [sys.executable, "-m", "experiments.train", "--config=configs/micro.py:single-shared-xs-math"]
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    done = subprocess.run(
        [*command, f"--workdir={tmp_path}"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == cli.FAILED and "Traceback" not in done.stderr
    assert "JAX_PLATFORMS=cpu runs on the processor" in done.stderr


@pytest.mark.parametrize("module", ["train", "demo", "evaluate", "export"])
def test_the_flag_that_refusals_advise_is_there(module, capsys):
    assert script.run(f"experiments.{module}", "--accept_changes", "no flag") == 2
    assert "'no flag' is no flag" in capsys.readouterr().err
    assert "accept_changes" not in flags.FLAGS
    assert script.run(f"experiments.{module}", "--helpshort") == 0
    assert "accept_changes" in capsys.readouterr().out


# ---------------------------------------------------------------- a matrix of runs


@pytest.mark.long
def test_a_small_matrix_from_the_command_line_to_its_page(base, tmp_path, monkeypatch, capfd):
    """Its children are run in this process, which has JAX loaded."""
    monkeypatch.setattr(matrix, "_run", lambda command, stop: script.run(*command))
    evaluated = {"evaluation.every": 1, "evaluation.problems": 6}
    small = SMALL | evaluated | {"policies.base": base, "steps": 3}
    asked = ["--config=configs/micro.py:single-shared-xs-math", f"--root={tmp_path / 'runs'}", "--seeds=2"]
    asked += [f"--config.{name}={value}" for name, value in small.items()]
    assert script.run("experiments.matrix", *asked) == 0
    out, error = capfd.readouterr()
    assert "[2/2] single-shared-xs-math, seed 1: –" in error
    for title in ("Cells", "Cells on test problems"):
        assert f"\n{title}\n\n" in f"\n{out}"
    assert out.count("single-shared-xs-math ") >= 2 and "of 2 seeds" not in out
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "<h2>Cells</h2>" in page and "2 runs." in page
    assert script.run("experiments.matrix", *asked) == 0  # nothing is left to do
    assert "[2/2] single-shared-xs-math, seed 1: done" in capfd.readouterr().err


@pytest.mark.long
def test_training_several_seeds_ends_with_a_page_over_all(base, tmp_path, capfd):
    small = SMALL | {"policies.base": base, "steps": 1, "seeds": 2}
    asked = ["--config=configs/micro.py:single-shared-xs-math", f"--workdir={tmp_path / 'runs'}"]
    asked += [f"--config.{name}={value}" for name, value in small.items()]
    assert script.run("experiments.train", *asked) == 0
    page = tmp_path / "runs" / "report.html"
    assert f"the report is {page}" in capfd.readouterr().err and "2 runs." in page.read_text()


def test_a_dry_run_refuses_the_cells_that_training_would_refuse(tmp_path, capfd):
    asked = ("--config=micro", "--cells=single-shared-xs-*", f"--root={tmp_path / 'runs'}", "--dry_run")
    assert script.run("experiments.matrix", *asked) == 0
    assert "2 cells x 1 seed = 2 runs" in capfd.readouterr().out
    assert script.run("experiments.matrix", *asked, "--config.engine.max_prompt=20") == 2
    out, error = capfd.readouterr()
    _, line = error.splitlines()
    assert not out and "engine.max_prompt is 20, and the shortest prompt of 16 problems has" in line
    assert line.endswith("(single-shared-xs-code)")  # those of math are shorter


def test_warnings_are_sentences_and_not_lines_of_a_log(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script"])
    told = io.StringIO()

    def main(*_):
        handler = logging.get_absl_handler().python_handler
        monkeypatch.setattr(handler, "stream", told)
        logging.warning("%d rows are broken", 3)
        logging.error("the disk is slow")

    with pytest.raises(SystemExit) as end:
        cli.run(main)
    assert not end.value.code
    assert told.getvalue() == "warning: 3 rows are broken\nerror: the disk is slow\n"


def test_a_run_that_fails_is_told_without_a_traceback_of_the_library(capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script"])

    def main(*_):
        raise EpisodesFailed("workflow 'x': all 4 episodes ended in an error; the first:\nTraceback ...")

    with pytest.raises(SystemExit) as end:
        cli.run(main)
    assert end.value.code == cli.FAILED == 1
    assert capfd.readouterr().err.splitlines()[1:] == ["Traceback ..."]


def test_ctrl_c_ends_a_command_at_once_while_it_imports_its_packages(monkeypatch):
    lines = (
        "import sys, signal",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",  # of a job in the background it is ignored
        "sys.argv = ['-m']",
        "import experiments",
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_DFL)",
        "from marl_jax.commands import cli",
        "handler = lambda *_: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)",
        "cli.run(handler, read=cli.no_config)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")


@pytest.mark.parametrize("reads", [True, False])
def test_ctrl_c_is_one_line(capfd, monkeypatch, reads):
    monkeypatch.setattr(sys, "argv", ["script", CELL] if reads else ["script"])

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        cli.run(interrupted, read=interrupted)
    assert (end.value.code, capfd.readouterr().err) == (130, "interrupted\n")
