"""The folder of a run: the record of its start, and the lock of the one process that may write to it.

    config.json   config, digests (base, tokenizer, data, prompts), versions, settled (chosen on the machine)

`config.json` is written at the start, before anything is trained. A resume compares all but the fields in `_FREE`, and
`settled`, which is returned to be used again; a difference is refused, or recorded under `changes` if it is accepted.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import marl_jax
from marl_jax.config.run_config import RunConfig, upgraded
from marl_jax.errors import UserError
from marl_jax.models.tokenizer import FILES as TOKENIZER_FILES
from marl_jax.packaged import PACKAGED_FOLDERS, resolve_path
from marl_jax.run_folder.files import write_atomically

CONFIG = "config.json"
LOCK = ".lock"
METRICS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"
_COMPARED = ("config", "digests", "versions")
_TYPES = {**dict.fromkeys((*_COMPARED, "settled"), dict), "changes": list}
# Fields that determine the settled values: if one of these is changed, they are settled again.
_SETTLED_BY = (
    *(f"config.{part}" for part in ("engine.", "sampling.", "role_sampling.", "policies.", "mesh.")),
    *("digests.base ", "versions.jax", "versions.device"),
)
# Fields that determine prompts and answers of policies: evaluations before and after a change cannot be compared.
PLAYED_BY = (
    *("workflow", "policies", "sampling", "role_sampling", "rollout.limits"),
    *("engine.max_prompt", "engine.sampler"),
)
_PLAYED_BY = (
    *(f"config.{path}" for path in PLAYED_BY),
    *("digests.base ", "digests.tokenizer", "digests.prompts"),
    *("digests.code of workflow", "digests.code of sampler"),
)
# Packages that sample and learn; draw and permute; grade; tokenize; and save weights.
_PACKAGES = (
    *("jax", "jaxlib", "optax", "numpy", "math-verify", "sympy", "jinja2", "tokenizers", "transformers"),
    "orbax-checkpoint",
)
# These may change between two starts: Orbax reads its own files of any version to the bit, alarms change no number, any
# number of processes may share a run, and a server may run anywhere.
_FREE = (
    *("versions.orbax-checkpoint", "config.alarms", "config.mesh.hosts"),
    *(f"config.engine.vllm.{field}" for field in ("url", "start", "python", "folder", "timeout")),
)
_LOGS = (".log", ".out", ".err")  # suffixes of files that may be opened in the folder before a run starts
_NOTHING = object()
_held: dict[Path, os.stat_result] = {}  # {path: its file} of the locks that this process holds


class FolderError(UserError, RuntimeError):
    """A run folder cannot be used; the text is one line, or one line per difference."""


@contextlib.contextmanager
def open_folder(workdir: str | os.PathLike[str], way_out: str = "choose another --workdir") -> Iterator[Path]:
    """A context with the folder, created if needed and locked for this process.

    A folder that is not a run's is refused and left unchanged.
    """
    path = Path(os.path.expanduser(workdir)).absolute()
    try:
        str(path).encode()  # Arrow, which writes episodes below it, takes no other names
    except UnicodeEncodeError:
        raise FolderError(
            f"'{path}' is no name in UTF-8: rename it, set PYTHONUTF8=1, or {way_out}"
        ) from None
    with contextlib.ExitStack() as stack:
        with path_errors(path, way_out):
            if path.is_symlink() and not path.exists():
                where = os.readlink(path)
                raise FolderError(
                    f"'{path}' is a link to '{where}', which is not there: make it, or {way_out}"
                )
            path.mkdir(parents=True, exist_ok=True)
            earlier(path)
            owner = stack.enter_context(lock(path / LOCK))
        if owner is not None:
            raise FolderError(
                f"another process ({owner}) is running in '{path}': wait for it, stop it, or {way_out}"
            )
        yield path


@contextlib.contextmanager
def lock(path: Path) -> Iterator[str | None]:
    """A context that locks a file for this process and yields None, or the owner if another process has the lock.

    The kernel keeps the lock, so it is released when the process ends, however that happens.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    file = os.fstat(descriptor)
    try:
        if (owner := _acquire(descriptor, path)) is None:
            _held[path] = file
        yield owner
    finally:
        if _held.get(path) is file:
            del _held[path]
        os.close(descriptor)


