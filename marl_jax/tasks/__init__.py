"""Math and code tasks: data sets, procedural micro tasks, and the iterator over them."""

from marl_jax.task import Task
from marl_jax.tasks.datasets import NAMES, load
from marl_jax.tasks.iterator import Position, TaskIterator
from marl_jax.tasks.row_files import DataError

__all__ = ["NAMES", "DataError", "Position", "Task", "TaskIterator", "load"]
