"""A run so small that it takes seconds: a model of random weights that is paid for small letters.

python tiny_run.py BASE WORKDIR [kill after so many seconds of the loop]
"""

import dataclasses
import os
import signal
import sys
import threading
from pathlib import Path

from marl_jax import policies
from marl_jax.learning import LearnerConfig, OptimiserConfig, ScheduleConfig
from marl_jax.models import ModelConfig, init, save_hf
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rewards.credit import CreditConfig
from marl_jax.runs.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    LogConfig,
    PoliciesConfig,
    RolloutConfig,
    RunConfig,
    WorkflowConfig,
)
from marl_jax.workflows import BUILT_IN

MODEL = dataclasses.replace(
    ModelConfig.preset("xs"), num_hidden_layers=1, hidden_size=32, intermediate_size=64
)


def letters(graded):
    """What share of each call's text is small letters."""
    share = lambda text: sum(map(str.islower, text)) / max(len(text), 1)
    return [[share(call.text) for call in one.episode.calls] for one in graded]


def make_base(directory):
    save_hf(directory, MODEL, init(0, MODEL), build_micro_tokenizer())
    return directory


def tiny_config(base, **changes):
    roles = BUILT_IN["voting"].roles
    plain = RunConfig(
        cell="tiny",
        workflow=WorkflowConfig("voting", {"votes": 2}, prompts="micro"),
        policies=PoliciesConfig(policies.isolated(roles), base=str(base)),
        data=DataConfig("math", "micro_math", problems=4, train_size=16, val_size=4, levels=(1,)),
        sampling=policies.SamplingSettings(max_new_tokens=8),
        engine=EngineConfig(max_prompt=72, lanes=16, steps=4),
        rollout=RolloutConfig(samples=4),
        rewards=CreditConfig(name="tiny_run:letters"),
        learner=LearnerConfig(optimiser=OptimiserConfig(schedule=ScheduleConfig(3e-2))),
        evaluation=EvaluationConfig(every=4, problems=4),
        checkpoints=CheckpointConfig(every=2, latest=2),
        logging=LogConfig(episodes_every=4, episodes_problems=1),
        steps=8,
    )
    return dataclasses.replace(plain, **changes)


def kill_after(seconds):
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from marl_jax.runs import loop

    base, workdir, *seconds = sys.argv[1:]
    if seconds:
        inner = loop.step

        def step(run, state):
            if "killer" not in globals():
                globals()["killer"] = kill_after(float(seconds[0]))
            return inner(run, state)

        loop.step = step
    loop.train(tiny_config(base), workdir)
