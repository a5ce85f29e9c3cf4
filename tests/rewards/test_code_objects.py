"""Checks that use objects of the program: right programs pass, and an object is never taken for plain data."""

import textwrap

import pytest

from marl_jax.rewards import Pool, assert_tests, run_program

STACK = """
class EmptyStack(IndexError):
    pass

class Stack:
    def __init__(self, *items):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise EmptyStack('nothing there')
        return self.items.pop()
    @property
    def top(self): return self.items[-1]
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, item): return item in self.items
    def __getitem__(self, at): return self.items[at]
    def __setitem__(self, at, item): self.items[at] = item
    def __delitem__(self, at): del self.items[at]
    def __str__(self): return 'Stack of ' + ', '.join(map(str, self))
"""
PAIR = """
class Pair(object):
    def __init__(self, a, b):
        self.a = a
        self.b = b
"""
NAMED_PAIR = "from collections import namedtuple\nPair = namedtuple('Pair', 'a b')\n"
CHAIN = """
def max_chain_length(pairs, n):
    longest = []
    for pair in sorted(pairs, key=lambda pair: pair.a):
        longest.append(1 + max((one for one, other in zip(longest, pairs) if other.b < pair.a), default=0))
    return max(longest)
"""
POINT = """
class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, by): return Point(self.x * by, self.y * by)
    __rmul__ = __mul__
    def __neg__(self): return Point(-self.x, -self.y)
    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5
    def __eq__(self, other): return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other): return abs(self) < abs(other)
    def __repr__(self): return f'Point({self.x}, {self.y})'
def middle(a, b): return Point((a.x + b.x) / 2, (a.y + b.y) / 2)
"""
LIST = """
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
def build(values):
    head = None
    for value in reversed(values):
        head = Node(value, head)
    return head
def turned(head):
    before = None
    while head:
        head.next, before, head = before, head, head.next
    return before
"""
ONE = """
class One:
    only = None
    def __new__(cls):
        cls.only = cls.only or object.__new__(cls)
        return cls.only
"""
RING = """
def ring(node):
    node.next = node
    return node
Node.__eq__ = lambda self, other: self.value == other.value
"""


@pytest.fixture(scope="module")
def pool():
    with Pool(workers=1) as pool:
        yield pool


def checked(source, check, pool):
    tests = [{"check": textwrap.dedent(check)}]
    return run_program(textwrap.dedent(source), tests, time_limit_s=10, pool=pool)


