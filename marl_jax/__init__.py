"""marl_jax: RL training of multi-agent LLM workflows in pure-functional JAX.

In a terminal:

    marl-jax --help                 the commands; python -m marl_jax is the same
    marl-jax docs                   the pages, which come with the package; marl-jax docs how-to shows one
    marl-jax docs workflows.Call    an object of the library and all its fields
    marl-jax docs examples          programs to copy
    marl-jax list workflows         the built-in workflows, tasks, rewards, cells, fields of the configuration
    marl-jax try --config=micro:voting-isolated-s-math          prompts and answers of an untrained model
    marl-jax train --config=micro:voting-isolated-s-math --workdir=runs/first
    marl-jax new DIR                a small project of your own: a workflow, a task, a reward and a test

In Python, each room is imported by its own name (`from marl_jax import models`), so that importing the package costs
nothing and each part can be used alone:

    workflows   Call, solver, judge, @workflow and the other parts of a workflow; the built-in workflows
    tasks       problems, and data sets of problems
    rewards     graders, and the reward of each call
    rollouts    playing workflows on a model: `player_for(workflow, base)`; transcripts
    learning    advantages, losses, and the update: `Learner`
    policies    which policy answers for which role: `shared`, `isolated`, or a dictionary
    table       the rows of a step; `episodes` shows them episode by episode
    runs        `train(config, workdir)`: a run in a folder
    config      `run_config.load_config("micro:voting-isolated-s-math")`
"""

import time

TYPE_CHECKING = False  # True only for type checkers; importing `typing` would double the time of this import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

__all__ = ["BEGAN", "__version__", "late"]

__version__ = "0.1.0"
BEGAN = time.time()  # when this process began to load the library, before any other module of it


def late(room: str, names: "Mapping[str, Iterable[str]]") -> "Callable[[str], Any]":
    """The `__getattr__` of the package `room`, which loads a name on first use; `names` is {module: its names}."""
    module_of = {name: module for module, members in names.items() for name in members}

    def find(name: str) -> "Any":
        if name not in module_of:
            raise AttributeError(f"module '{room}' has no attribute '{name}'")
        import importlib  # here, to keep the import of the package fast

        return getattr(importlib.import_module(f"{room}.{module_of[name]}"), name)

    return find
