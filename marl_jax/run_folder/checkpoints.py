"""Checkpoints: trees of arrays and a few numbers, saved by Orbax in the background, sealed, and restored.

    .saving-STEP (Orbax writes) ──► seal.json (digest of every file) ──► fsync ──► renamed to STEP ──► older ones pruned

A directory named after a step is therefore complete, whatever killed the process. If a seal does not match its files
or its own digest, the checkpoint is damaged, and the one before it is used. Older checkpoints lose the trees that only
a resume needs: first from the seal, atomically, then from the disk. All use of Orbax is in this file.
"""

import contextlib
import functools
import hashlib
import json
import logging as python_logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from absl import logging

from marl_jax import hosts
from marl_jax.errors import UserError
from marl_jax.run_folder.files import disk_errors, sync_directory, write_atomically
from marl_jax.run_folder.folder import METRICS, check_held, path_errors
from marl_jax.threads import Workers

Tree = Any
Which = Literal["latest", "best"] | int
SEAL = "seal.json"
SAVE_S = 1200.0  # seconds that Orbax may take for a save, plus its bytes / SLOWEST
SLOWEST = 10e6  # bytes a second of the slowest disk that is waited for
POLL_S = 0.05  # seconds between two checks whether process 0 has finished
_SEALED = {"step", "score", "data", "numbers", "files"}  # keys of every seal


class CheckpointError(UserError, RuntimeError):
    """A checkpoint is missing or cannot be used; the text is one line."""


class Damaged(CheckpointError):
    """The files of a checkpoint differ from those that were written."""


class Stripped(CheckpointError):
    """A checkpoint is kept only for its policies, and its other trees were removed."""


def _not_of_orbax(record: python_logging.LogRecord) -> bool:
    """Silence Orbax's logging of errors that it also raises, with pages of tracebacks."""
    return record.levelno < python_logging.ERROR or "/orbax/" not in record.pathname