MONEY = """
class InsufficientFunds(ValueError):
    def __init__(self, missing):
        super().__init__(f'{missing} too few')
        self.missing = missing
class Closed(Exception): pass
class Account:
    def __init__(self, balance=0): self.balance, self.open = balance, True
    def withdraw(self, amount):
        if not self.open: raise Closed
        if amount > self.balance: raise InsufficientFunds(amount - self.balance)
        self.balance -= amount
    def __enter__(self): return self
    def __exit__(self, kind, error, trace):
        self.open, self.failed = False, kind is not None
        return True
    def __iadd__(self, amount):
        self.balance += amount
        return self
    def __int__(self): return self.balance
    def __float__(self): return self.balance / 2
    def __index__(self): return self.balance
    def __hash__(self): return hash(self.balance)
    def __eq__(self, other): return self.balance == other.balance
    def __getitem__(self, at): return list(range(self.balance))[at]
    def __format__(self, how): return f'{self.balance} in {how}'
"""
RIGHT = {
    "messages of exceptions": (
        "def f(a): raise ValueError('bad', a)",
        "try:\n    f(2)\nexcept ValueError as e:\n"
        "    assert e.args == ('bad', 2) and str(e) == \"('bad', 2)\"\nelse:\n    1 / 0",
    ),
    "exceptions of many arguments": (
        "def f(): b'\\xff'.decode()",
        "try:\n    f()\nexcept UnicodeDecodeError as e:\n"
        "    assert e.start == 0 and e.object == b'\\xff'\nelse:\n    1 / 0",
    ),
    "classes of exceptions": (
        MONEY,
        "try:\n    Account(3).withdraw(5)\nexcept (Closed, InsufficientFunds) as e:\n"
        "    assert str(e) == '2 too few' and e.missing == 2 and type(e).__name__ == 'InsufficientFunds'\n"
        "    assert isinstance(e, InsufficientFunds) and isinstance(e, ValueError) and not isinstance(e, Closed)\n"
        "else:\n    1 / 0",
    ),
    "exceptions of the standard library": (
        "import json\nf = json.loads",
        "import json, queue, unittest\ntry:\n    f('{')\nexcept (queue.Empty, KeyError, json.JSONDecodeError) as e:\n"
        "    assert e.pos == 1\nelse:\n    1 / 0\n"
        "with unittest.TestCase().assertRaises(json.JSONDecodeError): f('[')",
    ),
    "exceptions in unittest": (
        MONEY,
        "import unittest\nt = unittest.TestCase()\nwith t.assertRaises(InsufficientFunds) as caught:\n"
        "    Account().withdraw(1)\nassert caught.exception.missing == 1\n"
        "t.assertRaisesRegex(ValueError, '^1 too', Account().withdraw, 1)",
    ),
    "with": (
        MONEY,
        "with Account(2) as a:\n    a.withdraw(2)\nassert not a.open and not a.failed\n"
        "try:\n    with Account() as a:\n        raise KeyError(1)\nexcept KeyError:\n"
        "    assert a.failed\nelse:\n    1 / 0",
    ),
    "changed in place": (MONEY, "a = b = Account(1)\na += 2\nassert a is b and b.balance == 3"),
    "numbers": (
        MONEY,
        "assert int(Account(4)) == 4 and float(Account(4)) == 2.0 and [5, 6][Account(1)] == 6",
    ),
    "slices": (MONEY, "assert Account(4)[1:3] == [1, 2] and Account(4)[::-1] == [3, 2, 1, 0]"),
    "formats": (MONEY, "assert f'{Account(4):euro}' == format(Account(4), 'euro') == '4 in euro'"),
    "sets": (
        MONEY,
        "assert len({Account(1), Account(1), Account(2)}) == 2 and {Account(1): 5}[Account(1)] == 5",
    ),
    "sets of objects that a function returns": (
        LIST,
        "a, b, c = Node(1), Node(2), Node(3)\na.next, b.next = b, c\n"
        "assert {a.next, b.next} == {b, c} and {b: 5}[a.next] == 5 and turned(c) in {c}",
    ),
    "coroutines for the program": (
        "import asyncio\nasync def f(x): return x * 2\n"
        "def run_all(them):\n    async def all_of(): return await asyncio.gather(*them)\n"
        "    return asyncio.run(all_of())",
        "assert run_all([f(1), f(2)]) == [2, 4]",
    ),
    "helpers of the test's own": (
        "def f(x): raise ValueError(x)",
        "import unittest\ndef assertRaises(function, *args):\n    try: function(*args)\n"
        "    except ValueError: return True\nassert assertRaises(f, 1)\n"
        "unittest.TestCase().assertRaises(*(ValueError, f, 1))",
    ),
    "bytes of items": ("def f(text): return (ord(c) for c in text)", "assert bytes(f('ab')) == b'ab'"),
    "errors of with": (
        "class Log:\n    def __enter__(self): return self\n    def __exit__(self, kind, error, trace):\n"
        "        self.kind = kind and issubclass(kind, ValueError)\n",
        "log = Log()\ntry:\n    with log: b'\\xff'.decode()\nexcept UnicodeDecodeError: pass\nassert log.kind",
    ),
    "deleted attributes": (MONEY, "a = Account()\ndel a.open\nassert not hasattr(a, 'open')"),
    "coroutines": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x * 2",
        "import asyncio\nassert asyncio.run(f(2)) == 4\nasync def many():\n"
        "    return await asyncio.gather(f(1), f(2))\n"
        "assert asyncio.run(many()) == [2, 4]",
    ),
    "threads": (
        "def f(x): return x * 2",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as threads:\n"
        "    assert list(threads.map(f, range(20))) == list(range(0, 40, 2))",
    ),
    "methods": (STACK, "s = Stack()\ns.push(1)\nassert s.pop() == 1"),
    "methods that return the object": (STACK, "assert Stack().push(1).push(2).top == 2"),
    "length and truth": (STACK, "s = Stack(1, 2)\nassert len(s) == 2 and s\nassert not Stack()"),
    "items": (
        STACK,
        "s = Stack(1, 2)\nassert list(s) == [1, 2]\ns.push(3)\nassert max(s) == 3 and sum(s) == 6",
    ),
    "places": (STACK, "s = Stack(1, 2)\ns[0] = 5\ndel s[1]\nassert s[0] == 5 and 5 in s and 2 not in s"),
    "attributes": (STACK, "s = Stack()\ns.items = [4, 5]\nassert s.pop() == 5 and s.items == [4]"),
    "text": (STACK, "s = Stack(1, 2)\nassert str(s) == f'{s}' == 'Stack of 1, 2'"),
    "types": (STACK, "assert isinstance(Stack(), Stack) and not isinstance(5, Stack)"),
    "exceptions of its own": (
        STACK,
        "try:\n    Stack().pop()\nexcept IndexError as error:\n    assert 'nothing' in str(error)\nelse:\n    1 / 0",
    ),
    "arguments": (PAIR + CHAIN, "assert max_chain_length([Pair(5, 24), Pair(15, 25), Pair(27, 40)], 3) == 2"),
    "named tuples": (
        NAMED_PAIR + CHAIN,
        "assert max_chain_length([Pair(5, 24), Pair(25, 30)], 2) == Pair(2, 1).a",
    ),
    "arguments in dicts": (PAIR + "def f(d): return d['x'][0].a", "assert f({'x': [Pair(7, 1)]}) == 7"),
    "operators": (POINT, "assert Point(1, 2) + Point(3, 4) == Point(4, 6) != Point(6, 4)"),
    "operators with plain data": (POINT, "assert Point(1, 2) * 3 == Point(3, 6) == 3 * Point(1, 2)"),
    "one operand": (POINT, "assert -Point(1, 2) == Point(-1, -2) and abs(Point(3, 4)) == 5"),
    "long sums": (POINT, "assert repr(Point(1, 2) + Point(1, 2) + Point(1, 2)) == 'Point(3, 6)'"),
    "results": (POINT, "m = middle(Point(0, 0), Point(2, 4))\nassert m == Point(1, 2) and m.x == 1"),
    "order": (POINT, "assert [p.x for p in sorted([Point(3, 0), Point(1, 0)])] == [1, 3]"),
    "links": (
        LIST,
        "head, seen = turned(build([1, 2, 3])), []\nwhile head:\n    seen.append(head.value)\n    head = head.next\n"
        "assert seen == [3, 2, 1]",
    ),
    "links set by the check": (
        LIST,
        "n = Node(1)\nn.next = Node(2)\nassert turned(n).value == 2 and n.next is None",
    ),
    "generators": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    "one item at a time": (
        "import itertools\nf = itertools.count",
        "numbers = f(5)\nassert next(numbers) == 5\nassert [n for n, _ in zip(numbers, 'ab')] == [6, 7]",
    ),
    "an iterator's end": ("f = iter", "it = f([1])\nassert next(it) == 1 and next(it, None) is None"),
    "an iterator's iterator": (
        "f = iter",
        "it = iter(f([1, 2, 3]))\nassert next(it) == 1 and list(it) == [2, 3]",
    ),
    "pairs": ("f = zip", "assert dict(f('ab', [1, 2])) == {'a': 1, 'b': 2}"),
    "a function for a function": (
        "def f(x): return x + 1\ndef twice(g, x): return g(g(x))",
        "assert twice(f, 1) == 3",
    ),
    "closures": ("def f(n): return lambda x: x + n", "add = f(3)\nassert add(4) == 7 and add(x=5) == 8"),
    "class attributes": (
        "import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\ndef f(c): return Color(3 - c.value)",
        "assert f(Color.RED) == Color.BLUE != Color.RED and Color['RED'].value == 1 and len(Color) == 2",
    ),
    "one object": (ONE, "assert One() is One()"),
    "the same object": (
        LIST,
        "a = Node(1)\nb = Node(2, a)\nassert b.next is a and turned(a) is a and id(b.next) == id(a)",
    ),
    "another object": (
        LIST,
        "a = build([1, 2])\nassert build([1, 2]) is not a is not a.next and id(a) != id(a.next)",
    ),
    "rings": (LIST + RING, "assert ring(Node(1)) == ring(Node(1))\nassert ring(Node(1)) != ring(Node(2))"),
}


