import errno
import math
import pathlib
import time

import pytest
from fake_engine import TOKENIZER, FakeEngine
from rollout_kit import PROMPTS, TASKS, run, speak, timeless, tool_user

from marl_jax.policies import shared
from marl_jax.rewards.families import parse as family_parse
from marl_jax.rollouts import ToolLog, ToolRecord, replay, rollout
from marl_jax.rollouts.tools import MAX_RESULT
from marl_jax.task import Task
from marl_jax.workflows import (
    Tool,
    ToolError,
    ToolTimeout,
    load_prompts,
    self_refine_with_tests,
    workflow,
)


def tool_errors():
    def raises(*_):
        raise KeyError("x")

    def leaves(*_):
        raise SystemExit(3)

    def hangs(*_):
        time.sleep(1.5)

    def unspeakable(*_):
        return object()

    def boundless(*_):
        return "x" * MAX_RESULT

    class Wordless(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    def wordless(*_):
        raise Wordless

    return {
        raises: "KeyError: 'x'",
        leaves: "SystemExit: 3",
        hangs: "timeout",
        unspeakable: "TypeError: Object of type object is not JSON serializable",
        boundless: "ValueError: the result is 1048578 bytes of JSON; at most 1048576 are allowed",
        wordless: "Wordless",
    }


@pytest.mark.parametrize(("tool", "error"), tool_errors().items(), ids=lambda v: getattr(v, "__name__", ""))
def test_a_failing_tool_is_a_recorded_result_that_the_workflow_can_catch(tool, error):
    timeout_s = 0.3 if error == "timeout" else 30.0
    for episode in run(tool_user(tool, timeout_s), TASKS[:2], tool_threads=1):
        assert episode.error is None
        assert episode.tools[0].error == error
        assert episode.answer.startswith(f"failed: {tool.__name__}: {error}")


def test_a_tool_error_that_nobody_catches_ends_its_own_episode():
    def picky(name):
        if name == "t1":
            raise ValueError("not this one")
        return name

    @workflow(roles=("speaker",))
    def trusting(task, prompts):
        return (yield Tool(picky, (task.id,)))

    episodes = run(trusting)
    assert [e.answer for e in episodes] == ["t0", None, "t2", "t3", "t4", "t5"]
    assert "picky: ValueError: not this one" in episodes[1].error
    assert episodes[1].tools[0].error == "ValueError: not this one"


def test_hanging_tools_do_not_keep_others_from_running():
    def some_hang(name, _):
        time.sleep(6.0 if name < "t3" else 0)
        return name

    episodes = run(tool_user(some_hang, timeout_s=2.0), tool_threads=2)
    assert [e.tools[0].error for e in episodes] == ["timeout"] * 3 + [None] * 3


def test_a_result_reaches_the_workflow_as_its_record_will():
    @workflow(roles=("speaker",))
    def looks(task, prompts):
        value = yield Tool(lambda: {1: (2, 3)})
        return repr(value)

    assert run(looks, TASKS[:1])[0].answer == "{'1': [2, 3]}"


def test_what_a_workflow_does_to_a_result_does_not_reach_the_record(tmp_path):
    @workflow(roles=("speaker",))
    def greedy(task, prompts):
        queue = yield Tool(lambda: [["a"], ["b"]])
        yield speak("".join(queue.pop(0)))
        queue[0].clear()
        return str(queue)

    log = ToolLog(tmp_path / "tools.jsonl")
    for _ in range(2):  # the second time as recorded
        (episode,) = run(greedy, TASKS[:1], tool_log=log)
        assert (episode.answer, episode.tools[0].result) == ("[[]]", [["a"], ["b"]])
        replay(episode, greedy, PROMPTS, TOKENIZER)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e10, 1e300, 10**400])
def test_a_tool_may_have_all_the_time_in_the_world(timeout_s):
    def slow(name, _):
        time.sleep(0.2)
        return name

    for mode in ("fixed", "free"):
        episodes = run(tool_user(slow, timeout_s), TASKS[:2], mode=mode)
        assert [e.tools[0].result for e in episodes] == ["t0", "t1"]


def test_a_time_out_can_be_told_from_other_failures():
    def late(*_):
        time.sleep(1.0)

    def early(*_):
        raise TimeoutError("its own")

    @workflow(roles=("speaker",))
    def patient(task, prompts):
        try:
            yield Tool(late if task.id == "t0" else early, timeout_s=0.1 if task.id == "t0" else 30.0)
        except ToolTimeout:
            return "timeout"

    episodes = run(patient, TASKS[:2])
    assert [e.answer for e in episodes] == ["timeout", None]
    assert "early: TimeoutError: its own" in episodes[1].error


def test_calls_and_tools_can_be_parallel():
    @workflow(roles=("speaker",))
    def mixed(task, prompts):
        heard, length, other = yield [speak("a", slot=0), Tool(len, ("four",)), speak("b", slot=1)]
        return f"{heard.call} {length} {other.call}"

    episode = run(mixed, TASKS[:1])[0]
    assert episode.answer == "0 4 1"
    assert episode.tools[0].after_call == 0


