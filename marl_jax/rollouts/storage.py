"""A step's table on disk: one parquet file, one row per call, readable by any tool that reads parquet.

    task question role asked text answer reward advantage ...  prompt tokens logprobs (lists)

The facts of episodes (task, key of the noise, answer, results of tools, error) are JSON in the file's metadata.
"""

import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from marl_jax.episodes import Episode, Leaf, ToolRecord
from marl_jax.rollouts.old_storage import DAMAGE, SUFFIX, read_old
from marl_jax.rollouts.transcript import Decode, Decoders, decoder_of, prompts_of
from marl_jax.table import DTYPES, KINDS, Ragged, Table, padded, unpadded
from marl_jax.task import Task

FORMAT = 2
METADATA_KEY = b"marl_jax"
LISTS = {"prompt": np.int32, "tokens": np.int32, "logprobs": np.float32}
INTS = ("episode", "call", "slot", "turn", "version", "after", "cut", "choice", "group")
INT_LISTS = pa.list_(pa.int32())
LONGEST = 4  # most tokens of a character: it has at most 4 bytes
EXTRA = ("asked", "ends", "trainer_logprobs")
NAMES = {"role": "roles", "policy": "policies"}


def write_episodes(
    path: str | os.PathLike[str],
    table: Table,
    decode: Decoders | None = None,
    trainer: Sequence[np.ndarray | None] = (),
) -> None:
    """Write the table; the file appears only once it is complete.

    With `decode`, one for all policies or by policy, prompts are stored as text, too (only the added part for a call
    `after` another), and the position in the text at which each token ends. `trainer` has, by row, the trainer's
    log-probs of its tokens.
    """
    table.need_episodes()
    table.need_own_ids()
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    all_tasks = (*(bare.task for bare in table.bare_episodes), *filter(None, table.about))
    tasks = {name: dataclasses.asdict(task) for name, task in {task.id: task for task in all_tasks}.items()}
    facts = {
        "format": FORMAT,
        "tasks": list(tasks.values()),
        "episodes": [_facts(bare) for bare in table.bare_episodes],
    }
    columns = _columns(table, decode, trainer)
    written = pa.table(columns).replace_schema_metadata({METADATA_KEY: json.dumps(facts)})
    unfinished = path.with_name(path.name + ".unfinished")
    # No dictionary: in plain numbers the compression finds prompts that repeat or continue a history.
    pq.write_table(written, unfinished, compression="zstd", use_dictionary=False)
    os.replace(unfinished, path)


def read_episodes(path: str | os.PathLike[str]) -> Table:
    """The table in a file; files of earlier versions have fewer columns."""
    path = pathlib.Path(path)
    if path.name.endswith(SUFFIX):
        return read_old(path)
    try:
        # By path: Arrow's threads hold on to a file that Python opened, and may abort the process as it ends.
        with pq.ParquetFile(path) as file:
            read = file.read()
        facts = json.loads((read.schema.metadata or {}).get(METADATA_KEY, b"{}"))
        if facts.get("format") != FORMAT:
            raise ValueError(f"its format is {facts.get('format')!r}, this version reads {FORMAT}")
        return _table(read, facts)
    except FileNotFoundError:
        raise
    except (*DAMAGE, pa.ArrowException) as error:
        raise ValueError(f"'{path}' cannot be read as episodes: {' '.join(str(error).split())}") from error


