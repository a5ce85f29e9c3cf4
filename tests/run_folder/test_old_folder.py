"""A run folder of the last schema, written by commit facd658, is still read by evaluate, export and report."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from marl_jax.commands.contenders import Evaluation
from marl_jax.commands.evaluate import evaluate
from marl_jax.commands.export import export
from marl_jax.models import load_hf
from marl_jax.rollouts import read_episodes
from marl_jax.run_folder.folder import FolderError, read_config
from marl_jax.runs import train
from marl_jax.study.report.html_page import write_report

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests/fixtures/old_run/run"


@pytest.fixture
def old(tmp_path, monkeypatch):
    """A copy that may be written to; its base is named as seen from the repository's root."""
    monkeypatch.chdir(ROOT)
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def test_its_policies_answer_as_they_did(old):
    recorded = [json.loads(line) for line in (OLD / "eval.jsonl").read_text().splitlines()]
    again = evaluate(old, Evaluation(checkpoint="all", split="val", problems=4))
    assert [record["step"] for record in again] == [0, 2]
    for record, line in zip(again, recorded):
        for name in ("accuracy", "tokens_per_episode"):  # of the same noise
            assert record[name] == line[name], name
        for role, numbers in line["roles"].items():
            assert numbers.items() <= record["roles"][role].items()


def test_its_policies_are_exported(old, tmp_path):
    weights = {}
    for which in ("base", "latest"):
        export(old, "p0", tmp_path / which, checkpoint=which, dtype="float32")
        weights[which] = load_hf(tmp_path / which)[1]["layers"]["q"]
    start = load_hf(OLD.parent / "base", dtype="float32")[1]["layers"]["q"]
    np.testing.assert_array_equal(weights["base"], start)
    # No answer was right, so that both steps only let the weights decay: by 0.03 times 0.01 each.
    np.testing.assert_allclose(weights["latest"], np.asarray(start) * (1 - 3e-4) ** 2, rtol=1e-6)


def test_its_page_shows_what_was_said_and_earned(old):
    page = Path(write_report(old)).read_text()
    table = read_episodes(old / "episodes" / "step-000002.jsonl.gz")
    assert len(table.bare_episodes) == 4 and table.reward.shape == table.advantage.shape == (12,)
    assert table.bare_episodes[0].task.question in page and "aggregator" in page


def test_training_does_not_go_on_in_it_unasked(old):
    with pytest.raises(FolderError, match=r"versions\.code: "):
        train(read_config(old), old)
