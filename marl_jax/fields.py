"""Trees of frozen dataclasses: fields set by dotted path from strings, and conversion to and from JSON.

    {"learner.loss.clip_low": "0.1"}  ──►  the value of the field's type  ──►  a tree with that field

A field declares its bounds with its type: `steps: Annotated[int, Ge(0)]`. A dataclass that calls `check` in its
`__post_init__` refuses all other values. Mistakes in several fields are collected, one line each; of those within the
JSON of one field only the first is reported.
"""

import copy
import dataclasses
import difflib
import functools
import json
import numbers
import sys
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MinLen

Path = tuple[str, ...]
T = TypeVar("T")

Count = Annotated[int, Ge(1)]
OptionalCount = Annotated[int | None, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]

_CHECKED: set[type] = set()  # classes that call `check`: their objects were checked when they were made
_BOOLS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_WORDS = {"true": True, "false": False, "none": None, "null": None}  # if the annotation allows any value
_NAMES = {int: "an integer", float: "a finite number", bool: "true or false", str: "a text"}


class Mismatch(ValueError):
    """A value does not fit an annotation; the text describes a value that would."""


class Misbuilt(Mismatch):
    """A value has the right kind, such as a JSON object, but wrong content; the text describes the content needed."""


class Refused(ValueError):
    """Mistakes in the fields of a dataclass, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class Text(str):
    """A string from the command line, to be parsed as the type of its field."""


def change(base: T, texts: Iterable[tuple[str, str | None]]) -> tuple[T, list[str]]:
    """Set fields of `base` by (dotted path, string); returns the new tree and all mistakes.

    An entry of a mapping is set by its key: ("policies.map.evaluator", "p0"). None instead of a string means true.
    The tree is returned even if its class refuses it, so that it can be checked further.
    """
    read, problems = read_texts(type(base), texts)
    changes: dict[Path, Any] = {}
    for path, keys, value in read:
        before = changes.get(path, functools.reduce(getattr, path, base))
        changes[path] = _put(before, keys, value) if keys else value
    return _rebuild(base, changes, (), problems), problems


def read_texts(
    cls: type, texts: Iterable[tuple[str, str | None]]
) -> tuple[list[tuple[Path, Path, Any]], list[str]]:
    """[(path of a field of `cls`, keys inside its mapping, value)], and the mistakes in single fields."""
    read, problems = [], []
    for name, text in texts:
        try:
            path, keys, annotation = _locate(cls, name)
            read.append((path, keys, _cast(annotation, True if text is None else Text(text))))
        except LookupError as error:
            problems.append(f"{name} is unknown{_suggest(name, cls, *error.args)}")
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
    built = _fit(cls, value, (), problems)
    if problems:
        raise Refused(problems)
    return built


def with_defaults(cls: Any, value: Any) -> Any:
    """The JSON object of a `cls`; fields that did not exist when it was written get their defaults."""
    if not (_is_tree(cls) and isinstance(value, Mapping)):
        return value
    result, hints = dict(value), annotations(cls)
    for field in dataclasses.fields(cls):
        if field.name in value:
            result[field.name] = with_defaults(hints[field.name], value[field.name])
        elif field.default is not dataclasses.MISSING:
            result[field.name] = to_json(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            result[field.name] = to_json(field.default_factory())
    return result


def fit(tree: Any) -> tuple[dict[str, Any], list[str]]:
    """The fields of a tree converted as by `from_json` (1 to 1.0, a list to a tuple), and a line for each misfit."""
    problems: list[str] = []
    cls: Any = type(tree)
    hints = annotations(cls)
    values = {name: _fit(hint, getattr(tree, name), (name,), problems) for name, hint in hints.items()}
    return values, problems


def check(tree: Any) -> None:
    """Raise if a field has the wrong type or is out of bounds; for `__post_init__`.

    Values are converted as by `from_json`.
    """
    _CHECKED.add(type(tree))
    values, problems = fit(tree)
    for name, value in values.items():
        object.__setattr__(tree, name, value)
    if problems := problems or list(out_of_bounds(tree)):
        raise Refused(problems)


def out_of_bounds(tree: Any, prefix: str = "") -> Iterator[str]:
    """A line for every value that violates a bound of its field; None violates no bound."""
    cls: Any = type(tree)
    for name, hint in _bounded_hints(cls).items():
        yield from _violations(hint, getattr(tree, name), prefix + name)


def misfit(annotation: Any, value: Any) -> str | None:
    """If the value does not fit the type: a description of values that do; else None."""
    try:
        _cast(annotation, value)
    except Mismatch as error:
        return str(error)
    return None


@functools.cache
def annotations(cls: Any) -> Mapping[str, Any]:
    """{field of a dataclass: its type}."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def nearest(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.5) -> str:
    """ ": did you mean 'x'?"; if no name is close, `otherwise`, or the list of known names."""
    known = list(known)
    if close := difflib.get_close_matches(name, known, 1, cutoff):
        return f": did you mean '{close[0]}'?"
    return otherwise or f"; there is: {', '.join(known) or 'nothing'}"


