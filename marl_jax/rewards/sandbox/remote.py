"""Objects of the program in test code: they stay in the program's process, and a `Remote` stands for each.

    test code ── Remote ── Link ──(plain data, and numbers for objects)── Table ── the program's objects

The program answers every operation on a `Remote`, and it may lie. A lie must gain no more than wrong plain data would,
which cannot change between two reads. So a comparison with plain data never asks the program, and only the check's own
objects support all operations: those that it makes by calling a name written like a class's, `Stack()`, and the results
of operators on them. Any other object may have been returned in place of plain data. It has only attributes that plain
data does not have, it can be called, awaited and passed back, and its items can be read once. Exceptions of the program
are raised again, with their plain attributes, as instances of classes of the same names.
"""

import ast
import builtins
import contextlib
import dataclasses
import functools
import math
import operator
import re
import threading
import types
from typing import Any

import plain

_CLASS_NAME = re.compile(r"_?[A-Z][A-Za-z0-9]*")
_PLAIN_TYPES = (str, bytes, int, float, complex, list, tuple, dict, set)
_PLAIN_NAMES = {name for kind in _PLAIN_TYPES for name in dir(kind)}
# Raised by `f`, they would end `all(map(f, cases))` early, as true.
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)
_IDENTITY, _EXCEPTION = "<identity>", "<exception>"  # names that test code cannot have
_EXPECTING = ("assertRaises", "assertRaisesRegex")  # methods whose first argument is a class of exceptions
_END = object()


class Table:
    """The program's side: the objects that the check refers to, by number; `find` looks up names."""

    def __init__(self, find):
        self._find = find
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}  # by identity: the list keeps the objects alive

    def answer(self, operation, args, kwargs):
        """Perform an operation for the check; returns the packed result."""
        args, kwargs = plain.unpack(args, self._object), plain.unpack(kwargs, self._object)
        value = _OPERATIONS[operation](*args, **kwargs)
        # A named tuple that the check makes stays an object, so that its field names work.
        if operation == "call" and type(value) is args[0] and args[0].__module__ == "solution":
            return {"o": self._described(value)}
        return plain.pack(value, other=self._described)

    def _described(self, value):
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return [number, [kind.__name__ for kind in type(value).__mro__]]

    def _object(self, key):
        if isinstance(key, list):
            return slice(*key)
        return self._find(key) if isinstance(key, str) else self._objects[key]


def described(error):
    """The parts of an exception that the check needs: names of its classes, text, arguments and plain attributes."""
    try:
        text = str(error)
    except Exception:
        text = ""
    try:
        args = plain.pack(list(error.args))
    except plain.NotPlain:
        args = [text]
    attributes = {}
    for name, value in vars(error).items():
        with contextlib.suppress(plain.NotPlain):
            attributes[name] = plain.unpack(plain.pack(value))
    return [kind.__name__ for kind in type(error).__mro__], text, args, plain.pack(attributes)


def _next(iterator):
    """The next item in a list, or an empty list at the end. No exception, because any function can raise one."""
    item = next(iterator, _END)
    return [] if item is _END else [item]


def _state(value):
    """The state from which a copy of the object would be made."""
    parts = value.__reduce_ex__(4)
    return [list(part) if hasattr(part, "__next__") else part for part in parts]


def _leave(manager, error=None):
    """Leave a `with` block of test code, with `error` = (names of its classes, text) or without."""
    names, text = error or ((), "")
    raised: Any = None
    for name in names:
        # Fails for a class of the test code, and for one that takes other arguments.
        with contextlib.suppress(AttributeError, TypeError):
            raised = raised or getattr(builtins, name)(text)
    manager.__exit__(raised and type(raised), raised, None)


def _await(coroutine):
    import asyncio  # slow to import

    async def awaited():
        return await coroutine

    return asyncio.run(awaited())


