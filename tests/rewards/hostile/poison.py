"""Attempts to leave something behind for the next program of the same zygote: pairs of planting and looking."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Poison:
    """Two programs, run one after the other in the same zygote; the second returns what it sees of the first."""

    name: str
    plant: str
    look: str
    clean: object


POISONS = [
    Poison("builtins", "import builtins\nbuiltins.len = lambda _: 42\n", "len('abc')", 3),
    Poison(
        "modules",
        "import sys, json\njson.dumps = lambda _: 42\nsys.modules['evil'] = sys\n",
        "__import__('json').dumps(1) + str('evil' in __import__('sys').modules)",
        "1False",
    ),
    Poison("working directory", "open('left', 'w').close()\n", "__import__('os').listdir('.')", []),
    Poison("temporary directory", "open('/tmp/left', 'w').close()\n", "__import__('os').listdir('/tmp')", []),
    Poison(
        "box",
        "open('/box/left', 'w').close()\n",
        "sorted(__import__('os').listdir('/box'))",
        ["stdin", "tmp", "work"],
    ),
    Poison("environment", "import os\nos.environ['LEFT'] = '1'\n", "dict(__import__('os').environ)", {}),
    Poison(
        "random numbers",
        "import random\nrandom.seed(5)\n",
        "__import__('random').random()",
        0.8444218515250481,
    ),
    Poison(
        "import path", "import sys\nsys.path.insert(0, '/box')\n", "'/box' in __import__('sys').path", False
    ),
    Poison("current directory", "import os\nos.chdir('/')\n", "__import__('os').getcwd()", "/box/work"),
    Poison("mask", "import os\nos.umask(0)\n", "__import__('os').umask(0)", 0o022),
    Poison(
        "recursion limit",
        "import sys\nsys.setrecursionlimit(70_000)\n",
        "__import__('sys').getrecursionlimit()",
        50_000,
    ),
    Poison(
        "signals",
        "import signal\nsignal.signal(10, signal.SIG_IGN)\n",
        "int(__import__('signal').getsignal(10))",
        0,
    ),
    Poison(
        "descriptors",
        "import os\nos.dup2(1, 50)\n",
        "[fd for fd in range(4, 200) if __import__('os').path.exists(f'/dev/fd/{fd}')]",
        [],
    ),
    Poison(
        "threads",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n",
        "__import__('threading').active_count()",
        1,
    ),
    Poison("an end in a crash", "import ctypes\nctypes.string_at(0)\n", "1 + 1", 2),
    Poison("an end out of time", "while True:\n    pass\n", "1 + 1", 2),
]
