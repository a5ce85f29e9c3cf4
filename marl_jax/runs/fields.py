"""Trees of frozen dataclasses: their fields set by path from texts, and to JSON and back.

    {"learner.loss.clip_low": "0.1"}  ──►  parsed by the field's annotation  ──►  rebuilt from the leaves up

Nothing here stops at the first mistake: mistakes are collected, one line each, and the valid rest is still checked.
"""

import copy
import dataclasses
import difflib
import functools
import json
import math
import numbers
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

Path = tuple[str, ...]
T = TypeVar("T")
_NONE = ("none", "null")
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Mismatch(ValueError):
    """A value does not fit an annotation; the text is what would."""


def change(base: T, texts: Iterable[tuple[str, str | None]]) -> tuple[T, list[str]]:
    """`base` with the fields at these dotted paths set from their texts, and every mistake in them.

    An entry of a mapping is set by its key: ("policies.map.evaluator", "p0"). A text of None is a bare switch: true.
    What is refused as a whole comes back as it was asked for, so that more can be told about it.
    """
    read, problems = read_texts(type(base), texts)
    changes: dict[Path, Any] = {}
    for path, keys, value in read:
        changes[path] = _put(changes.get(path, _get(base, path)), keys, value) if keys else value
    return _rebuild(base, changes, (), problems), problems


def read_texts(
    cls: type, texts: Iterable[tuple[str, str | None]]
) -> tuple[list[tuple[Path, Path, Any]], list[str]]:
    """[(path of a field of `cls`, keys inside its mapping, value)], and mistakes that show without other fields."""
    read, problems = [], []
    for name, text in texts:
        try:
            path, keys, annotation = _locate(cls, name)
            read.append((path, keys, _read(annotation, text)))
        except LookupError as error:
            problems.append(f"{name} is unknown{_suggest(name, cls, error.args[0])}")
        except Mismatch as error:
            shown = "given without a value" if text is None else repr(text)
            problems.append(f"{name} is {shown}; it must be {error}")
    return read, problems


def to_json(value: Any) -> Any:
    """Dataclasses and mappings as objects, tuples as lists."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(entry) for entry in value]
    return value


def from_json(cls: type[T], value: Any) -> T:
    """The inverse of `to_json`; a field that is missing, unknown or of another type is refused by its path."""
    problems: list[str] = []
    built = _build(cls, value, (), problems)
    if problems:
        raise ValueError("; ".join(problems))
    return built


def filled(cls: Any, value: Any) -> Any:
    """The JSON of a `cls`, with the defaults of fields that it lacks: there were none such when it was written."""
    if not (dataclasses.is_dataclass(cls) and isinstance(value, Mapping)):
        return value
    whole, hints = dict(value), _hints(typing.cast(type, cls))
    for field in dataclasses.fields(cls):
        if field.name in value:
            whole[field.name] = filled(hints[field.name], value[field.name])
        elif field.default is not dataclasses.MISSING:
            whole[field.name] = to_json(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            whole[field.name] = to_json(field.default_factory())
    return whole


def fit(tree: T) -> tuple[T, list[str]]:
    """A tree built in Python as `from_json` would give it back (1 as 1.0, a list as a tuple), and all that misfits."""
    problems: list[str] = []
    return _fit(type(tree), tree, (), problems), problems


def misfit(annotation: Any, value: Any) -> str | None:
    """What a value must be that is not of this type; None where it is."""
    try:
        _check(annotation, value)
    except Mismatch as error:
        return str(error)
    return None


def annotations(cls: type) -> dict[str, Any]:
    """{field of a dataclass: its type}."""
    return dict(_hints(cls))


def nearest(name: str, known: Iterable[str]) -> str:
    """ ": did you mean 'x'?", or what there is."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f": did you mean '{close[0]}'?" if close else f"; there is: {', '.join(known) or 'nothing'}"


def paths(cls: type, prefix: str = "") -> Iterator[str]:
    """Every field that can be set, by its dotted path."""
    for name, annotation in _hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            yield from paths(typing.cast(type, annotation), f"{prefix}{name}.")
        else:
            yield prefix + name


# ---------------------------------------------------------------- values


