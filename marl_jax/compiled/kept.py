"""Executables of the compiled road on disk: a later start of an equal run neither traces nor compiles.

    all inputs of a program ──digest──► CACHE/step-DIGEST-cache: its trees, its memory, the executable

CACHE is the folder in which JAX caches programs (see `compile_cache`), and JAX drops these files with its own,
those unused for longest first. JAX has to trace and lower a step before it knows the name of its program. Here the name
follows from the code, the configuration and the arguments; where it cannot, nothing is kept. Like those of JAX, the
files are loaded as code, so the folder must be the user's own.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock
import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import marl_jax
from marl_jax import hosts, user_cache
from marl_jax.config.run_config import RunConfig
from marl_jax.own import is_own
from marl_jax.run_folder.files import write_atomically
from marl_jax.run_folder.folder import versions
from marl_jax.runs.loading.parts import Parts
from marl_jax.threads import side_by_side

ENVIRONMENT = ("XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_", "ROCM_")
DIGEST = hashlib.sha256().digest_size
OBJECTS = (b"\x7fELF", b"\xcf\xfa\xed\xfe")  # how compiled code for a CPU begins


def place_of(config: RunConfig, parts: Parts, devices: Sequence[jax.Device], **more: Any) -> Path | None:
    """The file of a step's program on these devices; None where none is kept.

    `more` describes its arguments: only the shapes of weights and problems, and nothing of the seed.
    """
    folder = jax.config.values["jax_compilation_cache_dir"]
    off = not folder or "://" in folder or not jax.config.values["jax_enable_compilation_cache"]
    settings = {name: value for name, value in config.to_json().items() if name != "seed"}
    words = [leaf for leaf in jax.tree.leaves(settings) if isinstance(leaf, str)]
    workflow, tokenizer = parts.workflow, parts.tokenizer
    ours = all(str(form.__module__).startswith("marl_jax.") for form in (workflow.fn, workflow.in_arrays))
    # User code may import anything, and a module may have been loaded before it was changed.
    if off or hosts.count() > 1 or any(map(is_own, words)) or not ours or _changed():
        return None
    program = {
        "config": settings,
        "workflow": (workflow.name, repr(workflow.settings), parts.prompts.digest()),
        "tokenizer": (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, repr(tokenizer)),
        "models": repr((parts.models, parts.specs, parts.lora_rank, parts.lora_scale)),
        "code": versions() | {"flax": importlib.metadata.version("flax")},
        "jax": jax.config.values,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
        "backend": devices[0].client.platform_version,
        "machine": (user_cache.processor(), [(str(one), one.device_kind) for one in jax.devices()]),
        "devices": list(map(str, devices)),
        **more,
    }
    return Path(folder) / f"step-{user_cache.digest(program)}-cache"


def shown(given: Any) -> Any:
    """A description of a step's arguments: their shapes and placement."""
    leaves, tree = jax.tree.flatten(given)
    where = [(str(getattr(x, "sharding", "")), str(getattr(x, "committed", ""))) for x in leaves]
    return str(tree), [repr(jax.typeof(x)) for x in leaves], where


def load(place: Path | None, devices: Sequence[jax.Device], check: Callable[[Any], None]) -> list[Any] | None:
    """The programs stored there, if `check` accepts their memory; None if none can be loaded."""
    if place is None:
        return None
    try:
        data = place.read_bytes()
        if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:  # damaged
            return None
        needs, programs = pickle.loads(data[DIGEST:])
    except Exception:
        return None
    check(needs)

    def made(code: bytes, taken: Any, given: Any) -> Any:
        return serialize_executable.deserialize_and_load(
            zlib.decompress(code), taken, given, backend=devices[0].client, execution_devices=devices
        )

    with contextlib.suppress(Exception):  # a cache that cannot be written is used, too
        _put(place)
    with contextlib.suppress(Exception):  # XLA may refuse them
        return side_by_side("load", made, *zip(*programs))
    return None


@contextlib.contextmanager
def found_by_jax(place: Path | None) -> Iterator[list[str]]:
    """The hits in JAX's cache meanwhile.

    Over a damaged file that cache is off: a program from it could not be stored again, see `keep`.
    """
    hits: list[str] = []
    note = lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    damaged = place is not None and place.exists()
    if damaged:
        _let_jax_look(False)
    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)
        if damaged:
            _let_jax_look(True)


def _let_jax_look(there: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", there)
    compilation_cache.reset_cache()  # it settles at first whether it is used


def keep(
    place: Path | None, programs: Sequence[jax.stages.Compiled], needs: Any, hits: Sequence[str]
) -> None:
    """Store programs and their memory, unless JAX had one: it stores a loaded program without its code."""
    if place is None or hits:
        return
    with contextlib.suppress(Exception):
        written = list(map(serialize_executable.serialize, programs))
        if jax.default_backend() == "cpu" and not all(
            any(map(one[0].__contains__, OBJECTS)) for one in written
        ):
            return
        data = pickle.dumps((needs, [(zlib.compress(code, 1), *trees) for code, *trees in written]))
        _put(place, hashlib.sha256(data).digest() + data)


def _put(place: Path, data: bytes | None = None) -> None:
    """Write a file, or nothing, and that it was used now, as JAX does: it drops those unused for longest."""
    with filelock.FileLock(place.with_name(".lockfile"), timeout=10):  # the lock that JAX takes
        place.with_name(place.name.replace("-cache", "-atime")).write_bytes(
            time.time_ns().to_bytes(8, "little")
        )
        if data is not None:
            write_atomically(place, data)


def _changed() -> bool:
    """Whether code of the library was changed after this process began to load it."""
    return any(path.stat().st_ctime > marl_jax.BEGAN for path in Path(marl_jax.__file__).parent.rglob("*.py"))