class Checkpoints:
    """The checkpoints of a run, for the one process that writes them. Close it, or the running save is lost.

    If several processes share the run, each has such an object: all enter a save, and only process 0 writes.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        latest: int = 2,
        best: bool = True,
        keep_every: int | None = None,
        resume_only: Sequence[str] = (),
    ) -> None:
        """Keeps the `latest` newest, the `best` by score, and every `keep_every`-th step.

        At least the two newest are kept, in case the newest is damaged. `resume_only` names trees that only a resume
        needs: the newest checkpoints contain them, older ones are kept without.
        """
        self.directory = directory = _absolute(directory)
        self._resume_only = tuple(resume_only)
        self._latest, self._best, self._keep_every = max(2, latest), best, keep_every
        if hosts.is_first():
            with path_errors(directory), disk_errors(directory):
                directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob(".*"):  # left by a killed process
                complete = directory / leftover.name.removeprefix(".saving-")
                if complete.name.isdecimal() and is_sealed(leftover) and not complete.exists():
                    os.rename(leftover, complete)  # it was sealed, but not renamed yet
                else:
                    _remove(leftover)
        self._worker = Workers("checkpoints")
        logging.get_absl_logger().addFilter(_not_of_orbax)
        self._saving: Future[None] | None = None

    def save(
        self, step: int, trees: Mapping[str, Tree], data: Mapping[str, Any], score: float | None = None
    ) -> None:
        """Begin to save the values of this moment; the buffers may be donated right after.

        `trees` are restored by name, so that weights can be restored alone. `data` is JSON: step, positions, seeds.
        An error of the previous save is raised here.
        """
        import orbax.checkpoint.experimental.v1 as ocp

        hosts.from_all(self.wait)
        flat = {name: _flatten(tree) for name, tree in trees.items()}
        arrays = {name: leaves for name, (leaves, _) in flat.items() if leaves}
        numbers = {name: numbers for name, (_, numbers) in flat.items()}
        score = None if score is None or not math.isfinite(score) else float(score)
        seal = {"step": step, "score": score, "data": dict(data), "numbers": numbers}
        json.dumps(seal)  # refused now, not in the background
        place = self.directory / f".saving-{step}"
        if hosts.count() > 1:
            arrays = jax.tree.map(_host_array, arrays)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
        context = ocp.Context()
        context.async_options.timeout_secs = int(SAVE_S + size / SLOWEST)
        with disk_errors(self.directory), context:
            response = ocp.save_checkpointables_async(place, arrays or {"none": {"empty": np.zeros(1)}})
        self._saving = self._worker.submit(self._finish, response, place, seal)

    def wait(self) -> None:
        """Wait until the running save is complete; its error is raised here."""
        saving = self._saving
        try:
            if saving is not None:
                saving.result()
        finally:
            if self._saving is saving:
                self._saving = None

    def close(self) -> None:
        """Complete the running save; its error is raised here."""
        try:
            self.wait()
        finally:
            self._worker.close()
            logging.get_absl_logger().removeFilter(_not_of_orbax)

    def resume(
        self, templates: Mapping[str, Tree], recorded: float = math.inf, by: str = METRICS
    ) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """The newest undamaged checkpoint up to step `recorded`, the last one in `by`; None if there is no checkpoint.

        Newer ones are set aside as STEP.damaged or STEP.unrecorded, so that their steps can be saved again.
        """
        self.wait()
        restored = list[tuple[dict[str, Tree], dict[str, Any]]]()

        def newest() -> int | None:
            if not (saved := steps(self.directory)):
                return None
            trees, data, step = _load_newest(self.directory, templates, recorded, by)
            for newer in (n for n in saved if n > step):
                self.set_aside(newer, "unrecorded" if newer > recorded else "damaged")
            restored.append((trees, data))
            return step

        step = hosts.from_first(newest)
        if step is None:
            return None
        return restored[0] if restored else restore(self.directory, step, templates)

    def set_aside(self, step: int, why: str) -> None:
        """Use this checkpoint no more: it is renamed to STEP.why."""
        aside = self.directory / f"{step}.{why}"
        _remove(aside)
        os.rename(self.directory / str(step), aside)

    def _finish(self, response: Any, place: Path, seal: dict[str, Any]) -> None:
        """In the background: seal the files that Orbax wrote, rename their directory, prune."""
        step = seal["step"]
        if not hosts.is_first():
            response.result()
            while place.exists():  # a process that ended before the seal would make the others end, too
                time.sleep(POLL_S)
            return
        old = self.directory / f".deleting-{step}"
        try:
            with disk_errors(self.directory):
                response.result()
                files = {str(path.relative_to(place)): _digest(path, sync=True) for path in _files(place)}
                _write_seal(place, {**seal, "files": files})
                for directory in {path.parent for path in _files(place)}:
                    sync_directory(directory)
                if (self.directory / str(step)).exists():
                    os.rename(self.directory / str(step), old)
                os.rename(place, self.directory / str(step))
                sync_directory(self.directory)
        except BaseException:
            check_held(self.directory.parent)  # if the folder was moved meanwhile, raise that as the reason
            if old.exists() and not (self.directory / str(step)).exists():  # the step was saved before
                os.rename(old, self.directory / str(step))
            for leftover in self.directory.glob(f"{place.name}*"):  # under Orbax's temporary name, too
                _remove(leftover)
            raise
        _remove(old)
        self._prune()

    def _prune(self) -> None:
        saved = steps(self.directory)
        keep = set(saved[-self._latest :])
        if self._best and (best := best_of(self.directory, saved)) is not None:
            keep.add(best)
        if self._best:  # one whose seal cannot be read now may be the best
            keep |= {step for step in saved if not is_sealed(self.directory / str(step))}
        if self._keep_every:
            keep |= {step for step in saved if step % self._keep_every == 0}
        for step in set(saved) - keep:
            doomed = self.directory / f".deleting-{step}"
            os.rename(self.directory / str(step), doomed)
            _remove(doomed)
        for step in sorted(keep)[: -self._latest]:
            _strip(self.directory / str(step), self._resume_only)


def steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps that have a checkpoint, in ascending order."""
    directory = _absolute(directory)
    with path_errors(directory, "make it readable"):
        if not directory.is_dir():
            return []
        named = (path for path in directory.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,17}", path.name))
        return sorted(int(path.name) for path in named if path.is_dir())


def restore(
    directory: str | os.PathLike[str], which: Which, templates: Mapping[str, Tree]
) -> tuple[dict[str, Tree], dict[str, Any]]:
    """The trees named by `templates`, in their structure, shapes, dtypes and shardings, and the data.

    A template's leaves are arrays, `jax.ShapeDtypeStruct` or Python numbers. "latest" skips damaged checkpoints,
    "best" those with a damaged seal, a step none.
    """
    directory = _absolute(directory)
    saved = steps(directory)
    if not saved:
        raise CheckpointError(f"there is no checkpoint in '{directory}': train first, up to the first one")
    if which == "latest":
        return _load_newest(directory, templates)[:2]
    step = best_of(directory, saved) if which == "best" else which
    unread = [str(step) for step in saved if not is_sealed(directory / str(step))] if which == "best" else []
    if step is None:
        but = f"; checkpoints with a damaged seal ({', '.join(unread)}) may have been" if unread else ""
        raise CheckpointError(
            f"no checkpoint in '{directory}' was evaluated by the run itself, so none is the best: use latest{but}"
        )
    if unread:
        logging.warning("best: checkpoint %s is left out, since its seal is damaged", ", ".join(unread))
    if step not in saved:
        existing = ", ".join(map(str, saved))
        raise CheckpointError(f"there is no checkpoint of step {step} in '{directory}'; there is: {existing}")
    return _load(directory / str(step), templates)