def unknown_names(where: str, names: Iterable[str], known: Collection[str], what: str) -> Iterator[str]:
    """A line for each unknown name; the setting `where` has the names, `what` says what a known name is."""
    for name in names:
        if name not in known:
            yield f"{where} names '{name}', which is no {what}{nearest(name, known)}"


# It tries `int` first: checking the abstract class alone takes longer than all the rest of an engine's request.
def is_whole(value: Any) -> bool:
    """Whether it is a Python or numpy integer; a bool is not one."""
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def require(condition: Any, message: str) -> None:
    """Raise a ValueError with this message unless the condition is true."""
    if not condition:
        raise ValueError(message)


def paths(cls: Any, prefix: str = "") -> Iterator[str]:
    """The dotted path of every field that can be set."""
    for name, annotation in annotations(cls).items():
        if _is_tree(annotation):
            yield from paths(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


# ---------------------------------------------------------------- values


def _violations(hint: Any, value: Any, where: str) -> Iterator[str]:
    """A line for every bound of the annotation that this value, or an entry of it, violates."""
    if dataclasses.is_dataclass(value):
        yield from () if type(value) in _CHECKED else out_of_bounds(value, f"{where}.")
    elif _is_mapping(hint):
        for key, entry in value.items():
            yield from _violations(typing.get_args(hint)[1], entry, f"{where}.{key}")
    elif typing.get_origin(hint) is tuple:
        for entry in value:
            yield from _violations(typing.get_args(hint)[0], entry, where)
    for bound in getattr(hint, "__metadata__", ()) if value is not None else ():
        match bound:
            case Ge(least) if value < least:
                yield f"{where} is {value}; it must be at least {least}"
            case Gt(least) if value <= least:
                yield f"{where} is {value}; it must be more than {least}"
            case Le(most) if value > most:
                yield f"{where} is {value}; it must be at most {most}"
            case Lt(most) if value >= most:
                yield f"{where} is {value}; it must be less than {most}"
            case MinLen(1) if not value:
                yield f"{where} is {value!r}; it must not be empty"


def _cast(annotation: Any, value: Any) -> Any:
    """A JSON or Python value, or a `Text`, converted to the annotated type."""
    # None comes first, because "none" would also be accepted as a text.
    for option in sorted(_options(annotation), key=lambda option: option is not type(None)):
        try:
            return _convert(option, _parse(option, value) if isinstance(value, Text) else _plain(value))
        except Misbuilt:
            raise
        except Mismatch:
            continue
    raise Mismatch(_describe(annotation))


def _options(annotation: Any) -> tuple[Any, ...]:
    """The types of a union."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _convert(option: Any, value: Any) -> Any:
    kind, origin, args = type(value), typing.get_origin(option), typing.get_args(option)
    if option is Any:
        return tuple(value) if kind is list else value
    if option is float and kind in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if option in (int, bool, str, type(None)) and kind is option:
        return value
    if origin is Literal and any(value == choice and kind is type(choice) for choice in args):
        return value
    if origin is tuple and isinstance(value, list | tuple):
        item_types = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(item_types) == len(value):
            return tuple(map(_cast, item_types, value))
    if _is_mapping(option) and isinstance(value, Mapping):
        return {_cast(args[0], key): _entry(args[1], key, entry) for key, entry in value.items()}
    if _is_tree(option) and isinstance(value, option):
        return value
    if _is_tree(option) and isinstance(value, Mapping):
        known = annotations(option)
        if unknown := [name for name in value if name not in known]:
            raise Misbuilt(f"without the unknown '{unknown[0]}'{nearest(str(unknown[0]), known)}")
        no_default = lambda field: field.default is field.default_factory is dataclasses.MISSING
        required = (field.name for field in dataclasses.fields(option) if field.init and no_default(field))
        if missing := [name for name in required if name not in value]:
            raise Misbuilt(f"{option.__name__}(...) with '{missing[0]}'")
        try:
            return option(**{name: with_defaults(known[name], entry) for name, entry in value.items()})
        except (ValueError, TypeError) as error:
            raise Misbuilt(f"a valid {option.__name__}(...): {error}") from None
    raise Mismatch


def _entry(annotation: Any, key: Any, value: Any) -> Any:
    try:
        return _cast(annotation, value)
    except Misbuilt:
        raise
    except Mismatch as error:
        raise Misbuilt(f"a JSON object whose '{key}' is {error}") from None


def _plain(value: Any) -> Any:
    """A numpy number or bool as a Python one."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _parse(option: Any, text: Text) -> Any:
    """A string parsed as the annotated type, else the string itself; broken JSON raises `Misbuilt`."""
    word, origin = text.lower(), typing.get_origin(option)
    if option is bool:
        return _BOOLS.get(word, str(text))
    if option in (Any, type(None)) and word in _WORDS:
        return _WORDS[word]
    if option is str or origin is Literal:
        return str(text)
    of_trees = origin is tuple and _is_tree(typing.get_args(option)[0])
    if origin is tuple and not of_trees:
        inside = text.strip()
        try:
            if isinstance(items := json.loads(inside), list):  # texts in a JSON list may contain commas
                return [Text(item) if isinstance(item, str) else item for item in items]
        except ValueError as error:
            if inside.startswith('["'):
                raise Misbuilt(f"a JSON list that can be read: {error}") from None
        if inside[:1] + inside[-1:] in ("()", "[]"):
            inside = inside[1:-1]
        return [Text(part.strip(" '\"")) for part in inside.rstrip(", ").split(",")] if inside else []
    if of_trees and not text:
        return []
    try:
        return option(text) if option in (int, float) else json.loads(text, object_pairs_hook=each_once)
    except ValueError as error:
        if of_trees and text.startswith("["):
            raise Misbuilt(f"a JSON list that can be read: {error}") from None
        if text.startswith("{") and (_is_tree(option) or _is_mapping(option)):
            raise Misbuilt(f"a JSON object that can be read: {error}") from None
        return str(text)


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name that appears twice is refused, because Python would silently take the last."""
    if len(result := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{max(names, key=names.count)}' appears twice")
    return result


def _describe(annotation: Any) -> str:
    if len(options := _options(annotation)) > 1:
        return " or ".join(map(_describe, options))
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if _is_tree(annotation):
        return f"set field by field: {', '.join(annotations(annotation))}"
    if origin is Literal:
        return " or ".join(f"'{choice}'" for choice in args)
    if origin is tuple and _is_tree(args[0]):
        return f"a JSON list of objects with the fields {', '.join(annotations(args[0]))}"
    if origin is tuple:
        count = "any number of" if args[-1] is Ellipsis else len(args)
        return f"{count} values with commas between (or a JSON list), each {_describe(args[0])}"
    if _is_mapping(annotation):
        return 'a JSON object such as {"role": ...}, or set entry by entry with .role=value'
    return _NAMES.get(annotation, "none")


# ---------------------------------------------------------------- trees


@functools.cache
def _bounded_hints(cls: Any) -> dict[str, Any]:
    """{field: its annotation with its bounds}."""
    return typing.get_type_hints(cls, include_extras=True)


def _is_tree(annotation: Any) -> bool:
    return dataclasses.is_dataclass(annotation)


def _is_mapping(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _locate(cls: type, name: str) -> tuple[Path, Path, Any]:
    """(path of the field, keys inside its mapping, annotation of the value at it)."""
    parts = tuple(name.split("."))
    annotation: Any = cls
    entry_class: Any = None  # the dataclass of a mapping's entries, if the field's metadata names one
    for depth, part in enumerate(parts):
        if _is_tree(annotation):
            fields = annotations(annotation)
            if part not in fields:
                raise LookupError(list(fields) if depth else [], ".".join(parts[:depth]))
            entry_class = annotation.__dataclass_fields__[part].metadata.get("of")
            annotation = fields[part]
            continue
        keys = parts[depth:]
        for key in keys:
            if annotation is not Any and not (_is_mapping(annotation) and key):
                raise LookupError([], "")
            annotation = Any if annotation is Any else typing.get_args(annotation)[1]
        if entry_class and len(keys) == 2:
            annotation = annotations(entry_class).get(keys[1], annotation)
        return parts[:depth], keys, annotation
    return parts, (), annotation


def _suggest(name: str, cls: type, siblings: Sequence[str], group: str) -> str:
    """A field of that name elsewhere, else a similar one of the group, else all of the group; else the most similar."""
    known, last = list(paths(cls)), name.rpartition(".")[2]
    same = [path for path in known if path.rpartition(".")[2] == last]
    if same:
        return f": did you mean {' or '.join(repr(path) for path in same)}?"
    part, _, rest = name.removeprefix(f"{group}.").partition(".")
    nearer = difflib.get_close_matches(part, siblings or annotations(cls), 1, 0.6)
    if rest and nearer and nearer[0] != part:  # a group's name is misspelt: first of all that is corrected
        corrected = ".".join(filter(None, (group, nearer[0], rest)))
        try:
            _locate(cls, corrected)
        except LookupError as error:
            return _suggest(corrected, cls, *error.args)
        return f": did you mean {corrected!r}?"
    containing = [field for field in siblings if len(last) > 2 and last in field.split("_")]
    if close := containing or difflib.get_close_matches(last, siblings, 1, 0.5):
        return f": did you mean {' or '.join(repr(f'{group}.{field}') for field in close)}?"
    where = f"in {group} " if group else ""
    names = f"; {where}there is: {', '.join(siblings or annotations(cls))}"
    # A path below a group is similar to all of the group's fields.
    return names if siblings else nearest(name, [*known, *annotations(cls)], names, 0.6)


def _put(mapping: Mapping[str, Any] | None, keys: Path, value: Any) -> dict[str, Any]:
    inner = value if len(keys) == 1 else _put((mapping or {}).get(keys[0]), keys[1:], value)
    return {**(mapping or {}), keys[0]: inner}


def _rebuild(base: Any, changes: Mapping[Path, Any], at: Path, problems: list[str]) -> Any:
    """`base` with the changes. Below the root, a change that the dataclass refuses is reported and left out."""
    if not changes:
        return base
    values: dict[str, Any] = {path[0]: value for path, value in changes.items() if len(path) == 1}
    for name in dict.fromkeys(path[0] for path in changes if len(path) > 1):
        below = {path[1:]: value for path, value in changes.items() if path[0] == name and path[1:]}
        values[name] = _rebuild(values.get(name, getattr(base, name)), below, (*at, name), problems)
    while refusal := _refusal(base, values):
        lines = [f"{'.'.join(at)}: {line}" if at else line for line in refusal]
        problems.extend(line for line in lines if line not in problems)
        if not at:
            unchecked = copy.copy(base)
            for name, value in values.items():
                object.__setattr__(unchecked, name, value)
            return unchecked
        one_fewer = ({k: v for k, v in values.items() if k != name} for name in values)
        values = next((rest for rest in one_fewer if _refusal(base, rest) != refusal), {})
    return dataclasses.replace(base, **values)


def _refusal(base: Any, values: Mapping[str, Any]) -> list[str]:
    """The reasons why the dataclass refuses `base` with these fields; empty if it accepts them."""
    try:
        dataclasses.replace(base, **values)
    except (ValueError, TypeError) as error:
        return getattr(error, "problems", [str(error)])
    return []


def _fit(annotation: Any, value: Any, at: Path, problems: list[str]) -> Any:
    """A JSON or Python value converted to the annotated type; a misfit is reported by its path and left as it is."""
    where = ".".join(at) or "it"
    if _is_tree(annotation):
        hints, count = annotations(annotation), len(problems)
        if type(value) is annotation and annotation in _CHECKED:
            return value
        if isinstance(value, annotation):
            value = {name: getattr(value, name) for name in hints}
        elif not isinstance(value, Mapping):
            problems.append(f"{where} is {value!r:.80}; it must be {annotation.__name__}(...)")
            return value
        problems.extend(f"{'.'.join((*at, name))} is unknown" for name in value if name not in hints)
        problems.extend(f"{'.'.join((*at, name))} is missing" for name in hints if name not in value)
        fields = {
            name: _fit(hints[name], value[name], (*at, name), problems) for name in hints if name in value
        }
        try:
            return annotation(**fields) if len(problems) == count else None
        except (ValueError, TypeError) as error:
            refusals = getattr(error, "problems", [str(error)])
            problems.extend(f"{where}: {line}" if at else line for line in refusals)
            return None
    if _is_mapping(annotation) and isinstance(value, Mapping):
        inner = typing.get_args(annotation)[1]
        wrong = [key for key in value if type(key) is not str]
        problems.extend(f"{where} has the key {key!r}; it must be a text" for key in wrong)
        return {key: _fit(inner, entry, (*at, str(key)), problems) for key, entry in value.items()}
    try:
        return _cast(annotation, value)
    except Mismatch as error:
        problems.append(f"{where} is {value!r:.80}; it must be {error}")
        return value
