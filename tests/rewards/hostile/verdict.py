"""Attempts to be judged right without being right: forged messages, bent harnesses, and the search for the answer."""

from hostile import Attack, expression

_SEARCH = """
def strings(found, values):
    texts = {value for value in values if isinstance(value, str)}
    return found | {text for text in texts if text.startswith("SECRET") and len(text) == 23}
"""

ATTACKS = [
    Attack("leave at once", "no verdict as a good verdict", "os._exit(0)", fails="ended without an answer"),
    Attack("leave politely", "exit status 0", "sys.exit(0)", fails="SystemExit"),
    expression("leave when called", "exit status 0", "os._exit(0)", fails="ended without an answer"),
    Attack("nothing", "no function at all", "attacked = True", fails="NameError"),
    Attack(
        "replace the process's end",
        "running on as the zygote",
        """
def attack(facts):
    os._exit = lambda status: None
    return 1
""",
        fails="",
    ),
    Attack(
        "equal to all",
        "an object whose == is always true",
        """
class Any:
    __eq__ = lambda *_: True
    __hash__ = None
def attack(facts):
    return Any()
""",
        fails="a value of type Any",
    ),
    Attack(
        "string equal to all",
        "a str whose == is always true",
        """
class Any(str):
    __eq__ = lambda *_: True
    __hash__ = str.__hash__
def attack(facts):
    return Any()
""",
        fails="wrong answer",
    ),
    Attack(
        "number equal to all",
        "an int of many values",
        """
class Any(int):
    __eq__ = lambda *_: True
    __index__ = __int__ = lambda _: 42
    __hash__ = int.__hash__
def attack(facts):
    return Any()
""",
        fails="wrong answer",
    ),
    Attack(
        "list without end",
        "a list that never stops",
        """
class Any(list):
    def __iter__(self):
        while True:
            yield 1
def attack(facts):
    return Any()
""",
        fails="wrong answer",
    ),
    Attack(
        "dict with other items",
        "a dict that says something else each time",
        """
class Any(dict):
    def items(self):
        while True:
            yield 1, 1
def attack(facts):
    return Any()
""",
        fails="wrong answer",
    ),
    Attack(
        "list of itself",
        "a value without end",
        """
def attack(facts):
    x = []
    x.append(x)
    return x
""",
        fails="nested more than",
    ),
    Attack(
        "deep answer",
        "the judge's stack",
        """
def attack(facts):
    x = []
    for _ in range(100_000):
        x = [x]
    return x
""",
        fails="nested more than",
    ),
    Attack(
        "forged answer",
        "a message of its own",
        """
def attack(facts):
    os.write(3, GUESS)
    os._exit(0)
""",
        fails="wrong answer",
    ),
    Attack(
        "forged verdict",
        "a message that says passed",
        """
def attack(facts):
    os.write(3, frame(b'["passed",true]'))
    os._exit(0)
""",
        fails="ended without an answer",
    ),
    Attack(
        "many answers",
        "a thousand guesses",
        """
def attack(facts):
    for _ in range(1000):
        os.write(3, GUESS)
""",
        fails="ended without an answer",
    ),
    Attack(
        "broken answer",
        "a length without a body",
        """
def attack(facts):
    os.write(3, b'\\xff' * 4)
    os._exit(0)
""",
        fails="ended without an answer",
    ),
    Attack(
        "deep forged answer",
        "the judge's parser",
        """
def attack(facts):
    os.write(3, frame(b'["ok",' + b'[' * 60_000))
    os._exit(0)
""",
        fails="ended without an answer",
    ),
    Attack(
        "pickled answer",
        "code that runs when it is read",
        """
import pickle
class Evil:
    def __init__(self, path):
        self.path = path
    def __reduce__(self):
        return os.system, ('touch ' + self.path,)
def attack(facts):
    os.write(3, frame(pickle.dumps(Evil(facts['drop'] + '/x'))))
    os._exit(0)
""",
        fails="ended without an answer",
    ),
    Attack(
        "pickled value",
        "code that runs when its value is read",
        """
class Evil:
    def __reduce__(self):
        return os.system, ('touch /tmp/x',)
def attack(facts):
    return [Evil()]
""",
        fails="a value of type Evil",
    ),
    Attack(
        "every file",
        "a good word to whoever listens",
        """
def attack(facts):
    for fd in range(64):
        blocked(os.write, fd, GUESS)
    os._exit(0)
""",
        fails="wrong answer|ended without an answer",
    ),
    Attack(
        "raise assertion",
        "the harness's idea of failure",
        """
def attack(facts):
    raise AssertionError('passed')
""",
        fails="AssertionError: passed",
    ),
    Attack(
        "raise everything",
        "what nobody catches",
        """
def attack(facts):
    raise BaseException('passed')
""",
        fails="BaseException",
    ),
    Attack(
        "error without words",
        "an exception that cannot be printed",
        """
class E(Exception):
    def __str__(self):
        raise self
def attack(facts):
    raise E
""",
        fails="an exception without words",
    ),
    Attack(
        "bend builtins",
        "functions the harness relies on",
        """
import builtins
def attack(facts):
    for name in ('isinstance', 'len', 'type', 'set', 'map', 'repr', 'str'):
        setattr(builtins, name, lambda *_: True)
    return 1
""",
        fails="",
    ),
    Attack(
        "bend json",
        "the encoder",
        """
import json
def attack(facts):
    json.JSONEncoder.encode = lambda *_: '["ok",{"s":[]}]'
    return 1
""",
        fails="wrong answer",
    ),
    Attack(
        "hook imports",
        "modules the harness may still load",
        """
import builtins
builtins.__import__ = lambda *_, **__: sys
sys.meta_path.insert(0, sys)
def attack(facts):
    return 1
""",
        fails="wrong answer",
    ),
    Attack(
        "no asserts",
        "a Python without asserts, equality and exit",
        """
sys.flags = None
sys.exit = sys.excepthook = sys.displayhook = print
def attack(facts):
    return 1
""",
        fails="wrong answer",
    ),
    Attack(
        "rewrite the harness",
        "its functions, found through the collector",
        """
import gc
def attack(facts):
    for thing in gc.get_objects() + [sys._getframe(1).f_globals]:
        if isinstance(thing, dict) and '_send' in thing and 'plain' in thing:
            thing['_send'] = lambda message, send=thing['_send']: send(['ok', True])
    return 1
""",
        fails="wrong answer",
    ),
    Attack(
        "trace the harness",
        "the harness's every step",
        _SEARCH
        + """
found = set()
def tracer(frame, event, arg):
    found.update(strings(set(), [arg, *frame.f_locals.values()]))
    return tracer
sys.setprofile(tracer)
def attack(facts):
    return sorted(found)
""",
        answer=[],
    ),
    Attack(
        "walk the frames",
        "the expected value, in its callers",
        _SEARCH
        + """
def attack(facts):
    found, frame = set(), sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            found = strings(found, scope.values())
        frame = frame.f_back
    return sorted(found)
""",
        answer=[],
    ),
    Attack(
        "ask the collector",
        "the expected value, among all objects",
        _SEARCH
        + """
import gc
def attack(facts):
    found = set()
    for thing in gc.get_objects():
        thing = list(thing.values()) if isinstance(thing, dict) else thing
        found = strings(found, thing if isinstance(thing, (list, tuple, set)) else [])
    return sorted(found)
""",
        answer=[],
    ),
    Attack(
        "read the environment",
        "variables of the host, in the process's own first pages too",
        _SEARCH
        + """
def attack(facts):
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')
    held, n = [], 0
    while environ and environ[n]:
        held.append(environ[n])
        n += 1
    return [dict(os.environ), [word for word in held if b'SECRET' in word or b'HOME' in word or b'PATH' in word]]
""",
        answer=[{}, []],
    ),
    Attack(
        "search the memory",
        "the expected value, on the heap, page by page, past Python",
        """
def attack(facts):
    read, write = os.pipe()
    needle = b"SECRET" + b"-"
    middle = id(facts) & ~0xFFF
    found = set()
    for page in range(middle - (16 << 20), middle + (16 << 20), 4096):
        if libc.write(write, ctypes.c_void_p(page), 4096) == 4096:
            text = os.read(read, 4096)
            at = text.find(needle)
            while at >= 0:
                found.add(text[at + 7 : at + 23])
                at = text.find(needle, at + 1)
    return sorted(value for value in found if len(value) == 16 and value.isalnum())
""",
        answer=[],
        seconds=5.0,
    ),
    Attack("guess by exit status", "a script's good end", "os._exit(0)", fails="wrong answer", script=True),
    Attack(
        "print much",
        "all guesses at once",
        """
for n in range(1000):
    print('SECRET-%016x' % n)
""",
        fails="wrong answer",
        script=True,
    ),
    Attack(
        "forge for a script",
        "a message beside the output",
        "os.write(3, GUESS)",
        fails="wrong answer",
        script=True,
    ),
    Attack(
        "equal to all, checked",
        "an object that passes every assert",
        """
class Any(str):
    __eq__ = __contains__ = lambda *_: True
def attack():
    return Any()
""",
        check="assert attack() == SECRET",
        fails="check failed: AssertionError",
    ),
    Attack(
        "no plain value, checked",
        "an object that passes every assert",
        """
class Any:
    __eq__ = lambda *_: True
def attack():
    return Any()
""",
        check="assert attack() == SECRET",
        fails="check failed: AssertionError",
    ),
    Attack(
        "end the check",
        "the checker's exit",
        """
def attack():
    raise SystemExit(0)
""",
        check="assert attack() == SECRET",
        fails="check failed: RuntimeError: SystemExit",
    ),
    Attack(
        "end itself, checked",
        "a check that cannot go on",
        """
def attack():
    os._exit(0)
""",
        check="assert attack() == SECRET",
        fails="ended before it answered",
    ),
    Attack(
        "end the loop",
        "a check over cases that stops before the first",
        """
def attack():
    raise StopIteration
""",
        check="assert all(map(lambda case: attack() == SECRET, range(3)))",
        fails="check failed: RuntimeError: StopIteration",
    ),
    Attack(
        "forge the check",
        "the checker's last word",
        """
def attack():
    os.write(3, frame(b'["ok",null]') * 100)
    os._exit(0)
""",
        check="assert attack() == SECRET",
        fails="check failed|ended",
    ),
    Attack(
        "forge a call",
        "questions in the checker's name",
        """
def attack():
    os.write(3, frame(b'["ask","call",[],{}]') * 100)
    return 1
""",
        check="assert attack() == SECRET",
        fails="check failed",
    ),
    Attack(
        "forge a class",
        "an exception that is none",
        """
def attack():
    os.write(3, frame(b'["raise","exit","0",[],{"d":[]}]'))
    return 1
""",
        check="assert attack() == SECRET",
        fails="check failed: RuntimeError",
    ),
    Attack(
        "broken answer, checked",
        "a length without a body",
        """
def attack():
    os.write(3, b'\\xff' * 4)
    return 1
""",
        check="assert attack() == SECRET",
        fails="time limit|output limit|ended",
        seconds=0.5,
    ),
    Attack(
        "flood the check",
        "the memory of whoever reads",
        """
def attack():
    while True:
        os.write(3, b'\\xff' * 65536)
""",
        check="assert attack() == SECRET",
        fails="output limit|time limit|ended",
        seconds=0.5,
    ),
    Attack(
        "shadow the checker",
        "names that the test code uses",
        """
def attack():
    return 1
def abs(x):
    return 0
def isinstance(*_):
    return True
""",
        check="assert abs(attack() - 5) == 0 and SECRET",
        fails="check failed: AssertionError",
    ),
    Attack(
        "search the checker",
        "the test code, from its own process",
        _SEARCH
        + """
import gc
def attack():
    found = set()
    for thing in gc.get_objects():
        found = strings(found, thing.values() if isinstance(thing, dict) else [])
    return sorted(found)[0]
""",
        check="assert attack() == SECRET",
        fails="check failed: IndexError",
    ),
]
