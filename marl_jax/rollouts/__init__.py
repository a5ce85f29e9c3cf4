"""The scheduler that drives workflows over the engine, and the record of an episode.

Names that need JAX or parquet load when first used, because graders, their workers and commands that only read a
configuration need neither.
"""

from typing import TYPE_CHECKING

from marl_jax import late
from marl_jax.episodes import CallRecord, Episode, ToolRecord
from marl_jax.rollouts.history import Chat
from marl_jax.rollouts.progress import Progress, progress_bar
from marl_jax.rollouts.replay import replay
from marl_jax.rollouts.running import Limits
from marl_jax.rollouts.tools import ToolLog
from marl_jax.rollouts.transcript import prompts_of, transcript
from marl_jax.table import Table

if TYPE_CHECKING:
    from marl_jax.rollouts.player import EpisodesFailed, Player, player_for
    from marl_jax.rollouts.scheduler import rollout
    from marl_jax.rollouts.storage import read_episodes, write_episodes

__all__ = [
    "CallRecord",
    "Chat",
    "Episode",
    "EpisodesFailed",
    "Limits",
    "Player",
    "Progress",
    "Table",
    "ToolLog",
    "ToolRecord",
    "player_for",
    "progress_bar",
    "prompts_of",
    "read_episodes",
    "replay",
    "rollout",
    "transcript",
    "write_episodes",
]

__getattr__ = late(
    __name__,
    {
        "player": ("EpisodesFailed", "Player", "player_for"),
        "scheduler": ("rollout",),
        "storage": ("read_episodes", "write_episodes"),
    },
)
