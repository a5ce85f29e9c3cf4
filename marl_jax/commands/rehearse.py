"""A rehearsal: an untrained workflow on a few problems, with prompts, completions and grades."""

import contextlib
import dataclasses
from collections.abc import Iterator

from marl_jax.config.run_config import ConfigError, RunConfig
from marl_jax.planning.walks import unset_settings
from marl_jax.pretraining.taught import untaught_warning
from marl_jax.rewards.grading import RIGHT
from marl_jax.rewards.own_metric import with_outcomes
from marl_jax.rollouts import prompts_of, transcript
from marl_jax.runs.loading.play import load_all, make_service, planned_engine, play_graded, player_of
from marl_jax.runs.loading.stored import on_one_device

WIDTH, LANES = 80, 32


def rehearse(config: RunConfig, problems: int, samples: int) -> Iterator[str]:
    """Play `samples` episodes of the first problems of train, untrained; yields a text per episode, then the total."""
    if unset := unset_settings(config):
        raise ConfigError(unset)
    engine = dataclasses.replace(config.engine, lanes=min(config.engine.lanes or LANES, LANES))
    config = on_one_device(dataclasses.replace(config, engine=engine))
    loaded = load_all(config, ["train"])
    if warning := untaught_warning(config, loaded.parts.prompts):
        yield warning + "\n"
    parts, tasks = loaded.parts, list(loaded.splits["train"][:problems])
    shapes = planned_engine(config, parts, training=False)
    # The shapes need not be measured: no other engine has to compute the same bits.
    service = make_service(config, parts, parts.start(config.seed), shapes, measured=True)
    with contextlib.closing(service):
        table = play_graded(player_of(config, parts, service), tasks, samples, config.seed)
    if parts.metric is not None:
        table = with_outcomes(table, parts.metric)
    decode, episodes = parts.decoders, table.episodes()
    for episode in episodes:
        verdict = "right" if episode.outcome >= RIGHT else "wrong"
        gold = f" (wanted: {episode.task.gold!r})" if episode.task.gold else ""
        yield f"{transcript(episode, prompts_of(episode, decode), WIDTH)}graded: {episode.outcome:g}, {verdict}{gold}\n"
    right, units = sum(e.outcome >= RIGHT for e in episodes), "paths" if table.forked else "episodes"
    calls = len(table) / len(table.bare_episodes)
    yield f"{right} of {len(episodes)} {units} right, {calls:.1f} calls an episode"
