"""Rows of data files: parquet, JSONL (gzipped or not) and JSON lists, read one by one.

Every problem with a file or a row is one `DataError` that names the file and the row. Rows count from 1, as lines do
in an editor.
"""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marl_jax.errors import UserError

SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json")
_FORMATS = (".parquet", (".jsonl", ".jsonl.gz"), ".json")  # in this order of preference
_SPLITS = {  # words in a file's name that state the split
    "train": "train|training",
    "val": "val|valid|validation|dev",
    "test": "test|testing",
    "eval": "eval|evaluation",
}
# Possible beginnings of a file's name.
_SPLIT_ALONE = re.compile(rf"(?:{'|'.join(_SPLITS.values())})(?:set|data)?\.")
Row = dict[str, Any]


class DataError(UserError, ValueError):
    """A file or a row that cannot be used."""


class RowError(ValueError):
    """A row that cannot be used, raised by code that does not know the row's file and number."""


def read_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields (row number from 1, row) of a file; a row should be a dict, but can be any value.

    A line that is not JSON is yielded as a `DataError`, so that the caller may skip it.
    """
    if path.name.endswith(".parquet"):
        yield from enumerate(_parquet(path), start=1)
    elif path.name.endswith((".jsonl", ".gz")):
        yield from _jsonl(path)
    else:
        yield from enumerate(_json(path), start=1)


def list_files(directory: Path, folder: str = "") -> list[Path]:
    """The data files of a directory (or of its `folder`, or their `data`), in name order.

    Without a `folder`, files of the directory that are named for splits come before those of its `data`.
    They have one format; a file of another format is used only if it alone is named for a split, as test.json next to
    train.jsonl. The rest are copies and descriptions, usual in published repositories. `directory` may be one file.
    """
    if directory.is_file():
        if directory.name.endswith(SUFFIXES):
            return [directory]
        raise DataError(f"{directory}: not a data file (its name must end in {', '.join(SUFFIXES)})")
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; data.directory names where the files are")
    places = [directory / folder / "data", directory / folder, directory / "data", directory]
    is_split = lambda path: path.name.endswith(SUFFIXES[:-1]) and named_split(path) and path.is_file()
    if not folder and any(map(is_split, directory.glob("[!.]*"))):
        places = [directory]
    for place in places:
        paths = sorted(path for path in place.glob("[!.]*") if path.is_file())
        formats = [[path for path in paths if path.name.endswith(suffix)] for suffix in _FORMATS]
        if any(formats):
            first, *others = filter(None, formats)
            names = {path.name for path in first}
            first = [path for path in first if path.name.removesuffix(".gz") not in names - {path.name}]
            splits = {named_split(path) for path in first}
            more = (path for path in itertools.chain(*others) if _SPLIT_ALONE.match(path.name.lower()))
            return first + [path for path in more if named_split(path) not in splits]
    raise DataError(f"{directory}: no data files here (looked for {', '.join(SUFFIXES)})")


def named_split(path: Path) -> str | None:
    """The split that the name of a file states, by the first of these words in it: train, val, test, eval."""
    stated = lambda words: re.search(rf"(?<![a-z])(?:{words})(?:set|data)?(?![a-z])", path.name.lower())
    return next((split for split, words in _SPLITS.items() if stated(words)), None)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for place, field in enumerate(batch.schema):
                    # A column of numbers: 0.1 as it was written, not 0.10000000149011612.
                    if field.type == pa.float32():
                        shortest = batch.column(place).cast(pa.string()).cast(pa.float64())
                        batch = batch.set_column(place, field.name, shortest)
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: not a readable parquet file ({reason})") from None


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with open(path, "rb") as file:
            opener = gzip.open if file.read(2) == b"\x1f\x8b" else open  # by content, not by name
        with opener(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _line(line, f"{path}, line {number}")
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        raise DataError(f"{path}: cannot be read past line {number} ({error})") from None


def _json(path: Path) -> list[Any]:
    try:
        rows = _parse(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds one JSON {type(rows).__name__}, not a list of rows")
    return rows


def _line(line: bytes, where: str) -> Any:
    try:
        return _parse(line, where)
    except DataError as error:
        if line.endswith(b"\n"):
            return error
        raise DataError(f"{error}, and the file ends in the middle of it") from None  # rows may be missing


def _parse(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})") from None
    except json.JSONDecodeError as error:
        lines = ": JSON lines need a .jsonl name" if error.msg == "Extra data" and error.lineno > 1 else ""
        if data.strip(b"\xef\xbb\xbf\r\n ") == b"[":
            lines = ": a JSON list over several lines needs a .json name"
        raise DataError(
            f"{where}: not JSON ({error.msg.removesuffix(' at')} at column {error.colno}){lines}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets of too many levels
        raise DataError(f"{where}: not JSON that can be read ({error})") from None