# ---------------------------------------------------------------- loading


def _load_newest(
    directory: Path, templates: Mapping[str, Tree], recorded: float = math.inf, by: str = METRICS
) -> tuple[dict[str, Tree], dict[str, Any], int]:
    damage: list[str] = []
    listed = steps(directory)
    for step in reversed(listed):
        if step > recorded:
            damage.append(f"checkpoint {step} is ahead of {by}, which has no step {recorded + 1}")
            continue
        try:
            trees, data = _load(directory / str(step), templates)
        except (Damaged, Stripped) as error:
            damage.append(str(error))
            continue
        if damage:
            logging.warning("%s: going back to step %d", "; ".join(damage), step)
        return trees, data, step
    if steps(directory) != listed:  # a running run has changed them
        return _load_newest(directory, templates, recorded, by)
    ahead = any(step > recorded and is_sealed(directory / str(step)) for step in listed)
    accept = ", or go on without the missing lines by --accept_changes" if ahead else ""
    raise CheckpointError(
        f"no checkpoint in '{directory}' can be used: {'; '.join(damage)}; "
        f"restore what is lost, or choose another --workdir{accept}"
    )


def _load(place: Path, templates: Mapping[str, Tree]) -> tuple[dict[str, Tree], dict[str, Any]]:
    seal = _read_seal(place)
    for name, digest in seal["files"].items():
        part, _, file = name.partition("/")
        if file and part not in templates:  # of another tree, which a running run may be removing
            continue
        try:
            actual = _digest(place / name)
        except OSError:
            raise Damaged(f"checkpoint {place.name} is damaged ({name} is missing)") from None
        if actual != digest:
            raise Damaged(f"checkpoint {place.name} is damaged ({name} is not what was written)")
    for name in templates:
        if name in seal.get("stripped", ()):
            raise Stripped(f"checkpoint {place.name} is kept without '{name}'")
        if name not in seal["numbers"]:
            existing = ", ".join(seal["numbers"])
            raise CheckpointError(
                f"checkpoint {place.name} holds no '{name}'; there is: {existing}: start the run as it was, or begin "
                "another in a new --workdir, where a phase's start=RUN@STEP takes these weights"
            )
    import orbax.checkpoint.experimental.v1 as ocp

    arrays = _arrays_of(templates)
    try:
        if other := misfit(place, templates):
            raise CheckpointError(
                f"checkpoint {place.name} does not fit: {other}; start the run as it was, or choose another --workdir"
            )
        with _alone():
            loaded = ocp.load_checkpointables(place, arrays) if arrays else {}
    except Exception as error:
        if place.exists():
            raise
        raise Damaged(f"checkpoint {place.name} was removed by its run while it was read") from error
    trees = {
        name: _unflatten(template, loaded.get(name, {}), seal["numbers"][name], place)
        for name, template in templates.items()
    }
    return trees, seal["data"]


def _arrays_of(templates: Mapping[str, Tree]) -> dict[str, dict[str, Any]]:
    """{tree: its arrays by path}, without trees that have none; arrays of JAX become shapes with shardings."""
    flat = {name: _flatten(template)[0] for name, template in templates.items()}
    return {name: jax.tree.map(_abstract, arrays) for name, arrays in flat.items() if arrays}


