"""What only a run can get wrong about learning: which step is the first, and what is remembered from step to step."""

import dataclasses
import io

import jax.numpy as jnp
import pytest
from run_names import undocumented
from tiny_run import make_base, tiny_config

from marl_jax import policies
from marl_jax.config.run_config import CheckpointConfig, EvaluationConfig, LogConfig, WorkflowConfig
from marl_jax.learning import InterventionConfig, LossConfig
from marl_jax.learning.by_role.interventions import Mixing
from marl_jax.rollouts import read_episodes
from marl_jax.run_folder.checkpoints import steps
from marl_jax.run_folder.json_lines import read_lines
from marl_jax.runs import loop
from marl_jax.runs.divergence import Diverged
from marl_jax.terminal.live import Live
from marl_jax.workflows import Call, workflow

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base") / "tiny")


PLAIN = {
    "evaluation": EvaluationConfig(every=0),
    "checkpoints": CheckpointConfig(every=1, latest=2, best=False),
}


def run(base, workdir, **changes):
    """The lines of a short run that evaluates nothing."""
    config = tiny_config(base, **(PLAIN | changes))
    loop.train(config, workdir, live=Live(config.steps, tuple(config.roles), io.StringIO()))
    return list(read_lines(workdir / "metrics.jsonl"))


def learner(base, **changes):
    return dataclasses.replace(tiny_config(base).learner, **changes)


def test_roles_take_turns_from_the_first_step_on(base, tmp_path):
    turns = InterventionConfig(alternate=("aggregator", "generator"), alternate_every=2)
    lines = run(base, tmp_path / "run", steps=5, learner=learner(base, interventions=turns))
    trained = [
        [role for role in ("aggregator", "generator") if line[f"role/{role}/trained_rows"]] for line in lines
    ]
    assert trained == [["aggregator"]] * 2 + [["generator"]] * 2 + [["aggregator"]]


def test_whatever_a_run_is_asked_to_log_has_a_name_in_the_docs(base, tmp_path):
    """With all that adds a number switched on."""
    config = tiny_config(base)
    options = learner(
        base,
        interventions=InterventionConfig(mixing=Mixing(damping=0.2), kl_coef={"generator": 0.1}),
        gradients="slots",
        layer_norms=True,
        loss=LossConfig(dual_clip=3.0),
        updates="fixed",
        updates_fixed=2,
    )
    changes = {
        "advantages": dataclasses.replace(config.advantages, overlong=(8, 4)),
        "rollout": dataclasses.replace(config.rollout, draws=2),
        "evaluation": EvaluationConfig(every=1, problems=4),
    }
    (line,) = run(base, tmp_path / "run", steps=1, learner=options, **changes)
    for name in (
        "policy/p0/damping_cosine",
        "policy/p0/policy_loss",
        "policy/p0/is_capped",
        "gradient/p0/weight/generator/1",
        "gradient/p0/layers/generator/1/layers/0",
        "gradient/p0/layers/generator/0/embed",
        "gradient/p0/slots/generator/norm/1",
        "role/generator/overlong_penalty",
        "role/generator/kl",
        "draws/rescued",
    ):
        assert name in line, name
    assert undocumented("metrics.jsonl", line) == []
    assert undocumented("metrics.jsonl", {"policy/p0/entropi": 0, "surprise": 0}) == [
        "policy/p0/entropi",
        "surprise",
    ]
    for record in read_lines(tmp_path / "run" / "eval.jsonl"):
        assert undocumented("eval.jsonl", record) == []


def broken(logp, ratio, advantages):
    """A loss that is finite, and whose gradient is not: the slope of a root at 0."""
    return -advantages * ratio + jnp.sqrt(ratio - ratio)


def test_gradients_that_are_not_finite_are_counted_and_end_the_run_at_the_limit(base, tmp_path):
    loss = LossConfig("test_learning_of_runs:broken")
    for last in (3, 6):  # what was good is saved, and the next start comes further
        with pytest.raises(Diverged, match=f"3 gradients were not finite.*step {last} is saved") as error:
            run(
                base,
                tmp_path / "run",
                learner=learner(base, max_skips=3, loss=loss),
            )
        assert "\n" not in str(error.value) and "learning_rate" in str(error.value)
        assert steps(tmp_path / "run" / "checkpoints")[-1] == last
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert [line["policy/p0/skipped"] for line in lines] == [1, 2, 3, 1, 2, 3]
    assert [line["policy/p0/updates"] for line in lines] == [0] * 6


@workflow(roles=("generator", "aggregator"), families=("math",))
def late(task, prompts):
    """Problems of the first step have one role, all others two."""
    draft = yield Call("generator", prompts.generator(question=task.question))
    if task.id not in EARLY:
        return (yield Call("aggregator", [{"role": "user", "content": draft.text}]))
    return draft


EARLY = set()


def test_a_role_that_speaks_later_is_compared_with_what_it_said_first(base, tmp_path):
    logged = LogConfig(episodes_every=1, episodes_problems=4)
    workflow = WorkflowConfig("test_learning_of_runs:late", prompts="micro")
    isolated = dataclasses.replace(tiny_config(base).policies, map=policies.isolated(late.roles))
    changes = {"workflow": workflow, "policies": isolated, "logging": logged}
    run(base, tmp_path / "first", steps=1, **changes)
    played = read_episodes(tmp_path / "first" / "episodes" / "step-000001.parquet")
    EARLY.update(head.task.id for head in played.bare_episodes)
    lines = run(base, tmp_path / "run", steps=3, **changes)
    assert "role/aggregator/rows" not in lines[0] and "drift/aggregator/length_ratio" not in lines[0]
    assert lines[0]["drift/generator/length_ratio"] == 1.0
    assert lines[1]["drift/aggregator/length_ratio"] == 1.0  # these are what it said first
    later, first = (line["role/aggregator/length"] for line in (lines[2], lines[1]))
    assert lines[2]["drift/aggregator/length_ratio"] == pytest.approx(later / first)
