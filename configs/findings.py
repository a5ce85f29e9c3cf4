"""The runs behind docs/findings.md: cells of `micro` and variants of them, in parts.

A name is a cell and, after plus signs, its changes: voting-isolated-xs-math+votes6+long. A part is a set:

    python -m experiments.matrix --config=configs/findings.py --cells=agents --seeds=3 --root=runs/findings

Evaluations play 256 problems, four times as many as those of `micro`, for differences of a few points.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from marl_jax.config.run_config import EngineConfig, EvaluationConfig, RunConfig, config_module
from marl_jax.learning.optimiser import ScheduleConfig
from marl_jax.workflows import BUILT_IN

micro, study = (config_module(Path(__file__).with_name(f"{name}.py")) for name in ("micro", "study"))

Change = Callable[[RunConfig], RunConfig]


def get_config(name: str) -> RunConfig:
    """The configuration of a name such as voting-isolated-xs-math+votes6+long."""
    cell, *changes = name.split("+")
    if unknown := [change for change in changes if change not in CHANGES]:
        raise ValueError(f"{name!r} has the change {unknown[0]!r}; there is: {', '.join(CHANGES)}")
    config = micro.get_config(cell)
    # Not `auto`: the road of a run must not depend on its machine.
    road = "compiled" if BUILT_IN[config.workflow.name].in_arrays else "hosted"
    config = dataclasses.replace(config, road=road, evaluation=EvaluationConfig(problems=256))
    # The number of steps first: the original's schedule ends with them.
    for change in sorted(changes, key=lambda change: change != "long"):
        config = CHANGES[change](config)
    return config


def _with(**settings: int) -> Change:
    """Other settings of the workflow; with many agents or rounds, prompts are longer."""

    def change(config: RunConfig) -> RunConfig:
        workflow = dataclasses.replace(config.workflow, settings={**config.workflow.settings, **settings})
        longest = 896 if settings.get("rounds", 0) > 3 else 576 if settings.get("votes", 0) > 6 else None
        if longest is None:
            return dataclasses.replace(config, workflow=workflow)
        batch = dataclasses.replace(config.learner.batch, buckets=(256, 512, 1024))
        learner = dataclasses.replace(config.learner, batch=batch)
        return dataclasses.replace(
            config, workflow=workflow, learner=learner, engine=EngineConfig(max_prompt=longest)
        )

    return change


def _steps(steps: int) -> Change:
    return lambda config: dataclasses.replace(config, steps=steps)


def _rate(times: int) -> Change:
    """A multiple of the learning rate."""

    def change(config: RunConfig) -> RunConfig:
        optimiser = config.learner.optimiser
        rate = round(times * optimiser.schedule.learning_rate, 9)
        schedule = dataclasses.replace(optimiser.schedule, learning_rate=rate)
        return _learner(config, optimiser=dataclasses.replace(optimiser, schedule=schedule))

    return change


def _learner(config: RunConfig, **changes: object) -> RunConfig:
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, **changes))


def _schedule(config: RunConfig) -> RunConfig:
    """Only the schedule of the original's regime: one cosine that all policies step, and that rises again."""
    optimiser = config.learner.optimiser
    schedule = ScheduleConfig.study(config.steps, optimiser.schedule.learning_rate)
    return _learner(config, optimiser=dataclasses.replace(optimiser, schedule=schedule))


def _intervene(config: RunConfig, **changes: object) -> RunConfig:
    return _learner(config, interventions=dataclasses.replace(config.learner.interventions, **changes))


def _mixing(**changes: object) -> Change:
    return lambda config: _intervene(
        config, mixing=dataclasses.replace(config.learner.interventions.mixing, **changes)
    )


def _anchor(config: RunConfig) -> RunConfig:
    """The study's first intervention: a KL penalty that keeps every role near its start."""
    return _intervene(config, kl_coef=dict.fromkeys(config.policies.map, 0.02))


