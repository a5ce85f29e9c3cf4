"""Read and write published Qwen3 directories: `config.json` and safetensors, in one file or in shards.

The files must contain every weight of the table once, in its shape, and no other but a tied head that repeats the
embedding. Weights stream from disk into their arrays, so the peak of host memory is about the size of the model.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marl_jax.fields import is_whole
from marl_jax.models.model_config import TOKENS, ModelConfig
from marl_jax.models.tensor_file import Tensor, save_tensors, tensors
from marl_jax.models.tokenizer import FILES as TOKENIZER_FILES
from marl_jax.models.tokenizer import check_vocabulary, save_tokenizer, tokenizer_files
from marl_jax.models.weight_table import Tree, Weight, check_params, listed, table
from marl_jax.packaged import resolve_path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_UNFINISHED = ".unfinished"  # a model is written to this folder first, and then moved to its directory
_TIED_HEAD = "lm_head.weight"  # some tied checkpoints repeat the embedding under this name


def load_hf(
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    shardings: Tree | Callable[[ModelConfig], Tree] | None = None,
) -> tuple[ModelConfig, Tree]:
    """Read a Qwen3 directory -> (config, params).

    `dtype` ("float32" or "bfloat16") overrides the one in `config.json`. `shardings` lays the parameters over
    devices: a tree like `weight_table.shardings(config, mesh)`, or a function that makes one from the config.
    """
    directory = resolve_path(directory)
    config = load_config(directory, dtype=dtype)
    tensors = _find_tensors(directory)
    _check(directory, config, tensors)
    layout = shardings(config) if callable(shardings) else shardings

    def place(weight: Weight, sharding: jax.sharding.Sharding | None = None) -> jax.Array:
        return jax.device_put(_read(weight, tensors, jnp.dtype(config.dtype)), sharding)

    return config, jax.tree.map(place, table(config), *([] if layout is None else [layout]))


def load_config(directory: str | os.PathLike[str], *, dtype: str | None = None) -> ModelConfig:
    """Read the `config.json` of a Qwen3 directory; end-of-text tokens also from its `generation_config.json`."""
    path, generation_path = resolve_path(directory) / CONFIG, resolve_path(directory) / GENERATION
    hints = {
        "seal.json": "`export` makes a model of a checkpoint",
        "adapter_config.json": "this is an adapter: `export --format=hf` writes one summed with its base",
    }
    found = (hint for name, hint in hints.items() if (path.parent / name).exists())
    published = read_json(path, next(found, "is this the directory of a Qwen3 model?"))
    try:
        config = ModelConfig.from_hf(published, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    token_ids = read_json(generation_path).get("eos_token_id") if generation_path.exists() else None
    candidates: list[Any] = token_ids if isinstance(token_ids, list) else [token_ids]
    listed = [token for token in candidates if is_whole(token)]
    # If a model's vocabulary was cut, its generation_config.json may still name tokens that were removed.
    added = [token for token in listed if 0 <= token < config.vocab_size and token not in config.stop_tokens]
    return dataclasses.replace(config, eos_token_id=(*config.stop_tokens, *added)) if added else config


def save_hf(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    params: Tree,
    tokenizer: Any = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a directory that transformers, vLLM and others load; reading it back gives the same bits.

    `tokenizer` is a tokenizer, or a directory with one, whose files are copied unchanged. An older model in the
    directory is replaced only when all of the new one is on disk. Other files in the directory are kept, except for
    those of an old tokenizer if there is a new one.
    """
    check_params(config, params)
    if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
        check_vocabulary(tokenizer, config)
    directory = Path(directory)
    fresh = directory / _UNFINISHED
    shutil.rmtree(fresh, ignore_errors=True)  # left behind by a process that was killed
    fresh.mkdir(parents=True)
    try:
        _write(fresh, config, params, tokenizer, max_shard_bytes)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _replace(directory, fresh)
    shutil.rmtree(fresh, ignore_errors=True)


def _write(directory: Path, config: ModelConfig, params: Tree, tokenizer: Any, max_shard_bytes: int) -> None:
    shards = _plan_shards(config, max_shard_bytes)
    arrays = _published_arrays(config, params)
    for file, names in shards.items():
        save_tensors(directory / file, {name: next(arrays) for name in names})
    if len(shards) > 1:
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        weight_map = {name: file for file, names in shards.items() for name in names}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    published = config.to_hf()
    write_json(directory / CONFIG, published)
    tokens = {name: published[name] for name in TOKENS if published[name] is not None}
    base = resolve_path(tokenizer) / GENERATION if isinstance(tokenizer, str | os.PathLike) else None
    # The sampling defaults of the base, without its lengths: a server would cut all answers at these.
    defaults = read_json(base) if base is not None and base.is_file() else {}
    defaults = {name: value for name, value in defaults.items() if name not in LENGTHS}
    write_json(directory / GENERATION, defaults | tokens)
    if tokenizer is not None:
        save_tokenizer(directory, tokenizer)