def _read(annotation: Any, text: str | None) -> Any:
    """A text of the command line as what the annotation says."""
    if annotation is Any:
        return _any(text)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        if type(None) in args and text is not None and text.lower() in _NONE:
            return None
        return _first(args, lambda option: _read(option, text), annotation)
    if annotation is bool and text is None:
        return True
    if text is None or dataclasses.is_dataclass(annotation) or annotation is type(None):
        raise Mismatch(_describe(annotation))
    if annotation is str:
        return text
    if origin is Literal:
        for choice in args:
            if text == str(choice):
                return choice
        raise Mismatch(_describe(annotation))
    if annotation is bool:
        if text.lower() not in _BOOLS:
            raise Mismatch(_describe(annotation))
        return _BOOLS[text.lower()]
    if annotation in (int, float):
        try:
            return _check(annotation, annotation(text))
        except ValueError:
            raise Mismatch(_describe(annotation)) from None
    if origin is tuple:
        inside = text.strip()
        if inside[:1] + inside[-1:] in ("()", "[]"):
            inside = inside[1:-1]
        parts = [part.strip().strip("'\"") for part in inside.rstrip(", ").split(",")] if inside else []
        try:
            return tuple(_read(each, part) for each, part in zip(_elements(annotation, len(parts)), parts))
        except Mismatch:
            raise Mismatch(_describe(annotation)) from None
    try:
        return _check(annotation, json.loads(text))
    except json.JSONDecodeError:
        raise Mismatch(_describe(annotation)) from None


def _check(annotation: Any, value: Any) -> Any:
    """A value of JSON, or of Python, as what the annotation says."""
    value = _plain(value)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return tuple(value) if isinstance(value, list) else value
    if origin in (typing.Union, types.UnionType):
        return _first(args, lambda option: _check(option, value), annotation)
    if annotation is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if annotation in (int, bool, str, type(None)) and type(value) is annotation:
        return value
    if origin is Literal and any(value == choice and type(value) is type(choice) for choice in args):
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_check(each, entry) for each, entry in zip(_elements(annotation, len(value)), value))
    if _is_mapping(annotation) and isinstance(value, Mapping):
        return {_check(args[0], key): _check(args[1], entry) for key, entry in value.items()}
    raise Mismatch(_describe(annotation))


