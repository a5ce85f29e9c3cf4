"""Our side of `benchmarks.step`: the engine, the reward, advantages and the learner, step by step.

Reads the work as JSON from standard input, prints the seconds of its steps as JSON on the last line.
"""

import dataclasses
import json
import sys
import time

import numpy as np

from marl_jax.learning import Learner, Qwen3, group_advantages
from marl_jax.learning.learner_config import LearnerConfig
from marl_jax.learning.optimiser import OptimiserConfig, ScheduleConfig
from marl_jax.models import ModelConfig, init
from marl_jax.sampling import Completion, Engine, Load, Request, plan
from marl_jax.table import Table


def main() -> None:
    told = json.load(sys.stdin)
    model = dataclasses.replace(ModelConfig.from_hf(told["model"]), dtype="float32")
    prompts = [tuple(prompt) for prompt in told["prompts"] for _ in range(told["samples"])]
    task = np.repeat(np.arange(len(told["prompts"])), told["samples"])
    policies = {"p0": init(0, model)}
    schedule = ScheduleConfig(told["learning_rate"])
    learner = Learner(
        Qwen3(model), LearnerConfig(optimiser=OptimiserConfig("adamw", schedule)), {"solver": "p0"}
    )
    state = learner.init(policies)
    longest = max(map(len, prompts))
    load = Load(longest, told["new"], min_prompt=longest, requests=len(prompts))
    engine = Engine(policies["p0"], model, plan(model, load))
    seconds = []
    for step in range(told["steps"] + 1):
        begin = time.perf_counter()
        numbers: dict[int, int] = {}
        for i, (prompt, length) in enumerate(zip(prompts, told["lengths"])):
            numbers[engine.submit(Request(prompt, key=(step, i), max_new_tokens=length))] = i
        said: dict[int, Completion] = {}
        while engine.pending:
            said |= {numbers[number]: completion for number, completion in engine.step()}
        done = [said[i] for i in range(len(prompts))]
        assert [len(one.tokens) for one in done] == told["lengths"]
        reward = np.array([np.mean(np.array(one.tokens) % 2 == 0) for one in done])
        rows = Table.make(
            role=["solver"] * len(done),
            policy=["p0"] * len(done),
            prompt=prompts,
            tokens=[one.tokens for one in done],
            logprobs=[one.logprobs for one in done],
            task=task,
            advantage=group_advantages(reward, task),
        )
        policies, state, _ = learner.step(policies, state, rows)
        engine.update(params=policies["p0"])
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds[1:]))


if __name__ == "__main__":
    main()