def _acquire(descriptor: int, path: Path) -> str | None:
    for wait in (0.01, 0.05, 0.2, None):  # `in_use` takes the lock for a moment
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if wait is None:
                return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            time.sleep(wait)
        except OSError as error:
            raise FolderError(f"'{path}' cannot be locked ({error.strerror}): use a local disk") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return None


def check_held(folder: Path) -> None:
    """Raise if the folder was moved, removed or replaced since it was opened: it must not be written to."""
    if (held := _held.get(folder / LOCK)) is None:
        return
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(folder / LOCK), held):
            return
    raise FolderError(
        f"'{folder}' is no longer the folder that this run began in: it was moved or removed; start the command again "
        "with the folder's present path"
    )


def in_use(workdir: str | os.PathLike[str]) -> bool:
    """Whether a process has the folder open at this moment."""
    try:
        with open(Path(workdir) / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # it does not exist yet, or it cannot be locked
    return False


def begin(
    folder: Path,
    config: RunConfig,
    digests: Mapping[str, str],
    settle: Callable[[], Mapping[str, Any]] = dict,
    *,
    accept_changes: bool = False,
) -> dict[str, Any]:
    """Write `config.json`, or compare with the present one; returns the settled values.

    `settle` chooses values for the machine (lanes, lengths, kernels): at the first start, and after an accepted change
    of fields that determine them. A start that failed does not count: the next one may differ.
    """
    now = {"config": config.to_json(), "digests": dict(digests), "versions": versions()}
    before = earlier(folder)
    lines = differences({name: before.get(name, {}) for name in _COMPARED}, now)
    lines = [line for line in lines if not line.startswith(_FREE)]
    now = {"schema": now["config"]["schema"], **now}
    if not before or (lines and not has_results(folder)):
        _forget_tools(folder)
        return _write(folder, {**now, "settled": dict(settle()), "changes": []})["settled"]
    if lines and not accept_changes:
        raise FolderError(
            f"the run in '{folder}' was started with other values:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nstart it as it was, choose another --workdir, or accept the change with --accept_changes"
        )
    if lines:
        _forget_tools(folder)
        settled = _still_settled(before, lines)
        settled = dict(settle()) if settled is None else settled
        before = _write(folder, {**before, **now, "settled": settled, "changes": [*before["changes"], lines]})
    elif before["config"] != now["config"]:
        before = _write(folder, {**before, "config": now["config"]})
    return before["settled"]


def settle(folder: Path, settled: Mapping[str, Any]) -> None:
    """Record values chosen on the machine, which `begin` returns from now on."""
    _write(folder, {**read(folder), "settled": dict(settled)})


def changes(before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """One line for each field of a recorded configuration that was changed and must not be."""
    lines = differences(before, config.to_json())
    return [line for line in lines if not f"config.{line}".startswith(_FREE)]


def settled_for(folder: Path, config: RunConfig) -> dict[str, Any]:
    """The settled values of an earlier start that still apply to this configuration; {} if there are none."""
    record = earlier(folder)
    lines = differences(record.get("config", {}), config.to_json(), "config.")
    if any(not line.startswith(_FREE) for line in lines) and not has_results(folder):
        return {}  # a start that failed does not count
    return _still_settled(record, lines) or {}


def answers_changed(folder: Path) -> bool:
    """Whether, after an accepted change, earlier evaluations cannot be compared with later ones."""
    return any(line.startswith(_PLAYED_BY) for lines in earlier(folder).get("changes", ()) for line in lines)


def _still_settled(record: Mapping[str, Any], lines: Sequence[str]) -> dict[str, Any] | None:
    """The settled values that still apply after the changes in `lines`; None if a change affects all of them."""
    if any(line.startswith(_SETTLED_BY) and not line.startswith(_FREE) for line in lines):
        return None
    changed = lambda field: any(line.startswith(f"config.{field}:") for line in lines)
    # Devices divide the problems of a step; how many do is then chosen anew.
    dropped = ("road", "devices") if changed("road") else ("devices",) if changed("data.problems") else ()
    return {name: value for name, value in record.get("settled", {}).items() if name not in dropped}


def read(workdir: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a run's `config.json`, the configuration as this version writes it."""
    path = Path(workdir) / CONFIG
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if has_results(Path(workdir)):
            raise FolderError(
                f"'{workdir}' has results of a run, but no {CONFIG}: restore it, or choose another --workdir"
            ) from None
        seeds = sorted(
            Path(workdir).glob(f"seed-*/{CONFIG}"), key=lambda found: (len(found.parts[-2]), found)
        )
        way_out = f"its runs are one folder down, such as '{seeds[0].parent}'" if seeds else "train it first"
        raise FolderError(f"there is no run in '{workdir}' (no {CONFIG}): {way_out}") from None
    except OSError as error:
        raise FolderError(f"'{path}' cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise FolderError(f"'{path}' is no JSON ({error}): restore it, or start in another folder") from None
    if not isinstance(record, dict) or "config" not in record:
        raise FolderError(
            f"there is no run in '{workdir}' (its {CONFIG} is not a run's): restore it, or choose another folder"
        )
    if broken := [name for name, kind in _TYPES.items() if not isinstance(record.get(name), kind)]:
        raise FolderError(
            f"'{path}' is damaged ({', '.join(broken)}): restore it, or start in another folder"
        )
    return {**record, "config": upgraded(record["config"])}


def earlier(folder: Path) -> dict[str, Any]:
    """The record of an earlier start; {} if there was none. A folder that cannot be a run's is refused."""
    if not folder.exists():
        return {}
    if not folder.is_dir():
        raise FolderError(f"'{folder}' is a file: choose another place")
    if (folder / CONFIG).exists() or has_results(folder):
        return read(folder)
    if foreign := _foreign_names(folder):
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise FolderError(
            f"'{folder}' holds files that are not a run's ({foreign[0]}{more}): choose a --workdir "
            "that is new or empty"
        )
    return {}


def has_results(folder: Path) -> bool:
    """Whether a run left results that a later start could continue from."""
    logs = [folder / METRICS, folder / EVALUATIONS]
    return any(log.exists() and log.stat().st_size for log in logs) or any(
        (folder / "checkpoints").glob("[0-9]*")
    )


def enclosing_run(path: Path) -> Path | None:
    """The folder of the run that a path is, or is in; a run that lost its `config.json` counts, too."""
    for place in (path.resolve(), *path.resolve().parents):
        with contextlib.suppress(FolderError, OSError):
            if ((place / LOCK).exists() and has_results(place)) or read(place):
                return place
    return None


def output_folder(out: str | os.PathLike[str]) -> Path:
    """A folder that the user chose for output, created if needed; refused within a run, or if it is read-only."""
    if not os.fspath(out):
        raise FolderError("--out is empty: give a directory")
    path = Path(os.path.expanduser(out)).absolute()
    if around := enclosing_run(path):
        raise FolderError(f"--out={out} lies in the run '{around}': choose another folder")
    with path_errors(path, "choose another --out"):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    return path


def read_config(workdir: str | os.PathLike[str]) -> RunConfig:
    """The configuration that a run was started with."""
    try:
        return RunConfig.from_json(read(workdir)["config"])
    except (KeyError, ValueError) as error:
        raise FolderError(
            f"the configuration in '{Path(workdir) / CONFIG}' cannot be used: {error}"
        ) from None


@contextlib.contextmanager
def restored_on_error(folder: Path) -> Iterator[None]:
    """A context that restores `config.json` on an error, because then an accepted change was not made."""
    path = folder / CONFIG
    before = path.read_text(encoding="utf-8") if path.exists() else None
    try:
        yield
    except BaseException:
        if before is not None and path.read_text(encoding="utf-8") != before:
            write_atomically(path, before)
        raise


@contextlib.contextmanager
def path_errors(path: Path, way_out: str = "move it away, or choose another --workdir") -> Iterator[None]:
    """A context that raises system errors about a file or directory of a run as a `FolderError` of one line."""
    try:
        yield
    except OSError as error:
        raise FolderError(f"'{path}' cannot be used ({error.strerror}): {way_out}") from None


def differences(before: Any, now: Any, at: str = "") -> list[str]:
    """One line per value that differs, by its dotted path."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            line
            for name in dict.fromkeys([*before, *now])
            for line in differences(before.get(name, _NOTHING), now.get(name, _NOTHING), f"{at}{name}.")
        ]
    same = type(before) is type(now) and before == now
    return [] if same else [f"{at.rstrip('.')}: {_shown(before)} -> {_shown(now)}"]


def _foreign_names(folder: Path) -> list[str]:
    """Names in a folder that no run creates; hidden files and logs of a shell are ignored.

    So are the folders of refused seeds, which contain only a lock.
    """
    ours = {"checkpoints", "episodes", EVALUATIONS, METRICS, "tensorboard", "tools", "wandb"}

    def is_foreign(path: Path) -> bool:
        if path.name.startswith(".") or path.suffix in _LOGS or path.name in ours:
            return False
        return not path.is_dir() or [inner.name for inner in path.iterdir()] != [LOCK]

    return sorted(path.name for path in folder.iterdir() if is_foreign(path))


def _forget_tools(folder: Path) -> None:
    """Remove the recorded results of tools, which were made under another configuration."""
    shutil.rmtree(folder / "tools", ignore_errors=True)


def _write(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Write the record, and return it as `read` does."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_atomically(folder / CONFIG, text)
    return json.loads(text)


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    text = json.dumps(value)
    return f'{text[:13]}..."' if isinstance(value, str) and len(value) == 64 else text  # a digest


# ---------------------------------------------------------------- the inputs that a run depends on


def digest_model(directory: str | os.PathLike[str]) -> str:
    """Digest of a model's weights and configuration, and of the end tokens of generation_config.json if they differ."""
    place = resolve_path(directory)
    digest = _digest(place, lambda name: name.endswith(".safetensors") or name == "config.json")
    ends, other = (_end_tokens(place / name) for name in ("config.json", "generation_config.json"))
    return digest if other in (None, ends) else hashlib.sha256(f"{digest} {other}".encode()).hexdigest()


def _end_tokens(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):  # loading the model reports damage
        return None


def digest_tokenizer(directory: str | os.PathLike[str]) -> str:
    """Digest of all files that decide how text becomes tokens, the chat template included."""
    return _digest(resolve_path(directory), lambda name: name in TOKENIZER_FILES)


def versions() -> dict[str, str]:
    """Versions of this library (its number, a digest of its code) and of all that decides bits, tokens and grades."""
    home = Path(marl_jax.__file__).parent
    code = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        if path.relative_to(home).parts[0] in PACKAGED_FOLDERS:  # a wheel and a clone have the same code
            continue
        code.update(f"{path.relative_to(home)}\0".encode() + path.read_bytes())
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    machine = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": jax.local_devices()[0].device_kind,
    }
    return {"marl_jax": marl_jax.__version__, "code": code.hexdigest(), **packages, **machine}


def _digest(directory: Path, wanted: Callable[[str], bool]) -> str:
    try:
        paths = sorted(path for path in directory.iterdir() if wanted(path.name) and path.is_file())
    except OSError as error:
        raise FolderError(f"the model's directory '{directory}' cannot be read ({error.strerror})") from None
    if not paths:
        raise FolderError(
            f"'{directory}' holds no model: there must be config.json, *.safetensors, tokenizer.json"
        )
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(f"{path.name}\0".encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
