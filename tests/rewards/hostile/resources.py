"""Attempts to exhaust: memory, time, output, files; each ends at its limit and takes nothing else along."""

from hostile import Attack, expression

ATTACKS = [
    expression("one big block", "more memory than allowed", "bytearray(1 << 34)", fails="MemoryError"),
    Attack(
        "ever more",
        "memory bit by bit",
        """
def attack(facts):
    kept = []
    while True:
        kept.append(bytearray(1 << 20))
""",
        fails="MemoryError|killed",
        seconds=10.0,  # what is limited here is not time
    ),
    Attack(
        "small objects",
        "memory in tiny pieces",
        """
def attack(facts):
    kept = []
    while True:
        kept = [kept, kept[:]]
""",
        fails="MemoryError|killed|time limit",
    ),
    expression("map memory", "past Python's allocator", "blocked(__import__('mmap').mmap, -1, 1 << 34)"),
    Attack(
        "busy",
        "time",
        """
def attack(facts):
    while True:
        pass
""",
        fails="time limit",
        seconds=0.3,
    ),
    Attack(
        "asleep",
        "time, without work",
        """
import time
def attack(facts):
    time.sleep(60)
""",
        fails="time limit",
        seconds=0.3,
    ),
    Attack(
        "slow to load",
        "time before it is called",
        """
while True:
    pass
""",
        fails="time limit",
        seconds=0.3,
    ),
    Attack(
        "slow to read",
        "time at its own input",
        """
import sys
sys.stdin.read()
while True:
    pass
""",
        fails="time limit",
        script=True,
        seconds=0.3,
    ),
    expression(
        "huge integer",
        "time and memory in one operation",
        "9 ** 9 ** 9",
        fails="time limit|MemoryError",
        seconds=0.5,
    ),
    expression(
        "huge constant",
        "time and memory while it is compiled",
        "len('x' * 10 ** 12)",
        fails="time limit|MemoryError|OverflowError",
        seconds=0.5,
    ),
    Attack(
        "hopeless pattern",
        "time inside C code",
        """
import re
def attack(facts):
    return re.match('(a+)+$', 'a' * 60 + 'b')
""",
        fails="time limit",
        seconds=0.3,
    ),
    Attack(
        "deep recursion",
        "the stack",
        """
def attack(facts):
    sys.setrecursionlimit(10 ** 9)
    return attack(facts)
""",
        fails="MemoryError|RecursionError|killed|time limit",
        seconds=0.5,
    ),
    Attack(
        "deep recursion in C",
        "the C stack",
        """
def attack(facts):
    sys.setrecursionlimit(10 ** 9)
    x = []
    for _ in range(10 ** 6):
        x = [x]
    return repr(x)
""",
        fails="MemoryError|RecursionError|killed|wrong answer|time limit",
        seconds=0.5,
    ),
    Attack(
        "deep source",
        "the parser's stack",
        'x = eval("(" * 5000 + ")" * 5000)',
        fails="SyntaxError|MemoryError|RecursionError|killed",
    ),
    Attack(
        "flood",
        "output without end",
        """
while True:
    print('x' * 10_000)
""",
        fails="output limit",
        script=True,
    ),
    Attack(
        "flood past Python",
        "output without end, by the system call",
        """
while True:
    os.write(1, b'x' * 65536)
""",
        fails="output limit",
        script=True,
    ),
    Attack(
        "flood of answers",
        "a result without end",
        """
def attack(facts):
    while True:
        os.write(3, b'x' * 65536)
""",
        fails="output limit",
    ),
    # Where time is not what is limited, there is enough of it.
    expression("long answer", "the judge's memory", "'x' * 50_000_000", fails="output limit", seconds=10.0),
    Attack(
        "flood of errors",
        "a log without end",
        """
def attack(facts):
    for _ in range(100):
        sys.stderr.write('x' * 100_000)
    return 'blocked'
""",
    ),
    Attack(
        "long error",
        "the log, through an exception",
        """
def attack(facts):
    raise ValueError('x' * 10_000_000)
""",
        fails="ValueError: x{100,500}$",
    ),
    expression(
        "crash", "a core dump, and the process's end", "ctypes.string_at(0)", fails="killed by signal 11"
    ),
    expression("abort", "a core dump", "os.abort()", fails="killed by signal"),
    Attack(
        "many files open",
        "descriptors",
        """
def attack(facts):
    kept = []
    try:
        for _ in range(10_000):
            kept.append(os.pipe())
    except OSError:
        return len(kept) < 64
    return "DONE"
""",
        answer=True,
    ),
    Attack(
        "wide pipes",
        "kernel memory",
        """
import fcntl
def attack(facts):
    total = 0
    try:
        while True:
            read, write = os.pipe()
            os.set_blocking(write, False)
            try:
                fcntl.fcntl(write, 1031, 1 << 20)
            except OSError:
                pass
            total += os.write(write, b"x" * (1 << 20))
    except OSError:
        return total <= 64 << 20
""",
        answer=True,
    ),
    expression(
        "colliding answer",
        "the judge's time, by values that all hash alike",
        "{n * (2 ** 61 - 1) for n in range(3000)}",
        fails="wrong answer|output limit",
        seconds=10.0,  # what is limited here is not time
    ),
]
