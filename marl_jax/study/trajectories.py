"""Recorded episodes in the Agent Trajectory Interchange Format (ATIF 1.8), one JSON file for each path of an episode.

    question ─► step 1, of the user        a call ─► a step of the agent, its policy as the model
    result of a tool ─► observation of the call before it; without one, a step of the system

Values that the format has no field for are stored in `extra`: role, slot, turn, the request, reward and advantage.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

import marl_jax
from marl_jax.rollouts import CallRecord, Episode
from marl_jax.run_folder.files import disk_errors
from marl_jax.run_folder.folder import FolderError, output_folder
from marl_jax.runs.loading.stored import path_of
from marl_jax.study.page_episodes import NAMES, paths_of

NOTED = ("asked", "reward", "advantage")  # columns that are exported with each call


def export_trajectories(workdir: str | os.PathLike[str], out: str | os.PathLike[str]) -> list[Path]:
    """Write every recorded episode of a run below `out`, which must be empty or new; returns the written files.

    Files of episodes that cannot be read are left out with a warning.
    """
    folder = path_of(workdir)
    files = sorted(path for path in (folder / "episodes").glob("*") if NAMES.fullmatch(path.name))
    if not files:
        raise FolderError(
            f"'{folder}' has no recorded episodes: train with --config.logging.episodes_every=1, for example"
        )
    place = output_folder(out)
    if any(place.glob("*")):
        raise FolderError(f"'{place}' is not empty: choose another --out")
    written = []
    for file in files:
        try:
            trajectories = list(_trajectories(file, folder.name))
        except (ValueError, OSError) as error:
            logging.warning("%s: it is left out", error)
            continue
        with _all_or_nothing(place), disk_errors(place):
            (place / _stem(file)).mkdir(parents=True)
            for number, one in enumerate(trajectories):
                written.append(place / _stem(file) / f"{number:05d}.json")
                written[-1].write_text(json.dumps(one), encoding="utf-8")
    if not written:
        raise FolderError(f"'{folder / 'episodes'}' holds no episode that can be read")
    return written


@contextlib.contextmanager
def _all_or_nothing(place: Path) -> Iterator[None]:
    """Empty the directory if the context is left by an error, so that the same command can be given again."""
    try:
        yield
    except BaseException:
        for folder in place.iterdir():
            shutil.rmtree(folder)
        raise


def _trajectories(file: Path, run: str) -> Iterator[dict[str, Any]]:
    for number, (episode, calls) in enumerate(paths_of(file)):
        notes = [{name: more[name] for name in more if name in NOTED} for more in calls]
        yield trajectory(episode, notes, session=run, name=f"{_stem(file)}/{number:05d}")


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").rpartition(".")[0]


def trajectory(episode: Episode, notes: list[dict[str, Any]], *, session: str, name: str) -> dict[str, Any]:
    """One episode, or one path of it, in the format; `notes` are further values of each call."""
    steps: list[dict[str, Any]] = [{"source": "user", "message": str(episode.task.question)}]
    observed = {after: {"observation": {"results": some}} for after, some in _results(episode).items()}
    if -1 in observed:
        steps.append({"source": "system", "message": "", **observed[-1]})
    steps += [
        _step(call, note) | observed.get(i, {}) for i, (call, note) in enumerate(zip(episode.calls, notes))
    ]
    outcome = {"outcome": episode.outcome, "answer": episode.answer, "error": episode.error}
    task = {"task": str(episode.task.id), "sample": episode.sample, "path": list(episode.path)}
    return {
        "schema_version": "ATIF-v1.8",
        "session_id": session,
        "trajectory_id": name,
        "agent": {"name": f"marl_jax/{episode.workflow}", "version": marl_jax.__version__},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(len(call.prompt_tokens) for call in episode.calls),
            "total_completion_tokens": sum(len(call.tokens) for call in episode.calls),
            "total_steps": len(steps),
        },
        "extra": task | {name: value for name, value in outcome.items() if value is not None},
    }


def _step(call: CallRecord, note: Mapping[str, Any]) -> dict[str, Any]:
    # The row of a flattened episode was not sampled: its log-probs are NaN, which JSON does not have.
    logprobs = {} if any(map(math.isnan, call.logprobs)) else {"logprobs": list(call.logprobs)}
    return {
        "source": "agent",
        "model_name": call.policy,
        "message": call.text,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": len(call.prompt_tokens),
            "completion_tokens": len(call.tokens),
            "prompt_token_ids": list(call.prompt_tokens),
            "completion_token_ids": list(call.tokens),
            **logprobs,
        },
        "extra": {"role": call.role, "slot": call.slot, "turn": call.turn, "reads": list(call.reads), **note},
    }


def _results(episode: Episode) -> dict[int, list[dict[str, Any]]]:
    """Results of tools, by the call that they ran after; those of a call that is missing are given to the last call."""
    results: dict[int, list[dict[str, Any]]] = {}
    for tool in episode.tools:
        content = tool.error or tool.result
        text = content if isinstance(content, str) else json.dumps(content)
        found = {"content": text, "extra": {"tool": tool.name, "failed": bool(tool.error)}}
        results.setdefault(min(tool.after_call, len(episode.calls) - 1), []).append(found)
    return results
