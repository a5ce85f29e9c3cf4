"""A run tells an alarm when it begins, writes it down, shows it on its page, and stops by it if asked to."""

import dataclasses
import io

import pytest
import script
from run_kit import records, same
from run_names import undocumented
from tiny_run import tiny_config

from marl_jax.rewards.credit import CreditConfig
from marl_jax.runs import loop
from marl_jax.study.report.html_page import write_report
from marl_jax.terminal.live import Live


def nothing(episodes):
    """Pays all calls the same, so that no group teaches anything."""
    return [0.0 for _ in episodes]


def run(base, workdir, **changes):
    """(the step it came to, what the live view said)."""
    config = tiny_config(base, rewards=CreditConfig(name="test_alarms:nothing"), **changes)
    stream = io.StringIO()
    step = loop.train(config, workdir, live=Live(config.steps, config.roles, stream))
    return step, stream.getvalue()


@pytest.fixture(scope="module")
def told(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("told") / "run"
    step, said = run(base, workdir)
    assert step == 8
    return workdir, said


@pytest.mark.long
def test_it_is_told_and_written_down_where_it_begins(told):
    workdir, said = told
    lines, _ = records(workdir)
    begun = [(line["step"], one) for line in lines for one in line.get("alarms", [])]
    mine = [(step, one["who"], one["evidence"]) for step, one in begun if one["name"] == "nothing to learn"]
    evidence = {"share": 1.0, "groups": 12.0}  # of four problems in three steps
    assert mine == [(3, "generator", evidence), (3, "aggregator", evidence)]
    assert all(step in (one["step"], one["step"] + 1) for step, one in begun)
    assert said.count("ALARM at step 3: nothing to learn (generator): 100% of 12 groups") == 1
    assert [name for line in lines for name in undocumented("metrics.jsonl", line)] == []


@pytest.mark.long
def test_it_stands_at_the_top_of_the_page(told):
    page = write_report(told[0]).read_text()
    assert page.index("nothing to learn (generator) since step 3") < page.index("<figure")


@pytest.mark.long
def test_a_run_that_stops_by_it_is_saved_says_how_to_go_on_and_ends_as_if_it_had_not(
    base, told, tmp_path, capfd
):
    cells = "from tiny_run import CreditConfig, tiny_config\ndef get_config(cell):\n    return tiny_config("
    (tmp_path / "cells.py").write_text(
        f"{cells}{str(base)!r}, rewards=CreditConfig('test_alarms:nothing'))\n"
    )
    command = f"--config={tmp_path / 'cells.py'}:x", f"--workdir={tmp_path / 'run'}"
    for _ in range(2):  # it holds again at the next start
        assert script.run("experiments.train", *command, "--config.alarms=stop") == 0
        said = capfd.readouterr().err.splitlines()
        assert len(records(tmp_path / "run")[0]) == 3 and not (tmp_path / "run" / "report.html").exists()
        (line,) = [line for line in said if line.startswith("stopped after step 3 by")]
        assert "nothing to learn (generator) since step 3" in line and "--config.alarms=tell" in line
    step, said = run(base, tmp_path / "run", alarms="tell")
    assert step == 8 and "resumed after step 3" in said
    same(tmp_path / "run", told[0])


@pytest.mark.long
def test_lines_that_are_made_again_have_it_again(base, told, tmp_path, monkeypatch):
    """Broken off after the line of step 3, which no checkpoint knows of."""
    write = Live.step

    def broken(self, step, metrics):
        if step == 3:
            raise KeyboardInterrupt
        write(self, step, metrics)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Live, "step", broken)
        run(base, tmp_path / "run")
    assert [bool(line.get("alarms")) for line in records(tmp_path / "run")[0]][2]
    step, said = run(base, tmp_path / "run")
    assert step == 8 and "ALARM at step 3" in said
    same(tmp_path / "run", told[0])


def test_an_alarm_is_a_matter_of_this_start_and_no_other_run(base):
    config = tiny_config(base)
    with pytest.raises(ValueError, match=r"alarms is 'shout'"):
        dataclasses.replace(config, alarms="shout")