_ORDER = ("__lt__", "__le__", "__gt__", "__ge__")
_UNARY = ("__neg__", "__pos__", "__abs__", "__invert__")
_BINARY = [
    *("__add__", "__sub__", "__mul__", "__matmul__", "__truediv__", "__floordiv__", "__mod__", "__pow__"),
    *("__lshift__", "__rshift__", "__and__", "__xor__", "__or__"),
]
_IN_PLACE = [f"__i{name[2:]}" for name in _BINARY]
_ITEMS = ("__getitem__", "__setitem__", "__delitem__", "__contains__")
_CONVERSIONS = (
    *(len, str, repr, round, format, int, float, complex, bytes, reversed),
    *(math.floor, math.ceil, math.trunc, operator.index),
)
_OWN_ONLY: dict[str, Any] = {
    **{f"__{function.__name__}__": function for function in _CONVERSIONS},
    **{name: getattr(operator, name) for name in (*_ITEMS, *_UNARY)},
}
_OPERATIONS: dict[str, Any] = {
    **{"call": operator.call, "state": _state, "await": _await},
    **{"getattr": getattr, "setattr": setattr, "__delattr__": delattr},
    **{"__bool__": bool, "__iter__": iter, "__next__": _next, "__eq__": operator.eq},
    **{"__enter__": lambda manager: manager.__enter__(), "__exit__": _leave},
    **{name: getattr(operator, name) for name in (*_ORDER, *_BINARY, *_IN_PLACE)},
    **_OWN_ONLY,
}


def identified(source):
    """Test code as a tree in which `is` compares the program's objects, because each answer makes a new `Remote`.

    Where the code expects a class of exceptions, a stand-in replaces each class of the program.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Compare() if any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
                node.left, *node.comparators = (
                    _within(_IDENTITY, it) for it in (node.left, *node.comparators)
                )
            case ast.ExceptHandler(type=ast.expr()):
                node.type = _within(_EXCEPTION, node.type)
            case ast.Call(func=ast.Attribute(attr=name), args=[first, *rest]) if name in _EXPECTING:
                node.args = [first if isinstance(first, ast.Starred) else _within(_EXCEPTION, first), *rest]
    return tree


def _within(name, operand):
    call = ast.Call(ast.copy_location(ast.Name(name, ast.Load()), operand), [operand], [])
    return ast.copy_location(call, operand)


class Link:
    """The check's side; `exchange` sends a message and returns the answer to it."""

    def __init__(self, exchange):
        self._exchange = exchange
        self._identities: dict[Any, Remote] = {}
        self._exceptions: dict[str, type[Exception]] = {}  # stand-ins for classes of the program
        self._coroutines: dict[Any, Remote] = {}  # stand-ins for coroutines of the program
        self._comparing = threading.local()

    @property
    def equal(self):
        """Pairs found or assumed equal while one comparison lasts."""
        return vars(self._comparing).setdefault("equal", set())

    def named(self, name):
        """The program's function or class of that name."""
        return Remote(_Facts(self, name, ["type"], own=True))

    def ask(self, operation, /, *args, **kwargs):
        """Have the program perform the operation; returns its result, or raises its exception as `_raised` makes it."""
        return plain.unpack(self._answer(operation, args, kwargs), self._remote)

    def make(self, operation, /, *args, **kwargs):
        """`ask`, and mark a returned object as the check's own."""
        value = self.ask(operation, *args, **kwargs)
        if type(value) is Remote:
            value._remote_.own = True
        return value

    def helpers(self):
        """Names that test code gets in addition to those of the program."""
        own_id = lambda value: id(self._identity(value))
        return {_IDENTITY: self._identity, _EXCEPTION: self._exception, "id": own_id}

    def exception(self, name):
        """The stand-in for the program's class of exceptions of this name."""
        return self._exceptions.setdefault(name, type(name, (Exception,), {}))

    def _exception(self, kind):
        if isinstance(kind, tuple):
            kinds = map(self._exception, kind)
            return sum((one if isinstance(one, tuple) else (one,) for one in kinds), ())
        if isinstance(kind, type) and kind.__module__ not in ("builtins", "__main__"):
            return kind, self.exception(kind.__name__)  # of the standard library, as json.JSONDecodeError
        named = type(kind) is Remote and isinstance(kind._remote_.key, str)
        return self.exception(kind._remote_.key) if named else kind

    def _identity(self, value):
        return self._identities.setdefault(value._remote_.key, value) if type(value) is Remote else value

    def _answer(self, operation, args, kwargs):
        packed = plain.pack(list(args), other=self._key), plain.pack(kwargs, other=self._key)
        match self._exchange(["ask", operation, *packed]):
            case ["ok", body]:
                return body
            case ["raise", names, text, args, attributes]:
                raise self._raised(names, text, args, attributes)
        raise ValueError("the program sent no answer")

    def _raised(self, names, text, args, attributes):
        """The program's exception: of its first builtin class, and of a stand-in for each class before that one."""
        candidates = (getattr(builtins, str(name), None) for name in names)
        builtin = (
            (at, it) for at, it in enumerate(candidates) if isinstance(it, type) and issubclass(it, Exception)
        )
        count, kind = next(builtin, (0, StopIteration))
        if issubclass(kind, _ENDS_LOOPS):
            return RuntimeError(f"{names[0]}: {text}".removesuffix(": "))
        if own := [self.exception(str(name)) for name in names[:count]]:
            kind = type(own[0].__name__, (*own, kind), {"__str__": lambda error: text})
        try:
            error = kind(*plain.unpack(args))
        except TypeError:  # its constructor takes other arguments than `args`
            error = type(kind.__name__, (*own, Exception), {})(text)
        vars(error).update(plain.unpack(attributes))
        return error

    def _remote(self, body):
        number, kinds = body
        if type(number) is not int or not kinds or any(type(kind) is not str for kind in kinds):
            raise ValueError("not an object's description")
        value = Remote(_Facts(self, number, kinds))
        if kinds[0] != "coroutine":
            return value
        coroutine = self._awaited(value)
        self._coroutines[coroutine] = value
        return coroutine

    async def _awaited(self, coroutine):
        return self.ask("await", coroutine)

    def _key(self, value):
        """The key by which the program finds an object."""
        if type(value) is slice:
            return [value.start, value.stop, value.step]
        if isinstance(value, types.CoroutineType):
            value = self._coroutines.get(value, value)
        if type(value) is not Remote:
            raise plain.NotPlain(f"a value of type {type(value).__name__}")
        return value._remote_.key