CHANGES: dict[str, Change] = {
    **{f"votes{votes}": _with(votes=votes) for votes in (1, 2, 3, 4, 6, 8)},
    **{f"rounds{rounds}": _with(rounds=rounds) for rounds in (1, 6)},
    **{f"calls{calls}": _with(calls=calls) for calls in (2, 3)},
    **{f"tokens{tokens}": _with(tokens=tokens) for tokens in (29, 41, 98)},
    "slots": lambda config: _learner(config, gradients="slots"),
    **{f"rate{times}": _rate(times) for times in (3, 6, 10)},
    "short": _steps(10),
    "long": _steps(400),
    # The original study's regime, or only one of its two confounds.
    "regime": lambda config: dataclasses.replace(study.under_regime(config), road="hosted"),
    "schedule": _schedule,
    "updates": lambda config: dataclasses.replace(_learner(config, updates="sequences"), road="hosted"),
    # Interventions that might help.
    "anchor": _anchor,
    "multiplicity": _mixing(normalise_multiplicity=True),
    "equalise": _mixing(balance="equalise"),
    "damping": _mixing(damping=0.3),
    # Where runs fell, a generator's gradient is usually 0.05 to 0.1 long, in a jolt 0.5 to 0.9: docs/findings-falls.md.
    "clip": lambda config: _intervene(config, role_clip={"generator": 0.2}),
    # The anchor with an estimate of KL whose gradient grows with the log-ratio, not with the ratio.
    "k2": lambda config: _learner(config, loss=dataclasses.replace(config.learner.loss, kl="k2")),
}
STEEP = (
    "voting-isolated-xs-math+votes6+long",
    "voting-shared-xs-math+votes6+long",
    "eval_opt-shared-xs-math+rounds6+long",
)
FLAT = tuple(name.replace("6", "1") for name in STEEP)
# No cell of STEEP fell. Confounds and interventions are tried in this one, at a fraction of the time of six agents and
# 400 steps (the hours are in docs/findings-runs.md), and interventions again at the rate at which a run fell.
BASE = "voting-isolated-xs-math"
SETS = {
    "xs-math": tuple(name for name in micro.SETS["study"] if name.endswith("-xs-math")),
    "agents": STEEP + FLAT,
    "regime": tuple(f"{name}+regime" for name in STEEP),
    "confounds": tuple(f"{BASE}+{change}" for change in ("regime", "schedule", "updates")),
    # On isolated policies under AdamW only the anchor acts, and damping where a cosine varies (docs/losses.md). Damping
    # that acts on one role of a shared policy is refused.
    "interventions": tuple(
        f"{cell}+{change}"
        for cell, changes in (
            (BASE, ("anchor", "multiplicity", "equalise", "damping")),
            ("voting-shared-xs-math", ("anchor", "multiplicity", "equalise")),
        )
        for change in changes
    ),
    "amplification": tuple(f"voting-isolated-xs-math+votes{votes}+slots+short" for votes in (1, 2, 4, 6, 8)),
    # Single agents as controls of workflows: in calls of eval_opt (2.01) and isolated orch_workers (3.03); in tokens of
    # eval_opt (27.0; a budget of 29 spends 22.4), isolated orch_workers (37.9; one of 41 spends 43.2) and isolated
    # voting (98). A call costs about 22 tokens, so whole calls for every problem cannot meet 27
    # and 38 within 10%, nor the 51 of shared orch_workers, which has no control in tokens; its 3.35 calls are near
    # those of single_token_matched (3.36). Voting's four calls are those of single_matched.
    "controls": (
        *(f"single_matched-shared-xs-math+calls{calls}" for calls in (2, 3)),
        *(f"single_token_matched-shared-xs-math+tokens{tokens}" for tokens in (29, 41, 98)),
    ),
    # Clean cells at higher learning rates. At ten times the rate no answer was right after 20 steps (one try).
    "rates": (
        *(f"{cell}-xs-math+rate3" for cell in ("voting-isolated", "voting-shared", "single_matched-shared")),
        *(f"{cell}-xs-math+rate6" for cell in ("voting-isolated", "voting-shared")),
    ),
    "cliff": tuple(f"{BASE}+rate6+{change}" for change in ("anchor", "multiplicity", "equalise", "damping")),
    "spikes": tuple(f"{BASE}+rate6+{change}" for change in ("clip", "anchor+clip", "anchor+k2")),
    "xs-code": tuple(f"{flow}-xs-code" for flow in ("single-shared", "voting-isolated", "voting-shared")),
    "s-math": ("voting-isolated-s-math", "voting-shared-s-math"),
}
CELLS = tuple(dict.fromkeys(name for part in SETS.values() for name in part))