def misfit(place: Path, templates: Mapping[str, Tree]) -> str:
    """The first array that differs in shape or dtype between a checkpoint and these trees, or is missing in one; or "".

    Other shapes mean another run, but Orbax accepts numpy arrays of any shape and converts to any dtype.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    arrays = _arrays_of(templates)
    with _alone():
        metadata = ocp.checkpointables_metadata(place).metadata if arrays else {}
    for name, leaves in arrays.items():
        saved = {
            key: (tuple(leaf.shape), np.dtype(leaf.dtype)) for key, leaf in metadata.get(name, {}).items()
        }
        needed = {key: (tuple(leaf.shape), np.dtype(leaf.dtype)) for key, leaf in leaves.items()}
        for key in sorted(saved.keys() | needed.keys()):
            if saved.get(key) != needed.get(key):
                here = needed.get(key, "nothing")
                return f"'{name}' {key} is {saved.get(key, 'nothing')} in the checkpoint and {here} here"
    return ""


def _strip(place: Path, names: Sequence[str]) -> None:
    """Remove trees. Once the new seal is written, their files are no longer part of the checkpoint."""
    try:
        seal = _read_seal(place)
    except Damaged:
        return
    if removed := [name for name in names if name in seal["numbers"]]:
        seal["numbers"] = {name: values for name, values in seal["numbers"].items() if name not in removed}
        seal["files"] = {
            name: digest for name, digest in seal["files"].items() if name.split("/")[0] not in removed
        }
        seal["stripped"] = [*seal.get("stripped", ()), *removed]
        _write_seal(place, seal)
    for name in seal.get("stripped", ()):
        _remove(place / name)


def _write_seal(place: Path, seal: Mapping[str, Any]) -> None:
    write_atomically(place / SEAL, json.dumps({**seal, "seal": _digest_of(seal)}))


def _read_seal(place: Path) -> dict[str, Any]:
    try:
        seal = json.loads((place / SEAL).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(f"checkpoint {place.name} is damaged ({SEAL}: {error})") from None
    if not isinstance(seal, dict) or not seal.keys() >= _SEALED:
        raise Damaged(f"checkpoint {place.name} is damaged ({SEAL} is incomplete)")
    digest = seal.pop("seal", None)
    # Seals of earlier versions have no digest of their own; an unknown key may be the damaged name of the digest.
    old_format = digest is None and seal.keys() <= {*_SEALED, "stripped"}
    if not old_format and digest != _digest_of(seal):
        raise Damaged(f"checkpoint {place.name} is damaged ({SEAL} is not what was written)")
    return seal


def tree_digest(place: Path, name: str) -> str:
    """Digest of the files of one tree, from the seal: the same before and after other trees are removed."""
    files = {
        file: digest for file, digest in _read_seal(place)["files"].items() if file.split("/")[0] == name
    }
    return _digest_of(dict(sorted(files.items())))


def is_sealed(place: Path) -> bool:
    """Whether a checkpoint has a valid seal; its files are not checked."""
    try:
        return bool(_read_seal(place))
    except Damaged:
        return False


def best_of(directory: Path, saved: list[int]) -> int | None:
    """The step with the highest score, the earliest of equal ones."""
    scores = {}
    for step in saved:
        with contextlib.suppress(Damaged):
            scores[step] = _read_seal(directory / str(step))["score"]
    scored = (step for step, score in scores.items() if score is not None)
    return max(scored, key=lambda step: (scores[step], -step), default=None)


# ---------------------------------------------------------------- trees and files


def _absolute(directory: str | os.PathLike[str]) -> Path:
    return Path(os.path.expanduser(directory)).absolute()  # Orbax takes no relative paths


def _flatten(tree: Tree) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays by path, Python numbers by path); the structure comes from a template when they are restored."""
    arrays: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        key = _key(path)
        if key in arrays or key in numbers:
            raise ValueError(f"two leaves have the path '{key}': rename one of them")
        if isinstance(leaf, bool | int | float):
            numbers[key] = leaf
        else:
            arrays[key] = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    return arrays, numbers


def _unflatten(template: Tree, arrays: Mapping[str, Any], numbers: Mapping[str, Any], place: Path) -> Tree:
    paths, structure = jax.tree_util.tree_flatten_with_path(template)
    leaves = {**arrays, **numbers}
    if missing := [_key(path) for path, _ in paths if _key(path) not in leaves]:
        raise CheckpointError(f"checkpoint {place.name} does not fit: it holds no {missing[0]}")
    return jax.tree_util.tree_unflatten(structure, [leaves[_key(path)] for path, _ in paths])


def _host_array(leaf: Any) -> np.ndarray:
    """A numpy array, which Orbax takes as equal on all processes; others than process 0 only have its shape."""
    if hosts.is_first():
        return np.array(leaf)
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A context in which Orbax reads without waiting for other processes, which read by themselves."""
    if hosts.count() == 1:
        yield
        return
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    context.multiprocessing_options.primary_host = hosts.index()
    context.multiprocessing_options.active_processes = {hosts.index()}
    with context:
        yield


def _key(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").replace("/", "|") or "leaf"


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def _digest(path: Path, sync: bool = False) -> str:
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


_remove = functools.partial(shutil.rmtree, ignore_errors=True)
