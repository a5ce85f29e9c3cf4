"""Math and code tasks: data sets, procedural micro tasks, and the iterator over them."""

from marl_jax.task import Task as Task
from marl_jax.tasks.datasets import NAMES as NAMES
from marl_jax.tasks.datasets import load as load
from marl_jax.tasks.iterator import Position as Position
from marl_jax.tasks.iterator import TaskIterator as TaskIterator
from marl_jax.tasks.row_files import DataError as DataError