def test_an_empty_list_is_answered_at_once():
    @workflow(roles=("speaker",))
    def idle(task, prompts):
        nothing = yield []
        heard = yield speak("a")
        return f"{nothing} {heard.call}"

    assert run(idle, TASKS[:1])[0].answer == "[] 0"


def test_what_ran_beside_a_tool_that_failed_is_not_lost():
    @workflow(roles=("speaker",))
    def mixed(task, prompts):
        try:
            yield [speak("a"), Tool(int, ("x",)), Tool(len, ("four",))]
        except ToolError as error:
            heard, failed, length = error.results
            assert failed is error
            return f"{heard.call} {length}"

    assert run(mixed, TASKS[:1])[0].answer == "0 4"


def test_a_step_that_runs_again_sees_the_tool_results_it_saw_before(tmp_path):
    calls = []

    def moody(name, _):
        calls.append(name)
        if len(calls) % 2:
            raise OSError("moody")
        return name

    path = tmp_path / "tools.jsonl"
    first = run(tool_user(moody), tool_log=ToolLog(path))
    with path.open("a") as file:
        file.write('{"key": [1, 2')  # the process died here
    again = run(tool_user(moody), tool_log=ToolLog(path))
    assert len(calls) == len(TASKS) == len(path.read_text().splitlines())
    assert timeless(first) == timeless(again)
    other_step = run(tool_user(moody), tool_log=ToolLog(path), step=1)
    assert len(calls) == 2 * len(TASKS) and len(other_step) == len(TASKS)


def test_a_tool_runs_again_where_an_episode_that_is_played_again_says_something_else(tmp_path):
    flow = tool_user(lambda name, text: f"{name} {text}")
    for reply in ("one", "two"):  # as of a server whose answers do not repeat
        engine, log = FakeEngine(lambda *_, said=reply: said), ToolLog(tmp_path / "tools.jsonl")
        episodes = run(flow, engine=engine, tool_log=log)
        assert [one.tools[0].result for one in episodes] == [f"{task.id} {reply}" for task in TASKS]


def log_with(path, text):
    log = ToolLog(path)
    log.put((0, 1), ToolRecord("f", "é", None))
    log.put((0, 2), ToolRecord("g", None, "timeout"))
    with path.open("ab") as file:
        file.write(text)


def test_opening_a_log_touches_no_line_that_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "tools.jsonl"
    log_with(path, b"")
    before = (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
    ToolLog(path)
    assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before
    with path.open("ab") as file:
        file.write(b'{"key": [1, 2')  # the process died here
    monkeypatch.setattr(pathlib.Path, "write_text", None)  # nothing but the tail may go
    monkeypatch.setattr(pathlib.Path, "write_bytes", None)
    assert ToolLog(path).get((0, 2)) == ToolRecord("g", None, "timeout")
    assert (path.read_bytes(), path.stat().st_ino) == (before[0], before[2])


@pytest.mark.parametrize(
    "line", [b"null", b'{"key": 5}', b'{"key": [1]}', b'{"key": "ab", "record": {}}', b"", b"{", b"\xff\xfe",
             b'{"key": [1], "record": {"nome": "f"}}'],
)  # fmt: skip
def test_a_log_with_a_line_that_is_none_is_refused_by_name_and_line(tmp_path, line):
    path = tmp_path / "tools.jsonl"
    log_with(path, line + b"\n")
    with pytest.raises(ValueError, match=r"tools\.jsonl' cannot be read as tool results, line 3: ") as error:
        ToolLog(path)
    assert "\n" not in str(error.value)


def test_a_full_disk_is_told_in_one_line(tmp_path):
    path = tmp_path / "tools.jsonl"
    log = ToolLog(path)
    path.symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"result of a tool cannot be written \(No space left.*tools\.jsonl"
    ) as error:
        log.put((0, 1), ToolRecord("f", 1))
    assert error.value.errno == errno.ENOSPC and "\n" not in str(error.value)


def test_self_refine_runs_the_public_tests_in_the_sandbox():
    task = Task(
        "c", "code", "Print twice the number you read.",
        public_tests=({"stdin": "4\n", "stdout": "8\n"},), meta={"preamble": "FACTOR = 2"},
    )  # fmt: skip
    drafts = ["```python\nprint(FACTOR)\n```", "```python\nprint(FACTOR * int(input()))\n```", "never said"]
    episode = rollout(
        self_refine_with_tests,
        [task],
        FakeEngine(lambda prompt, request: drafts[request.key[-1]]),
        TOKENIZER,
        shared(["generator"]),
        prompts=load_prompts("code"),
        parse=family_parse,
    ).episodes()[0]
    assert episode.error is None
    assert [tool.result["passed"] for tool in episode.tools] == [False, True]
    assert episode.tools[0].result["reason"] in TOKENIZER.decode(episode.calls[1].prompt_tokens)
    assert episode.answer == "print(FACTOR * int(input()))"