@dataclasses.dataclass
class _Facts:
    link: Link
    key: int | str
    kinds: list[str]  # the names of its type and of that type's bases
    own: bool = False  # the check's own object, which supports all operations
    used: str = ""  # "truth" or "items": how it was read, if it is not the check's own


class Remote:
    """An object of the program."""

    __slots__ = ("_remote_",)

    def __init__(self, facts):
        object.__setattr__(self, "_remote_", facts)

    def __getattr__(self, name):
        facts = self._remote_
        if name == "__name__" and isinstance(facts.key, str):
            return facts.key
        if (name in _PLAIN_NAMES and not facts.own) or name[:2] == name[-2:] == "__":
            raise AttributeError(f"an object of the program, {facts.kinds[0]}, shows no {name} here")
        return facts.link.ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._remote_.link.ask("setattr", self, name, value)

    def __call__(self, /, *args, **kwargs):
        facts = self._remote_
        makes = isinstance(facts.key, str) and _CLASS_NAME.fullmatch(facts.key)
        return (facts.link.make if makes else facts.link.ask)("call", self, *args, **kwargs)

    def __instancecheck__(self, value):
        if isinstance(value, BaseException):
            return isinstance(value, self._remote_.link.exception(self._remote_.key))
        return type(value) is Remote and self._remote_.key in value._remote_.kinds

    def __hash__(self):
        return hash(self._remote_.kinds[0])  # equal objects have one type; the program is not asked

    def __delattr__(self, name):
        self._remote_.link.ask("__delattr__", self, name)

    def __enter__(self):
        facts = self._remote_
        if not facts.own:
            raise TypeError(f"an object of the program, {facts.kinds[0]}, has no __enter__ here")
        value = facts.link.ask("__enter__", self)
        return self if type(value) is Remote and value._remote_.key == facts.key else value

    def __exit__(self, kind, error, trace):
        """Exit the program's object. Unlike in Python, it cannot hide an error of the test code or replace it."""
        link = self._remote_.link
        if kind is None:
            link.ask("__exit__", self)
            return
        with contextlib.suppress(Exception):
            link.ask("__exit__", self, [[base.__name__ for base in kind.__mro__], str(error)])

    def __eq__(self, other):
        """Equal if they are one object, or if type and state are equal and the program's `==` agrees."""
        if type(other) is not Remote:
            return NotImplemented
        ours, theirs = self._remote_, other._remote_
        if ours.key == theirs.key:
            return True
        pair, link = (ours.key, theirs.key), ours.link
        if pair in link.equal:
            return True
        outermost = not link.equal
        if ours.kinds[0] != theirs.kinds[0] or (outermost and link.ask("__eq__", self, other) is not True):
            return False
        link.equal.add(pair)
        same = False
        try:
            same = link.ask("state", self) == link.ask("state", other)
        finally:
            link.equal.clear() if outermost else same or link.equal.discard(pair)
        return same

    def __bool__(self):
        facts = self._remote_
        if facts.own:
            return facts.link.ask("__bool__", self)
        _read_as("truth", facts, before=("", "truth"))
        return True

    def __iter__(self):
        facts = self._remote_
        if not facts.own:
            _read_as("items", facts, before=("",))
        items = facts.link.ask("__iter__", self)
        return iter(functools.partial(next, items, _END), _END)

    def __next__(self):
        items = self._remote_.link.ask("__next__", self)
        if type(items) is not list:
            raise TypeError("not an item")
        for item in items:
            return item
        raise StopIteration

    def __reduce_ex__(self, protocol):
        raise TypeError("an object of the program cannot be copied here")