def _plain(value: Any) -> Any:
    """A number or truth of numpy as Python's own."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _any(text: str | None) -> Any:
    if text is None or text.lower() in _NONE:
        return True if text is None else None
    if text.lower() in ("true", "false"):
        return _BOOLS[text.lower()]
    try:
        return _check(Any, json.loads(text))
    except json.JSONDecodeError:
        return text


def _first(options: Sequence[Any], read: Any, annotation: Any) -> Any:
    for option in options:
        try:
            return read(option)
        except Mismatch:
            continue
    raise Mismatch(_describe(annotation))


def _elements(annotation: Any, count: int) -> Sequence[Any]:
    args = typing.get_args(annotation)
    if len(args) == 2 and args[1] is Ellipsis:
        return [args[0]] * count
    if len(args) != count:
        raise Mismatch(_describe(annotation))
    return args


def _describe(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return f"set field by field: {', '.join(_hints(typing.cast(type, annotation)))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in args)
    if origin is Literal:
        return " or ".join(f"'{choice}'" for choice in args)
    if origin is tuple:
        many = args[-1] is Ellipsis
        return (
            f"{'any number of' if many else len(args)} values with commas between, each {_describe(args[0])}"
        )
    if _is_mapping(annotation):
        return 'a JSON object such as {"role": ...}, or set entry by entry with .role=value'
    names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}
    return names.get(annotation, "none")


# ---------------------------------------------------------------- trees


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _is_mapping(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _locate(cls: type, name: str) -> tuple[Path, Path, Any]:
    """(path of the field, keys inside its mapping, annotation of what is set there)."""
    parts = tuple(name.split("."))
    annotation: Any = cls
    for depth, part in enumerate(parts):
        if dataclasses.is_dataclass(annotation):
            fields = _hints(typing.cast(type, annotation))
            if part not in fields:
                raise LookupError(list(fields) if depth else [])
            annotation = fields[part]
            continue
        keys = parts[depth:]
        for key in keys:
            if annotation is not Any and not (_is_mapping(annotation) and key):
                raise LookupError([])
            annotation = Any if annotation is Any else typing.get_args(annotation)[1]
        return parts[:depth], keys, annotation
    return parts, (), annotation


def _suggest(name: str, cls: type, siblings: Sequence[str]) -> str:
    """The nearest path: a field of that name elsewhere, else a sibling, else whatever reads alike."""
    known, last = list(paths(cls)), name.rpartition(".")[2]
    same = [path for path in known if path.rpartition(".")[2] == last]
    if same:
        return f": did you mean {' or '.join(repr(path) for path in same)}?"
    close = difflib.get_close_matches(last, siblings, 1, 0.5)
    if close:
        return f": did you mean '{name.rpartition('.')[0]}.{close[0]}'?"
    close = difflib.get_close_matches(name, [*known, *_hints(cls)], 1, 0.6)
    return f": did you mean '{close[0]}'?" if close else f"; there is: {', '.join(siblings or _hints(cls))}"


def _get(base: Any, path: Path) -> Any:
    return functools.reduce(getattr, path, base)


def _put(mapping: Mapping[str, Any] | None, keys: Path, value: Any) -> dict[str, Any]:
    inner = value if len(keys) == 1 else _put((mapping or {}).get(keys[0]), keys[1:], value)
    return {**(mapping or {}), keys[0]: inner}


def _rebuild(base: Any, changes: Mapping[Path, Any], at: Path, problems: list[str]) -> Any:
    """`base` with the changes; a field that its dataclass refuses is reported, and below the root left as it was."""
    values: dict[str, Any] = {path[0]: value for path, value in changes.items() if len(path) == 1}
    for name in dict.fromkeys(path[0] for path in changes if len(path) > 1):
        below = {path[1:]: value for path, value in changes.items() if path[0] == name}
        values[name] = _rebuild(getattr(base, name), below, (*at, name), problems)
    while values:
        built, refusal = _try(base, values)
        if refusal is None:
            return built
        problems.extend(f"{'.'.join(at)}: {line}" if at else line for line in refusal)
        if not at:
            return _unchecked(base, values)
        without = {name: {k: v for k, v in values.items() if k != name} for name in values}
        culprit = next((name for name, rest in without.items() if _try(base, rest)[1] != refusal), None)
        if culprit is None:
            break
        values = without[culprit]
    return base


def _unchecked(base: Any, values: Mapping[str, Any]) -> Any:
    """A copy with these fields, whatever its dataclass says of them."""
    made = copy.copy(base)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _try(base: Any, values: Mapping[str, Any]) -> tuple[Any, list[str] | None]:
    try:
        return dataclasses.replace(base, **values), None
    except (ValueError, TypeError) as error:
        return None, getattr(error, "problems", [str(error)])


def _fit(annotation: Any, value: Any, at: Path, problems: list[str]) -> Any:
    """A value as what the annotation says; one that is not is reported by its path, and stays as it is."""
    where = ".".join(at)
    if dataclasses.is_dataclass(annotation):
        cls = typing.cast(type, annotation)
        if not isinstance(value, cls):
            problems.append(f"{where} is {value!r:.80}; it must be {cls.__name__}(...)")
            return value
        fields = _hints(cls).items()
        fitting = {name: _fit(hint, getattr(value, name), (*at, name), problems) for name, hint in fields}
        return _unchecked(value, fitting)
    if _is_mapping(annotation) and isinstance(value, Mapping):
        inner = typing.get_args(annotation)[1]
        problems.extend(
            f"{where} has the key {key!r}; it must be a text" for key in value if type(key) is not str
        )
        return {key: _fit(inner, entry, (*at, str(key)), problems) for key, entry in value.items()}
    try:
        return _check(annotation, value)
    except Mismatch as error:
        problems.append(f"{where} is {value!r:.80}; it must be {error}")
        return value


def _build(cls: Any, value: Any, at: Path, problems: list[str]) -> Any:
    where = ".".join(at) or "it"
    if not dataclasses.is_dataclass(cls):
        return _fit(cls, value, at, problems)
    fields = _hints(typing.cast(type, cls))
    if not isinstance(value, Mapping):
        problems.append(f"{where} is {value!r:.80}; it must be an object")
        return None
    count = len(problems)
    problems.extend(f"{'.'.join((*at, name))} is unknown" for name in value if name not in fields)
    problems.extend(f"{'.'.join((*at, name))} is missing" for name in fields if name not in value)
    built = {
        name: _build(fields[name], value[name], (*at, name), problems) for name in fields if name in value
    }
    if len(problems) > count:
        return None
    try:
        return typing.cast(type, cls)(**built)
    except (ValueError, TypeError) as error:
        problems.append(f"{where}: {error}")
        return None