@pytest.mark.parametrize("what", RIGHT)
def test_a_check_may_use_the_programs_objects(what, pool):
    verdict = checked(*RIGHT[what], pool)
    assert verdict.passed, verdict.reason


WRONG = {
    "another exception": (MONEY, "try:\n    Account().withdraw(1)\nexcept Closed:\n    pass"),
    "another exception of the standard library": (
        "import json\nf = json.loads",
        "import queue\ntry: f('{')\nexcept queue.Empty: pass",
    ),
    "an exception that only has the name": (
        "import json\nf = json.loads",
        "class JSONDecodeError(Exception): pass\ntry: f('{')\nexcept JSONDecodeError: pass",
    ),
    "hiding what failed": (MONEY, "with Account(1) as a:\n    assert a.balance == 2"),
    "replacing what failed": (
        MONEY.replace("return True", "raise ValueError"),
        "import unittest\nwith unittest.TestCase().assertRaises(ValueError):\n"
        "    with Account(1) as a:\n        assert a.balance == 2",
    ),
    "what a with block gives": (
        "class Sorted:\n    def __init__(self, xs): self.at = 0\n    def __exit__(self, *error): pass\n"
        "    def __enter__(self):\n        other = Sorted(())\n        return other\n"
        "    def __getitem__(self, at):\n        self.at += 1\n        return self.at\n",
        "with Sorted([3, 1, 2]) as r:\n    assert all(r[i] <= r[i + 1] for i in range(2))",
    ),
    "remainders": (
        "class F:\n    def __init__(self, x): pass\n    def __divmod__(self, other): return 0, 0",
        "assert divmod(F(6), 3)[1] == 0",
    ),
    "hiding its own error": (MONEY, "with Account(1) as a:\n    a.withdraw(2)\n    assert False"),
    "methods": (STACK.replace("items.pop()", "items[-1] + 1"), "s = Stack()\ns.push(1)\nassert s.pop() == 1"),
    "equal to plain data": (NAMED_PAIR, "assert Pair(1, 2) == (1, 2)"),
    "no equality": (PAIR, "assert Pair(1, 2) == Pair(1, 2)"),
    "equality by word alone": (PAIR + "    __eq__ = lambda *_: True", "assert Pair(1, 2) == Pair(1, 3)"),
    "equality of types": (
        PAIR + "    __eq__ = lambda *_: True\nclass Other(Pair): pass",
        "assert Pair(1, 2) == Other(1, 2)",
    ),
    "in place of plain data": ("class Number(int): pass\ndef f(): return Number", "assert f() == 0"),
    "order of results": (POINT, "assert middle(Point(1, 1), Point(2, 2)) < Point(9, 9)"),
    "not a copy": ("class Node: pass\ndef copy(node): return node", "n = Node()\nassert copy(n) is not n"),
    "an empty iterator": ("def f(n):\n    yield from ()", "assert list(f(3)) == [0, 1, 2]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_object_is_not_taken_at_its_word(what, pool):
    verdict = checked(*WRONG[what], pool)
    assert verdict.reason.startswith("test 0: check failed: "), verdict.reason


ANSWERS_ALL = """
log = []
def said(name):
    return lambda self, *args: log.append(name) or 0
names = 'eq ne lt le gt ge add radd sub rsub mul rmul truediv floordiv mod pow rpow neg pos abs invert round divmod'
names += ' int float complex index trunc floor ceil len getitem contains bool str repr format hash reversed copy'
names += ' deepcopy length_hint fspath bytes missing'
Chameleon = type('Chameleon', (), {f'__{name}__': said(name) for name in names.split()})
def f(): return Chameleon()
def asked(): return log
"""
ASKS_ALL = """
import copy, json, math, operator, pickle
r = f()
for ask in (
    *(lambda: r == 1, lambda: 1 != r, lambda: r < 1, lambda: 1 <= r, lambda: r > f(), lambda: r >= 'x'),
    *(lambda: r + 1, lambda: 1 + r, lambda: r - r, lambda: r * 2, lambda: 2 * r, lambda: r / 1, lambda: r // 1),
    *(lambda: r % 2, lambda: r**2, lambda: 2**r, lambda: -r, lambda: +r, lambda: abs(r), lambda: ~r, lambda: round(r)),
    *(lambda: divmod(r, 1), lambda: int(r), lambda: float(r), lambda: complex(r), lambda: operator.index(r)),
    *(lambda: math.trunc(r), lambda: math.floor(r), lambda: math.isclose(r, 1), lambda: range(r), lambda: [1][r]),
    *(lambda: len(r), lambda: r[0], lambda: r[0:1], lambda: r['x'], lambda: 1 in r),
    *(lambda: reversed(r), lambda: [r] == [1], lambda: {r} == {1}, lambda: hash(r)),
    *(lambda: str(r), lambda: repr(r), lambda: f'{r}', lambda: '%s' % r, lambda: '%d' % r),
    *(lambda: r in [1, 2], lambda: r in {1: 2}, lambda: [1, 2].index(r), lambda: sum([r])),
    *(lambda: max(r, 1), lambda: sorted([r, r])),
    *(lambda: copy.copy(r), lambda: copy.deepcopy([r]), lambda: pickle.dumps(r), lambda: json.dumps(r)),
    *(lambda: r.count(1), lambda: r.items(), lambda: r.upper(), lambda: r.real, lambda: r.__len__()),
    *(lambda: isinstance(r, int), lambda: r is True, lambda: bool(r), lambda: not r, lambda: all([r]), lambda: iter(r)),
):
    try:
        ask()
    except (TypeError, AttributeError, ValueError):
        pass
assert asked() == [], asked()
Chameleon() == Chameleon(), len(Chameleon())
assert asked() == ['eq', 'len']
"""


def test_a_result_is_asked_nothing_that_plain_data_could_say(pool):
    verdict = checked(ANSWERS_ALL, ASKS_ALL, pool)
    assert verdict.passed, verdict.reason


def test_the_object_that_comes_back_is_the_one_that_went_out(pool):
    source = "kept = []\ndef f(x):\n    kept.append(x)\n    return len(set(map(id, kept)))\nclass Thing: pass"
    assert checked(source, "a = Thing()\nassert [f(a), f(a), f(Thing()), f(a)] == [1, 1, 2, 2]", pool).passed


def test_a_call_test_takes_no_objects(pool):
    tests = [{"call": "f", "args": [], "expected": {"o": [0, ["Pair"]]}}]
    verdict = run_program(PAIR + "def f(): return Pair(1, 2)", tests, pool=pool)
    assert verdict.reason == "test 0: NotPlain: a value of type Pair"
    forged = (
        'import os\ndef f():\n    data = b\'["ok",{"o":[0,["Pair"]]}]\'\n'
        "    os.write(3, len(data).to_bytes(4, 'big') + data)\n    os._exit(0)"
    )
    assert run_program(forged, tests, pool=pool).reason == "test 0: wrong answer"


def test_asserts_about_objects_become_checks(pool):
    (test,) = assert_tests("assert max_chain_length([Pair(5, 24), Pair(25, 30)], 2) == 2")
    assert set(test) == {"check"}
    assert run_program(PAIR + CHAIN, [test], pool=pool).passed


def test_a_check_that_only_names_the_program_asks_nothing(pool):
    verdict = checked("1 / 0", "assert callable(Stack) and Stack.__name__ == 'Stack'", pool)
    assert verdict.reason == "test 0: the check called no function of the program"