def _replace(directory: Path, fresh: Path) -> None:
    """Move the files of `fresh` into `directory`; remove the weights and the tokenizer of the model it replaces."""
    files = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()} - {Path(CONFIG)}
    # Shards of two models may have the same names. A directory without config.json does not load, so the old config
    # is removed first and the new one is moved last: a mixture of two models never loads.
    (directory / CONFIG).unlink(missing_ok=True)
    for file in files:
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (fresh / file).replace(directory / file)
    is_of_weights = lambda path: path.name in (SINGLE, INDEX) or _SHARD.fullmatch(path.name)
    stale = list(filter(is_of_weights, directory.iterdir()))
    if any(file.name in TOKENIZER_FILES for file in files):
        stale += tokenizer_files(directory)
    for path in stale:
        if Path(path.name) not in files:
            path.unlink()
    (fresh / CONFIG).replace(directory / CONFIG)


def _find_tensors(directory: Path) -> dict[str, Tensor]:
    """The `Tensor` of each published weight, in one file or in the shards of an index."""
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() and index.exists():
        raise ValueError(f"{directory} has both {SINGLE} and {INDEX}; remove the one that is out of date")
    if single.exists():
        return tensors(single)
    if not index.exists():
        raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}; weights are read from these")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from weights to files")
    by_name: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ValueError(f"{index} points to {file!r}; a shard must be in the same directory")
        if not (directory / file).exists():
            raise FileNotFoundError(f"{directory / file} is missing, though {INDEX} names it")
        for name, tensor in tensors(directory / file).items():
            if name in by_name:
                raise ValueError(f"{name} is in both {by_name[name].path} and {tensor.path}")
            by_name[name] = tensor
    for name, tensor in by_name.items():
        if weight_map.get(name) != tensor.path.name:
            raise ValueError(f"{tensor.path} holds {name}, which {INDEX} does not place there")
    for name, file in weight_map.items():
        if name not in by_name:
            raise ValueError(f"{directory / file} lacks {name}, though {INDEX} places it there")
    return by_name


def _check(directory: Path, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    weights = jax.tree.leaves(table(config))
    expected = {name: weight.published_shape for weight in weights for name in weight.published_names}
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ValueError(f"{directory} lacks the weight {listed(missing)}")
    has_tied_head = config.tie_word_embeddings and _TIED_HEAD in tensors
    extra = [name for name in tensors if name not in expected and not (has_tied_head and name == _TIED_HEAD)]
    if extra:
        raise ValueError(
            f"{tensors[extra[0]].path} has a weight that Qwen3 has no place for: {listed(extra)}"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            actual = list(tensors[name].shape)
            raise ValueError(
                f"{tensors[name].path}: {name} has shape {actual}, config.json asks for {list(shape)}"
            )
    if has_tied_head and not _equal(tensors[_TIED_HEAD], tensors[table(config)["embed"].hf]):
        raise ValueError(
            f"{tensors[_TIED_HEAD].path}: {_TIED_HEAD} differs from the embedding, though config.json says "
            "tie_word_embeddings; set that to false"
        )


def _read(weight: Weight, tensors: dict[str, Tensor], dtype: np.dtype) -> np.ndarray:
    """Fill one array of the table from its published pieces."""
    array = _aligned(weight.shape, dtype)
    for layer, name in enumerate(weight.published_names):
        target = array[layer] if weight.stacked else array
        if weight.inputs:
            target = target.reshape(weight.published_shape[::-1]).T
        for rows, piece in tensors[name].rows():
            if piece.dtype == dtype:  # as bits: numpy copies integers much faster than bfloat16
                bits = np.dtype(f"u{dtype.itemsize}")
                target.view(bits)[rows] = piece.view(bits)
            else:
                target[rows] = piece
    return array


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at a multiple of 64 bytes, which JAX on CPU takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(x.tobytes() == y.tobytes() for (_, x), (_, y) in zip(a.rows(), b.rows()))


def _plan_shards(config: ModelConfig, max_bytes: int) -> dict[str, list[str]]:
    """{file: names}, in the order of `_published_arrays`; a file is above max_bytes only if one weight is."""
    groups: list[list[str]] = [[]]
    filled = 0
    for weight in jax.tree.leaves(table(config)):
        size = math.prod(weight.published_shape) * jnp.dtype(config.dtype).itemsize
        for name in weight.published_names:
            if groups[-1] and filled + size > max_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(name)
            filled += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups)}


def _published_arrays(config: ModelConfig, params: Tree) -> Iterator[np.ndarray]:
    for weight, leaf in zip(jax.tree.leaves(table(config)), jax.tree.leaves(params)):
        host = np.asarray(leaf)
        for array in host if weight.stacked else [host]:
            if weight.inputs:
                bits = array.view(f"u{array.itemsize}").reshape(weight.published_shape[::-1])
                array = np.ascontiguousarray(bits.T).view(array.dtype)
            yield np.ascontiguousarray(array)  # safetensors writes the order of memory


def read_json(path: Path, hint: str = "is the directory complete?") -> dict[str, Any]:
    """The object in a JSON file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; {hint}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not an object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
