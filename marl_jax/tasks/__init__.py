"""Math and code tasks: data sets, procedural micro tasks, and the iterator over them."""

from marl_jax.tasks.datasets import NAMES as NAMES
from marl_jax.tasks.datasets import load as load
from marl_jax.tasks.families import FAMILIES as FAMILIES
from marl_jax.tasks.families import grade as grade
from marl_jax.tasks.families import parse as parse
from marl_jax.tasks.iterator import Position as Position
from marl_jax.tasks.iterator import TaskIterator as TaskIterator
from marl_jax.tasks.row_files import DataError as DataError
from marl_jax.tasks.task import Task as Task
