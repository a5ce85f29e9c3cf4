"""The mechanisms that the study names, shown on policies small enough to know the truth of.

The network is a table: the logits of the next token depend on the last one alone, or on nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learning_rows import Row, as_table

from marl_jax.learning.batching import BatchConfig
from marl_jax.learning.by_role.interventions import InterventionConfig, Mixing
from marl_jax.learning.estimators.advantages import group_advantages
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.losses import LossConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.learning.update import Learner


@dataclasses.dataclass(frozen=True)
class LogitTable:
    """logits = weights[last token % contexts]"""

    contexts: int

    def hidden(self, trained, frozen, batch):
        return jax.nn.one_hot(batch.tokens % self.contexts, self.contexts)

    def head(self, trained, frozen):
        return trained["w"]


def sgd(rate):
    return OptimiserConfig("sgd", ScheduleConfig(rate), b1=0.0, weight_decay=0.0, grad_clip=None)


def learner(contexts, roles, *, loss=None, rate=1.0, **options):
    batch = BatchConfig((16, 64, 256, 1024), 4096, share_prompts=False)
    loss = loss or LossConfig("pg", "token_mean")
    return Learner(LogitTable(contexts), LearnerConfig(loss, sgd(rate), batch, **options), roles)


def row(role, tokens, advantage=1.0, slot=0, logprobs=None, prompt=(0,)):
    logprobs = [0.0] * len(tokens) if logprobs is None else logprobs
    return Row("p0", role, 0, slot, 0, prompt, tuple(tokens), logprobs, advantage=advantage)


def amplification(rows, contexts, vocab):
    run = learner(contexts, {"voter": "p0"}, gradients="slots")
    trees = {"p0": {"w": jnp.zeros((contexts, vocab))}}
    _, _, report = run.step(trees, run.init(trees), as_table(rows))
    return report.gradients["p0"]["slots"]["voter"]["amplification"]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_identical_parallel_slots_amplify_the_gradient_n_times(n):
    tokens = np.random.default_rng(0).integers(0, 32, 20).tolist()
    rows = [row("voter", tokens, slot=slot) for slot in range(n)]
    assert amplification(rows, 8, 32) == pytest.approx(n, rel=1e-4)


def test_independent_parallel_slots_amplify_by_the_root_of_n():
    rng, n = np.random.default_rng(0), 4
    rows = [
        row("voter", rng.integers(0, 64, 200).tolist(), rng.choice([-1.0, 1.0]), s)
        for s in range(n)
        for _ in range(2)
    ]
    assert amplification(rows, 64, 64) == pytest.approx(2.0, rel=0.1)


def take_over(balance):
    """A writer with ten times the judge's tokens wants arm 0 where the judge wants arm 1, on the same weights."""
    mixing = Mixing(balance=balance)
    run = learner(1, {"writer": "p0", "judge": "p0"}, interventions=InterventionConfig(mixing))
    trees = {"p0": {"w": jnp.zeros((1, 4))}}
    states = run.init(trees)
    rows = [row("writer", [0] * 10), row("judge", [1])]
    for _ in range(40):
        trees, states, report = run.step(trees, states, as_table(rows))
        if report.policies["p0"]["updates"] == 1:
            first = report.gradients["p0"]
    return np.asarray(jax.nn.softmax(trees["p0"]["w"][0])), first


def test_a_role_with_ten_times_the_tokens_captures_a_shared_policy():
    arms, first = take_over("off")
    assert first["share"]["writer"] == pytest.approx(10 / 11, rel=1e-4) and first["dominance"] > 0.9
    assert arms[0] > 0.85 and arms[1] < 0.12


def test_mass_balancing_stops_the_capture():
    arms, first = take_over("equalise")
    assert first["weight"]["judge"] == pytest.approx(10 * first["weight"]["writer"], rel=1e-4)
    assert abs(arms[0] - arms[1]) < 0.02 and arms[0] + arms[1] > 0.9


REWARDS = np.array([0.0, 0.2, 1.0, 0.5])


def play(loss, *, steps, rate, samples, estimator="grpo", kl_coef=0.0, **options):
    """A bandit of four arms, sampled from its own policy; the probabilities it ends with."""
    rng = np.random.default_rng(0)
    interventions = InterventionConfig(kl_coef={"player": kl_coef} if kl_coef else {})
    run = learner(1, {"player": "p0"}, loss=loss, rate=rate, interventions=interventions, **options)
    start = np.log([0.4, 0.3, 0.1, 0.2])[None].astype(np.float32)
    trees, reference = {"p0": {"w": jnp.asarray(start)}}, {"p0": {"w": jnp.asarray(start)}}
    states = run.init(trees)
    for step in range(steps):
        p = np.asarray(jax.nn.softmax(trees["p0"]["w"][0]), np.float64)
        arms = rng.choice(4, samples, p=p / p.sum())
        advantages = np.asarray(group_advantages(REWARDS[arms], np.zeros(samples, int), estimator=estimator))
        rows = [row("player", [int(a)], float(x), logprobs=[np.log(p[a])]) for a, x in zip(arms, advantages)]
        anchor = reference if kl_coef else None
        trees, states, _ = run.step(trees, states, as_table(rows), step=step, references=anchor)
    return np.asarray(jax.nn.softmax(trees["p0"]["w"][0]))


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig("ppo"),
        pytest.param(LossConfig("ppo", "token_mean", dual_clip=3.0), marks=pytest.mark.long),
        pytest.param(LossConfig("gspo", clip_low=0.05, clip_high=0.05), marks=pytest.mark.long),
        pytest.param(LossConfig("cispo"), marks=pytest.mark.long),
        pytest.param(LossConfig("pg"), marks=pytest.mark.long),
    ],
    ids=lambda loss: f"{loss.kind}-{loss.aggregation}",
)
def test_every_loss_finds_the_best_arm(loss):
    # Two mini-batches and two epochs: most updates are off-policy, where the losses differ.
    arms = play(loss, steps=40, rate=0.5, samples=64, updates="fixed", updates_fixed=2, epochs=2)
    assert arms[2] > 0.95


@pytest.mark.long
def test_an_anchored_policy_converges_to_the_tilted_reference():
    # argmax E[r] - beta KL(p || ref) is ref exp(r / beta) / Z; the gradient of k2 is that of the KL.
    beta = 0.5
    want = np.array([0.4, 0.3, 0.1, 0.2]) * np.exp(REWARDS / beta)
    arms = play(LossConfig("pg", kl="k2"), steps=50, rate=1.0, samples=512, estimator="dr_grpo", kl_coef=beta)
    np.testing.assert_allclose(arms, want / want.sum(), atol=0.05)
