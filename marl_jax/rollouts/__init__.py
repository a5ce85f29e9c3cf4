"""The scheduler that drives workflows over the engine, and the record of an episode.

Only `rollout` meets JAX, and loads when it is first asked for: graders and their workers read episodes without.
"""

from typing import TYPE_CHECKING, Any

from marl_jax.rollouts.history import Chat
from marl_jax.rollouts.progress import Progress, progress_bar
from marl_jax.rollouts.replay import replay
from marl_jax.rollouts.running import Limits
from marl_jax.rollouts.storage import read_episodes, write_episodes
from marl_jax.rollouts.tools import ToolLog
from marl_jax.rollouts.transcript import transcript
from marl_jax.table import CallRecord, Episode, Table, ToolRecord

if TYPE_CHECKING:
    from marl_jax.rollouts.scheduler import rollout

__all__ = [
    "CallRecord",
    "Chat",
    "Episode",
    "Limits",
    "Progress",
    "Table",
    "ToolLog",
    "ToolRecord",
    "progress_bar",
    "read_episodes",
    "replay",
    "rollout",
    "transcript",
    "write_episodes",
]


def __getattr__(name: str) -> Any:
    if name != "rollout":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from marl_jax.rollouts.scheduler import rollout

    return rollout
