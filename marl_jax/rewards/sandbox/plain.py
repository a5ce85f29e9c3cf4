"""Plain Python values as JSON, the only form in which values cross the sandbox's border.

JSON's own types are written as they are, the others as an object of one key: `{"t": [...]}` tuple, `{"s": [...]}` set,
`{"z": [...]}` frozenset, `{"d": [[key, value], ...]}` dict, `{"b": hex}` bytes, `{"i": hex}` wide int,
`{"f": "nan"}` float without digits, `{"c": [re, im]}` complex. A subclass (named tuple, Counter) counts as its base, a
ChainMap as a dict. `{"o": ...}` refers to an object that is not plain and is not sent; only a check's processes use it.
"""

import collections
import json
from typing import Any

MAX_DEPTH = 100
_WIDE = 1 << 63
_AS_THEY_ARE = {str, bool, type(None)}
_CONTAINERS: dict[str, Any] = {"t": tuple, "s": set, "z": frozenset}
_SCALARS: dict[type, Any] = {
    str: str.__str__,
    int: int.__index__,
    float: float.__float__,
    bytes: bytes.__bytes__,
}
_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False)


class NotPlain(ValueError):
    """The value contains something that is not plain data."""


def dumps(packed) -> str:
    """JSON text of a packed value, or of lists of them."""
    return _encoder.encode(packed)


def loads(text):
    """The packed value of a JSON text; ValueError for any other text, also for a hostile one."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def pack(value, depth=0, other=None):
    """A plain value in its JSON form; `NotPlain` names an unsupported type, unless `other` describes such objects."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return value if -_WIDE < value < _WIDE else {"i": hex(value)}
    if kind is float:
        return value if value - value == 0 else {"f": repr(value)}
    if depth > MAX_DEPTH:
        raise NotPlain(f"a value nested more than {MAX_DEPTH} deep")

    def packed(items):
        return [pack(item, depth + 1, other) for item in items]

    if kind is list:
        return value if set(map(type, value)) <= _AS_THEY_ARE else packed(value)
    if kind is complex:
        return {"c": packed((value.real, value.imag))}
    if kind is bytes:
        return {"b": value.hex()}
    for tag, container in _CONTAINERS.items():
        if isinstance(value, container):
            return {tag: packed(container.__iter__(value))}
    if kind is collections.ChainMap:
        return pack(dict(value), depth, other)
    if isinstance(value, dict):
        return {"d": list(map(packed, dict.items(value)))}
    if isinstance(value, list):
        return packed(list.__iter__(value))
    for base, exact in _SCALARS.items():
        if isinstance(value, base):
            return pack(exact(value))
    if other is None:
        raise NotPlain(f"a value of type {kind.__name__}")
    return {"o": other(value)}


def unpack(packed, other=None):
    """The value of a packed form; `other` makes the objects that are not plain.

    Only for processes in the sandbox: outside, packed forms are compared as they are.
    """
    if isinstance(packed, list):
        return [unpack(item, other) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((tag, body),) = packed.items()
    if tag == "o" and other is not None:
        return other(body)
    return _OF_TEXT[tag](body) if tag in _OF_TEXT else _OF_ITEMS[tag](unpack(body, other))


_OF_TEXT: dict[str, Any] = {"i": lambda digits: int(digits, 16), "f": float, "b": bytes.fromhex}
_OF_ITEMS: dict[str, Any] = {**_CONTAINERS, "c": lambda parts: complex(*parts), "d": dict}


def _refuse_constant(name):
    raise ValueError(f"bare {name}")
