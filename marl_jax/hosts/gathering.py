"""The table of a step, from the rows that each process played.

share 0: tasks 0, 2, ..    share 1: tasks 1, 3, ..   ──merged──►  tasks 0, 1, 2, 3, .. as one process plays them
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from marl_jax.hosts.talk import from_all
from marl_jax.table import Table, dense


def gathered(make: Callable[[], Table]) -> Table:
    """The table of all processes; each makes the episodes of its share of the tasks."""
    return merged(from_all(make))


def merged(tables: Sequence[Table]) -> Table:
    """One table of all: tasks in the order before `share` dealt them out, names in order of appearance."""
    if len(tables) == 1:
        return tables[0]
    if not (played := [table for table in tables if table.bare_episodes]):
        return tables[0]
    firsts = np.cumsum([0, *(len(table.bare_episodes) for table in played)])
    by_task = [
        [[first + number for number, _ in group] for _, group in itertools.groupby(
            enumerate(table.bare_episodes), lambda one: one[1].task.id
        )]
        for first, table in zip(firsts.tolist(), played)
    ]  # fmt: skip
    rounds = itertools.zip_longest(*by_task, fillvalue=[])
    table = Table.concat(played).of_episodes([n for tasks in rounds for task in tasks for n in task])
    role, policy = dense(table.role.tolist()), dense(table.policy.tolist())
    roles, policies = tuple(table.present("role")), tuple(table.present("policy"))
    task = dense(table.task_of(row).id for row in range(len(table)))
    return table.replace(role=role, roles=roles, policy=policy, policies=policies, task=task)
