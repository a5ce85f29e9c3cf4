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
    work = json.load(sys.stdin)
    model = dataclasses.replace(ModelConfig.from_hf(work["model"]), dtype="float32")
    prompts = [tuple(prompt) for prompt in work["prompts"] for _ in range(work["samples"])]
    task = np.repeat(np.arange(len(work["prompts"])), work["samples"])
    policies = {"p0": init(0, model)}
    schedule = ScheduleConfig(work["learning_rate"])
    learner = Learner(
        Qwen3(model), LearnerConfig(optimiser=OptimiserConfig("adamw", schedule)), {"solver": "p0"}
    )
    state = learner.init(policies)
    longest = max(map(len, prompts))
    load = Load(longest, work["new"], min_prompt=longest, requests=len(prompts))
    engine = Engine(policies["p0"], model, plan(model, load))
    seconds = []
    for step in range(work["steps"] + 1):
        begin = time.perf_counter()
        numbers: dict[int, int] = {}
        for i, (prompt, length) in enumerate(zip(prompts, work["lengths"])):
            numbers[engine.submit(Request(prompt, key=(step, i), max_new_tokens=length))] = i
        completions: dict[int, Completion] = {}
        while engine.pending:
            completions |= {numbers[number]: completion for number, completion in engine.step()}
        ordered = [completions[i] for i in range(len(prompts))]
        assert [len(one.tokens) for one in ordered] == work["lengths"]
        reward = np.array([np.mean(np.array(one.tokens) % 2 == 0) for one in ordered])
        rows = Table.make(
            role=["solver"] * len(ordered),
            policy=["p0"] * len(ordered),
            prompt=prompts,
            tokens=[one.tokens for one in ordered],
            logprobs=[one.logprobs for one in ordered],
            task=task,
            advantage=group_advantages(reward, task),
        )
        policies, state, _ = learner.step(policies, state, rows)
        engine.update(params=policies["p0"])
        seconds.append(time.perf_counter() - begin)
    print(json.dumps(seconds[1:]))


if __name__ == "__main__":
    main()
