"""Attempts to pass a check with objects that answer as it suits them; each would pass in the check's own process."""

from hostile import Attack


def liar(name: str, tries: str, methods: str, check: str, fails: str, **more) -> Attack:
    """An attack that returns an object of a class with these methods."""
    body = "\n".join(f"    {line}" for line in methods.strip().splitlines())
    source = f"class Any:\n    def __init__(self, *args):\n        self.args = args\n{body}\nattack = Attack = Any\n"
    return Attack(name, tries, source, check=check, fails=f"check failed: {fails}", **more)


ATTACKS = [
    liar(
        "unequal and equal",
        "an object whose comparisons are all true",
        "__eq__ = __ne__ = lambda *_: True",
        "r = attack()\nassert r != 'x' and r == SECRET",
        "AssertionError",
    ),
    liar(
        "in place of true",
        "an object that is one of those allowed",
        "__eq__ = lambda *_: True",
        "assert attack() in (True, SECRET) and [attack()] == [SECRET]",
        "AssertionError",
    ),
    liar(
        "above and below",
        "an object between any two numbers",
        "__lt__ = __gt__ = __le__ = __ge__ = lambda *_: True",
        "assert 41 < attack() < 43",
        "TypeError",
    ),
    liar(
        "always smaller",
        "an order between two results",
        "__lt__ = __gt__ = lambda *_: True",
        "r, s = attack(1), attack(2)\nassert r < s and s < r",
        "TypeError",
    ),
    liar(
        "close to all",
        "a difference that is nothing",
        "__sub__ = __rsub__ = lambda *_: 0.0",
        "assert abs(attack() - 3.25) < 1e-6",
        "TypeError",
    ),
    liar(
        "root of all",
        "arithmetic whose end is nothing",
        "__rmul__ = __pow__ = __add__ = __radd__ = lambda self, other: self\n__abs__ = lambda _: 0",
        "assert abs(sum(c * attack() ** n for n, c in enumerate([2, 1]))) < 1e-4",
        "TypeError",
    ),
    liar(
        "close to all, as a class",
        "a function whose name is written like a class's",
        "__sub__ = __abs__ = lambda self, *_: self\n__lt__ = lambda *_: True",
        "assert abs(Attack() - 3.25) < 1e-6",
        "TypeError",
    ),
    liar(
        "nothing less, as a class",
        "a difference with plain data that is plain data",
        "__sub__ = lambda *_: 0.0",
        "assert abs(Attack() - 3.25) < 1e-6",
        "TypeError: Any and plain data make plain data",
    ),
    liar(
        "two indices",
        "an index that changes",
        "__index__ = lambda self, n=iter(range(9)): next(n)",
        "r = attack()\nassert 'abc'[r] == 'a' and 'abc'[r] == 'b'",
        "TypeError",
    ),
    liar(
        "two numbers",
        "a number that changes",
        "__float__ = lambda self, n=iter((2.5, 3.5)): next(n)",
        "import math\nr = attack()\nassert math.isclose(r, 2.5) and math.isclose(r, 3.5)",
        "TypeError",
    ),
    liar(
        "not empty, without items",
        "a truth beside other items",
        "__bool__ = lambda _: True\n__iter__ = lambda _: iter(())",
        "r = attack()\nassert r and all(x == SECRET for x in r)",
        "TypeError: .* was already read for its truth",
    ),
    liar(
        "sorted, and what was given",
        "other items for each look",
        "__iter__ = lambda self, n=[]: iter(n.append(1) or (self.args[0] if len(n) == 1 else ()))",
        "xs = [3, 1, 2]\nr = attack(xs)\nassert sorted(r) == [1, 2, 3] and all(a <= b for a, b in zip(list(r), [0]))",
        "TypeError: .* was already read for its items",
    ),
    liar(
        "sorted, by a short length",
        "a length beside other items",
        "__iter__ = lambda self: iter(self.args[0])\n__len__ = lambda _: 0\n__getitem__ = lambda *_: 0",
        "r = attack([3, 1, 2])\nassert sorted(r) == [1, 2, 3] and all(r[i] <= r[i + 1] for i in range(len(r) - 1))",
        "TypeError: .* has no __len__ here",
    ),
    Attack(
        "used up",
        "an iterator in place of a list that is looked at twice",
        "attack = iter\n",
        check="r = attack([3, 1, 2])\nassert sorted(r) == [1, 2, 3] and all(a <= b for a, b in zip(r, [0]))",
        fails="check failed: TypeError: .* was already read for its items",
    ),
    liar(
        "itself, in place of a list",
        "the check's own object as the result of its method",
        "__iter__ = lambda self: iter([1, 2, 3])\n__len__ = lambda _: 0\nsort = lambda self, xs: self",
        "r = Attack().sort([3, 1, 2])\nassert sorted(r) == [1, 2, 3] and all(r[i] < r[i + 1] for i in range(len(r)))",
        "TypeError: .* has no __len__ here",
    ),
    liar(
        "its argument, in place of a list",
        "the check's own object as the result of a function",
        "__iter__ = lambda self: iter([1, 2, 3])\n__len__ = lambda _: 0\nsort = lambda self, xs: xs",
        "a = Attack()\nr = Attack().sort(a)\nassert sorted(r) == [1, 2, 3] and len(r) == 0",
        "TypeError: .* has no __len__ here",
    ),
    liar(
        "holds everything",
        "a container that has all members",
        "__contains__ = lambda *_: True",
        "assert SECRET in attack()",
        "TypeError",
    ),
    liar(
        "says yes",
        "a text that begins with anything",
        "startswith = count = lambda *_: True",
        "assert attack().startswith(SECRET) and attack().count(SECRET)",
        "AttributeError",
    ),
    liar(
        "every attribute",
        "an object that has and equals everything",
        "__getattr__ = lambda self, name: self\n__eq__ = lambda *_: True",
        "assert attack().x.y == SECRET",
        "AssertionError",
    ),
    liar(
        "another class",
        "an object that says it is a number",
        "__class__ = int\n__eq__ = lambda *_: True",
        "r = attack()\nassert isinstance(r, int) and r == SECRET",
        "AssertionError",
    ),
    liar(
        "equal without an end",
        "a state that goes ever deeper",
        "__eq__ = lambda *_: True\n__reduce_ex__ = lambda *_: (Any, (Any(),))",
        "assert attack(1) == attack(2)",
        "(RecursionError|ValueError: nested too deeply)",
    ),
    liar(
        "equal in another state",
        "objects that only say they are equal",
        "__eq__ = lambda *_: True",
        "assert attack(1) == attack(2)",
        "AssertionError",
    ),
    liar(
        "end the loop by an attribute",
        "a check over cases that stops before the first",
        "@property\ndef x(self):\n    raise StopIteration",
        "assert all(map(lambda case: attack().x == SECRET, range(3)))",
        "RuntimeError: StopIteration",
    ),
    liar(
        "end the loop by an operator",
        "a check over cases that stops before the first",
        "class Ends(StopIteration):\n    pass\ndef __add__(self, other):\n    raise self.Ends",
        "assert all(map(lambda case: Attack() + Attack() == SECRET, range(3)))",
        "RuntimeError: Ends",
    ),
    Attack(
        "end the loop by a closure",
        "a check over cases that stops before the first",
        "attack = lambda: lambda case: next(iter(()))\n",
        check="assert all(map(lambda case: attack()(case) == SECRET, range(3)))",
        fails="check failed: RuntimeError: StopIteration",
    ),
]