def read_extra(path: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """Optional columns of a file, as lists: prompts as text, ends of tokens, the trainer's log-probs."""
    path = pathlib.Path(path)
    if path.name.endswith(SUFFIX):
        return {}
    names = [name for name in EXTRA if name in pq.read_schema(path).names]
    return pq.read_table(path, columns=names).to_pydict()


def _columns(table: Table, decode: Decoders | None, trainer: Sequence[np.ndarray | None]) -> dict[str, Any]:
    owners = [table.bare_episodes[number] for number in table.episode.tolist()]
    columns: dict[str, Any] = {
        "task": _texts(bare.task.id for bare in owners),
        "sample": [bare.sample for bare in owners],
        "question": _texts(bare.task.question for bare in owners),
        **{
            name: _texts(getattr(table, names)[code] for code in getattr(table, name))
            for name, names in NAMES.items()
        },
        "kind": [KINDS[code] for code in table.kind],
        "text": _texts(table.text),
        "answer": _texts(table.answer),
        **({"about": _texts(None if t is None else t.id for t in table.about)} if table.about else {}),
        "reads": pa.array(unpadded(table.reads), INT_LISTS),
        "path": pa.array(unpadded(table.path), INT_LISTS),
        "parent": table.parent,
        "branch": table.branch,
        "labels": _texts(json.dumps(labels) if labels else None for labels in table.labels),
        **{name: _lists(getattr(table, name)) for name in LISTS},
    }
    if decode is not None:
        columns["asked"] = _texts(_asked(table, decode))
        names = (table.policies[code] for code in table.policy)
        ends = [_ends(table.tokens[row].tolist(), decoder_of(decode, name)) for row, name in enumerate(names)]
        columns["ends"] = pa.array(ends, INT_LISTS)
    if any(row is not None for row in trainer):
        columns["trainer_logprobs"] = pa.array(
            [None if row is None else row.tolist() for row in trainer], pa.list_(pa.float32())
        )
    if table.kept is not None:
        kept = [unpadded(table.kept[row]) for row in range(len(table))]
        columns["kept"] = pa.array(kept, pa.list_(pa.list_(pa.int32())))
    if table.spoken is not None:
        columns["spoken"] = _lists(table.spoken)
    plain = {name: getattr(table, name) for name in (*INTS, *DTYPES)}
    columns |= {name: values for name, values in plain.items() if values is not None}
    columns |= {f"component/{name}": values for name, values in table.components.items()}
    return columns


def _table(read: pa.Table, facts: dict[str, Any]) -> Table:
    tasks = {task["id"]: Task.from_json(task) for task in facts["tasks"]}
    episodes = tuple(_bare(packed, tasks) for packed in facts["episodes"])
    texts = {name: read[name].to_pylist() for name in ("role", "policy", "kind", "text", "answer")}
    names = {*read.column_names}
    added = lambda name, missing: read[name].to_pylist() if name in names else [missing] * len(read)
    about, labels, paths = added("about", None), added("labels", None), added("path", ())
    columns: dict[str, Any] = {
        name: read[name].to_numpy().copy() for name in (*INTS, *DTYPES) if name in names
    }
    columns |= {name: _ragged(read[name], dtype) for name, dtype in LISTS.items()}
    table = Table.make(
        role=texts["role"],
        policy=texts["policy"],
        kept=read["kept"].to_pylist() if "kept" in names else None,
        task=[task if name is None else name for name, task in zip(about, read["task"].to_pylist())],
        spoken=read["spoken"].to_pylist() if "spoken" in names else None,
        **columns,
    )
    return table.replace(
        about=tuple(None if name is None else tasks[name] for name in about) if any(about) else (),
        reads=padded(read["reads"].to_pylist()),
        path=padded(paths),
        labels=tuple(text and json.loads(text) for text in labels),
        kind=np.array([KINDS.index(kind) for kind in texts["kind"]], np.int32),
        text=tuple(texts["text"]),
        answer=tuple(texts["answer"]),
        components={
            name.removeprefix("component/"): read[name].to_numpy().copy()
            for name in read.column_names
            if name.startswith("component/")
        },
        bare_episodes=episodes,
        **dict.fromkeys({"reward", "advantage"} - names),
    )


def _facts(bare: Episode) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(bare) if field.name not in ("calls", "answers")]
    facts = {name: getattr(bare, name) for name in names}
    listed = {name: [dataclasses.asdict(record) for record in facts[name]] for name in ("tools", "leaves")}
    return {**facts, **listed, "task": bare.task.id}


def _bare(packed: dict[str, Any], tasks: dict[str, Any]) -> Episode:
    tools = tuple(ToolRecord(**tool) for tool in packed["tools"])
    leaves = tuple(Leaf(**{**leaf, "path": tuple(leaf["path"])}) for leaf in packed.get("leaves", ()))
    tuples = {name: tuple(packed.get(name, ())) for name in ("key", "path")}
    return Episode(
        **{**packed, **tuples, "task": tasks[packed["task"]], "tools": tools, "leaves": leaves, "calls": ()}
    )


def _asked(table: Table, decode: Decoders) -> list[str]:
    """The prompt of each row as text; a call before a fork has one prompt on all of its paths."""
    flat, rows = table.paths()
    prompts = [text for episode in flat.episodes() for text in prompts_of(episode, decode)]
    by_row = dict(zip(rows.tolist(), prompts))
    return [by_row[row] for row in range(len(table))]


def _ends(tokens: Sequence[int], decode: Decode) -> list[int]:
    """Characters of the text up to and including each token; a character of several tokens ends with the last."""
    ends, start, end, piece = list[int](), 0, 0, ""
    for number in range(1, len(tokens) + 1):
        piece = decode(tokens[start:number])
        if count := _complete(tokens[start:number], piece, decode):
            start += count
            rest = decode(tokens[start:number])
            end, piece = end + len(piece) - len(rest), rest
        ends.append(end)
    return [*ends[:-1], end + len(piece)] if ends else ends  # the last token may end within a character


def _complete(tokens: Sequence[int], text: str, decode: Decode) -> int:
    """How many of these tokens form complete characters: all, none, or the first ones if bytes are invalid."""
    if not text.endswith("\ufffd"):
        return len(tokens)
    if len(tokens) <= LONGEST:
        return 0
    cuts = range(1, LONGEST + 1)
    return next((cut for cut in cuts if decode(tokens[:cut]) + decode(tokens[cut:]) == text), 0)


def _texts(values: Iterable[str | None]) -> pa.Array:
    """A column of texts; half a surrogate pair, which parquet cannot store, becomes a question mark."""
    readable = [value and value.encode("utf-8", "replace").decode() for value in values]
    return pa.array(readable, pa.string())


def _lists(column: Ragged) -> pa.Array:
    values = np.concatenate([column[row] for row in range(len(column))] or [column.values[:0]])
    offsets = np.concatenate([[0], np.cumsum(column.lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values)


def _ragged(column: pa.ChunkedArray, dtype: Any) -> list[np.ndarray]:
    array = column.combine_chunks()
    ends, values = array.offsets.to_numpy(), array.values.to_numpy().astype(dtype)
    return [values[start:end] for start, end in itertools.pairwise(ends)]
