"""A run of episodes that fork: killed and resumed it ends the same, and its lines, files and page know of paths."""

import dataclasses
import json

import numpy as np
import pytest
from run_kit import quiet, records, same
from run_names import undocumented
from tiny_run import branching, letters, tiny_config

from marl_jax.config.run_config import RolloutConfig
from marl_jax.learning import Learner
from marl_jax.planning.plan import demand_of
from marl_jax.rewards.credit import CreditConfig
from marl_jax.rollouts import read_episodes
from marl_jax.runs import loop
from marl_jax.study.report.html_page import write_report

pytestmark = pytest.mark.long


def config(base, **changes):
    return branching(tiny_config(base, steps=4, **changes))


@pytest.fixture(scope="module")
def grown(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("grown") / "run"
    assert loop.train(config(base), workdir, live=quiet(4)) == 4
    return workdir


def test_killed_while_it_learns_and_resumed_it_ends_the_same(base, grown, tmp_path, monkeypatch):
    learn, visits = Learner.step, []

    def dies(*args, **options):
        visits.append(1)
        if len(visits) == 4:
            raise KeyboardInterrupt("killed")
        return learn(*args, **options)

    monkeypatch.setattr(Learner, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        loop.train(config(base), tmp_path / "run", live=quiet(4))
    monkeypatch.undo()
    assert loop.train(config(base), tmp_path / "run", live=quiet(4)) == 4
    same(tmp_path / "run", grown, "branching")


def test_its_lines_count_trees_and_paths(grown):
    metrics, evaluations = records(grown)
    for line in metrics:
        # Of each of 4 x 2 episodes: a draft, two that go on, and two and four answers.
        assert (line["episodes"], line["calls"], line["tree/paths"], line["failed"]) == (8, 8 * 9, 6, 0)
        assert {"tree/apart/1", "tree/apart/2"} <= set(line) and not undocumented("metrics.jsonl", line)
    for line in evaluations:
        assert line["calls_per_episode"] == 9 and line["roles"]["aggregator"]["calls"] == 4 * 6
        assert not undocumented("eval.jsonl", line)


def test_its_rewards_are_means_over_paths(grown):
    table = read_episodes(grown / "episodes" / "step-000001.parquet")
    flat, rows = table.paths()
    shares = np.array([share for calls in letters(flat.episodes()) for share in calls])
    wanted = [shares[rows == row].mean() for row in range(len(table))]
    np.testing.assert_allclose(table.reward, wanted, rtol=1e-12)


def test_its_page_shows_paths(grown):
    page = write_report(grown).read_text()
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert {one["p"] for one in data["said"]["episodes"]} >= {"0.0", "1.1"}


def test_its_plan_counts_every_branch(base):
    demand = demand_of(config(base))
    assert demand.most_calls == 9
    assert len(demand.calls) == 4 * 2 * 9


def test_one_sample_will_do_where_branches_are_compared(base):
    alone = {"rewards": CreditConfig(), "rollout": RolloutConfig(samples=1)}
    assert dataclasses.replace(config(base), **alone).rollout.samples == 1
    with pytest.raises(ValueError, match=r"rollout\.samples is 1"):
        tiny_config(base, **alone)