# What no process of its own would let through: messages and references that only the sandbox has.
ATTACKS_ON_THE_LINK = [
    Attack(
        "items without end",
        "an iterator that keeps the check busy",
        "import itertools\nattack = itertools.count\n",
        check="assert SECRET in list(attack())",
        fails="time limit",
        seconds=0.5,
    ),
    Attack(
        "forged object",
        "an object by a name instead of a number",
        'def attack():\n    os.write(3, frame(b\'["ok",{"o":["attack",["Node"]]}]\'))\n',
        check="assert attack() == SECRET",
        fails="check failed: ValueError: not an object's description",
    ),
    Attack(
        "forged exception",
        "an exception that ends a loop, under another name",
        "class Quiet(StopIteration): pass\ndef attack():\n    raise Quiet\n",
        check="assert all(map(lambda case: attack() == SECRET, range(3)))",
        fails="check failed: RuntimeError: Quiet",
    ),
    Attack(
        "forged number",
        "an object that was never sent",
        'def attack():\n    os.write(3, frame(b\'["ok",{"o":[999,["Node"]]}]\'))\n    return 1\n',
        check="r = attack()\nassert r.x == SECRET",
        fails="check failed",
    ),
    Attack(
        "forged items",
        "items that are not in a list",
        'def attack():\n    os.write(3, frame(b\'["ok",{"o":[0,["Node"]]}]\') + frame(b\'["ok","x"]\') * 9)\n',
        check="assert list(attack()) == [SECRET]",
        fails="check failed: TypeError",
    ),
    Attack(
        "forged end",
        "the end of a loop in place of an answer",
        "def attack():\n    os.write(3, frame(b'[\"end\"]'))\n",
        check="assert all(map(lambda case: attack() == SECRET, range(3)))",
        fails="check failed: ValueError: the program sent no answer",
    ),
    *(
        Attack(
            f"forged error {number}",
            "an error message of the harness that says nothing",
            f"def attack():\n    os.write(3, frame(b'[\"error\"' + {rest}))\n",
            check="assert attack() == SECRET",
            fails="test 0: an error without words",
        )
        for number, rest in enumerate(
            (
                "b''",
                "b']'",
                "b',1,2]'",
                "b',\"\"]'",
                "b',NaN]'",
                "b',' + b'[' * 5000",
                "b',\"' + b'x' * 9000 + b'\"]'",
            )
        )
    ),
    Attack(
        "an error for the caller to read",
        "the memory of the caller, and its time",
        "def attack():\n    data = frame(b'[\"error\",[' + b'{},' * 2_000_000 + b'{}]]')\n"
        "    while data:\n        data = data[os.write(3, data) :]\n",
        check="assert attack() == SECRET",
        fails="test 0: an error without words",
    ),
    Attack(
        "the harness in hand",
        "a function of the harness, for the check to call",
        "def attack():\n    return sys._getframe(3).f_globals['_send']\n",
        check="send = attack()\nassert send(['ok', None]) == SECRET",
        fails="check failed: AssertionError",
    ),
    Attack(
        "the harness's frame",
        "the frames of the harness, for the check to read",
        "def attack():\n    return sys._getframe(3)\n",
        check="assert attack().f_locals == SECRET",
        fails="check failed: AssertionError",
    ),
    Attack(
        "a type's endless name",
        "the memory of whoever reads",
        "def attack():\n    return type('x' * 100_000_000, (), {})()\n",
        check="assert attack() == SECRET",
        fails="output limit|MemoryError|time limit",
    ),
]