def _read_as(use, facts, before):
    if facts.used not in before:
        raise TypeError(f"an object of the program, {facts.kinds[0]}, was already read for its {facts.used}")
    facts.used = use


def _own_only(operation):
    def method(self, *args):
        facts = self._remote_
        if facts.own:
            return (facts.link.make if operation in _UNARY else facts.link.ask)(operation, self, *args)
        if operation in ("__str__", "__repr__", "__format__"):
            return "<object of the program>"
        if operation == "__bytes__":
            return bytes([*self])
        raise TypeError(f"an object of the program, {facts.kinds[0]}, has no {operation} here")

    return method


def _ordering(operation):
    def method(self, other):
        if type(other) is not Remote or not (self._remote_.own and other._remote_.own):
            return NotImplemented
        return self._remote_.link.ask(operation, self, other) is True

    return method


def _arithmetic(operation, swapped=False):
    def method(self, other):
        facts = self._remote_
        if not facts.own:
            return NotImplemented
        operands = (other, self) if swapped else (self, other)
        value = (facts.link.make if type(other) is Remote else facts.link.ask)(operation, *operands)
        if type(value) is Remote:  # `a += b` may return `a`
            return self if operation in _IN_PLACE and value._remote_.key == facts.key else value
        if type(other) is not Remote:  # `abs(F(3) - 1.5) < 1e-6` would be true whatever F is
            raise TypeError(f"{facts.kinds[0]} and plain data make plain data")
        return value

    return method


for _name in _OWN_ONLY:
    setattr(Remote, _name, _own_only(_name))
for _name in _ORDER:
    setattr(Remote, _name, _ordering(_name))
for _name in (*_BINARY, *_IN_PLACE):
    setattr(Remote, _name, _arithmetic(_name))
for _name in _BINARY:
    setattr(Remote, f"__r{_name[2:]}", _arithmetic(_name, swapped=True))
