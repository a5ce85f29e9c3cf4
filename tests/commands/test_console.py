"""The console command is the scripts from any folder; packaged cells are found by name, and the user's files first."""

import os
import subprocess
import sys

import pytest

from marl_jax import packaged
from marl_jax.commands import console
from marl_jax.config.run_config import ConfigError, load_config
from marl_jax.models import load_hf
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.run_folder.folder import digest_model


def console_says(capsys, *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["marl-jax", *words])
        code = console.main()
    return code, *capsys.readouterr()


def test_every_command_is_a_script_and_every_script_a_command(capsys):
    scripts = {path.stem for path in packaged.packaged("experiments").glob("*.py")} - {"__init__", "cli"}
    assert scripts == set(console.COMMANDS)
    code, out, _ = console_says(capsys, "--help")
    assert code is None and all(f"\n  {name} " in out for name in console.COMMANDS)


def test_an_unknown_command_is_one_line(capsys):
    code, out, error = console_says(capsys, "trian")
    assert (code, out, error) == (2, "", "'trian' is no command: did you mean 'train'?\n")


@pytest.mark.parametrize(
    "words",
    [
        ["marl_jax", "--help"],
        pytest.param(["experiments.train", "--help"], marks=pytest.mark.long),
        pytest.param(["experiments.docs", "workflows.Call"], marks=pytest.mark.long),
        pytest.param(["marl_jax", "plan", "--config=micro:single-shared-xs-math"], marks=pytest.mark.long),
        pytest.param(
            [
                "marl_jax",
                "matrix",
                "--config=micro",
                "--root=none",
                "--cells=single-shared-xs-math",
                "--dry_run",
            ],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_reader_that_has_enough_ends_a_command_in_silence(words):
    read, write = os.pipe()
    os.close(read)  # as `| head` does
    env = {**os.environ, "PYTHONPATH": str(packaged.HOME.parent)}
    run = subprocess.run([sys.executable, "-m", *words], stdout=write, stderr=subprocess.PIPE, env=env)
    os.close(write)
    assert (run.returncode, run.stderr) == (0, b"")


def test_output_on_a_full_disk_is_one_line():
    env = {**os.environ, "PYTHONPATH": str(packaged.HOME.parent)}
    command = [sys.executable, "-m", "marl_jax", "docs", "glossary"]
    with open("/dev/full", "w") as disk:
        run = subprocess.run(command, stdout=disk, stderr=subprocess.PIPE, env=env, text=True)
    line = "the output cannot be written (No space left on device): make room on its disk\n"
    assert (run.returncode, run.stderr) == (1, line)


def test_a_command_without_outputs_writes_to_none(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    console.make_output_safe()
    print("said", file=sys.stderr)
    assert sys.stdout.name == sys.stderr.name == os.devnull


@pytest.mark.parametrize("words", ["marl_jax docs glossary", "experiments.train --helpshort"])
def test_a_command_whose_output_is_closed_ends_in_silence(words):
    """As a service may start one."""
    env = {**os.environ, "PYTHONPATH": str(packaged.HOME.parent)}
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", *words.split()]
    run = subprocess.run(command, stderr=subprocess.PIPE, env=env)
    assert (run.returncode, run.stderr) == (0, b"")


@pytest.mark.long
def test_a_command_runs_from_a_folder_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text("def carry(graded):\n    return [1.0 for one in graded]\n")
    asked = ["plan", "--config=micro:voting-isolated-xs-math", "--config.rewards.name=mine:carry"]
    env = {**os.environ, "PYTHONPATH": str(packaged.HOME.parent)}
    run = [sys.executable, "-c", "import sys; from marl_jax.commands.console import main; sys.exit(main())"]
    done = subprocess.run([*run, *asked], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "voting-isolated-xs-math: " in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".py") == ["mine.py"]


def test_packaged_cells_are_those_of_the_clone_and_a_file_of_that_name_wins(tmp_path, monkeypatch):
    wanted = load_config("configs/micro.py:voting-isolated-xs-math")
    assert load_config("micro:voting-isolated-xs-math") == wanted
    monkeypatch.chdir(tmp_path)
    assert load_config("micro:voting-isolated-xs-math") == wanted
    assert (
        load_config("configs/micro.py:voting-isolated-xs-math") == wanted
    )  # the package's, where there is none
    assert load_config("study:voting-isolated-xs-math").advantages.group == "study"
    own = "from marl_jax.config.run_config import load_config\n"
    own += "def get_config(name):\n    return load_config('qwen3:' + name)\n"
    (tmp_path / "micro").write_text(own)
    with pytest.raises(ConfigError, match="'micro' is no Python file"):
        load_config("micro:voting-isolated-0.6b-math")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "micro.py").write_text(own)
    assert load_config("configs/micro.py:voting-isolated-0.6b-math").cell == "voting-isolated-0.6b-math"
    with pytest.raises(ConfigError, match="there is no file 'mcro': did you mean 'micro'"):
        load_config("mcro:x")


def test_a_base_of_the_package_is_found_from_any_folder_and_ones_own_first(tmp_path, monkeypatch):
    base = "configs/bases/micro-xs"
    wanted = digest_model(base)
    monkeypatch.chdir(tmp_path)
    assert digest_model(base) == wanted
    config, _ = load_hf(base)
    assert load_tokenizer(base, config).chat_template
    (tmp_path / base).mkdir(parents=True)
    (tmp_path / base / "config.json").write_text("{}")
    assert digest_model(base) != wanted
    assert packaged.resolve_path("elsewhere/bases/micro-xs") == packaged.Path("elsewhere/bases/micro-xs")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packaged.resolve_path(f"~/{base}") == tmp_path / base


def test_help_that_was_asked_for_is_no_failure_and_loads_nothing_that_it_does_not_say():
    env = {**os.environ, "PYTHONPATH": str(packaged.HOME.parent)}
    for word in ("--help", "--helpshort"):
        command = [sys.executable, "-X", "importtime", "-m", "marl_jax", "try", word]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "--problems: how many problems" in done.stdout
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        heavy = {"transformers", "orbax", "matplotlib", "tensorflow_datasets", "sympy", "pandas"}
        assert "jax" in loaded and not heavy & loaded
