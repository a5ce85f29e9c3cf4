"""The cells of this project. A cell starts from one of the library's, and sets the fields that differ."""

from marl_jax.config.run_config import load_config

CELLS = ("mine",)
MINE = {
    "workflow.name": "workflow:first_accepted",
    "data.name": "task:carries",
    "rewards.name": "reward:own_and_brief",
    "data.problems": "16",
    "steps": "50",
    "cell": "mine",
}


def get_config(name):
    """The configuration of a cell, for --config=cells.py:NAME."""
    if name not in CELLS:
        raise ValueError(f"there is no cell '{name}'; there is: {', '.join(CELLS)}")
    return load_config("micro:eval_opt-isolated-s-math", MINE.items())
