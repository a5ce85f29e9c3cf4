import functools
import json
import math
import types

import numpy as np
import pytest

from examples import forks
from marl_jax import table
from marl_jax.task import Task
from marl_jax.workflows import (
    BUILT_IN,
    KINDS,
    Call,
    Completion,
    Fork,
    Kind,
    Tool,
    debate,
    eval_opt,
    judge,
    orch_workers,
    self_refine_with_tests,
    single,
    single_matched,
    single_token_matched,
    solver,
    team,
    voting,
    workflow,
)

TASK = Task("t", "math", "2+2?")
ASK = [{"role": "user", "content": "2+2?"}]
SAID = Completion("4", (1,), (0.0,), "stop", "4", 0)


@workflow(roles=("speaker",))
def counted(task, prompts, *, rng, times=2):
    for _ in range(times):
        yield Call("speaker", ASK)
    return str(rng)


MADE = {"id": "made/1", "family": "math", "question": "1+1?"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"gold": 2}, "field 'gold' is int, not text"),
        ({"gold": None}, "field 'gold' is NoneType, not text"),
        ({"id": 7}, "field 'id' is int, not text"),
        ({"id": ""}, "field 'id' is empty"),
        ({"id": "\ud800"}, "field 'id' holds half of a surrogate pair"),
        ({"question": " "}, "field 'question' is empty"),
        ({"family": "poem"}, "field 'family' is 'poem', not math or code"),
        ({"meta": [1]}, "field 'meta' is list, not a dict"),
        ({"meta": {"sum": np.int64(2)}}, "its level, meta or tests cannot be written as JSON"),
        ({"meta": {"hops": {1: 2}}}, "its meta or tests have a dict with keys that are no texts"),
        (
            {"tests": ({"call": "f", "args": [], "expected": {1: 2}},)},
            "its meta or tests have a dict with keys",
        ),
    ],
)
def test_a_call_is_about_a_task_that_can_be_shown_graded_and_stored(fields, message):
    assert Call("speaker", ASK, about=Task(**MADE)).about.gold == ""
    with pytest.raises(ValueError, match=f"about of a call to 'speaker' cannot be used: {message}"):
        Call("speaker", ASK, about=Task(**(MADE | fields)))


def test_slots_fit_into_the_table():
    assert Call("speaker", ASK, slot=2**31 - 1).slot == 2**31 - 1
    with pytest.raises(ValueError, match=r"slot of a call to 'speaker' is 2147483648; .* below 2\*\*31"):
        Call("speaker", ASK, slot=2**31)


def test_a_workflow_knows_its_name_roles_and_settings():
    assert (counted.name, counted.roles, counted.settings) == ("counted", ("speaker",), {"times": 2})


def test_bound_settings_reach_the_function_and_leave_the_original_alone():
    assert len(list(counted.bind(times=5)(TASK, None))) == 5
    assert len(list(counted(TASK, None, times=3))) == 3
    assert len(list(counted(TASK, None))) == 2


def test_rng_is_passed_to_those_that_want_it():
    script = counted(TASK, None, rng="seeded", times=0)
    with pytest.raises(StopIteration) as stop:
        next(script)
    assert stop.value.value == "seeded"


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="'counted' has no setting 'tims'; it has: times"):
        counted.bind(tims=3)


@workflow(roles=("speaker",))
def mute(task, prompts, stop=False):
    yield Call("speaker", ASK)
    if stop:
        return
    yield Call("speaker", ASK)


@workflow(roles=("speaker",))
def abstaining(task, prompts):
    said = yield Call("speaker", ASK)
    return said if said.answer else None


@workflow(roles=("speaker",))
def passed_on(task, prompts):
    return (yield from forks.designed(task, prompts))


def test_whether_it_may_answer_is_known_before_it_is_played():
    assert not mute.answers and not mute.bind(stop=True).answers
    assert counted.answers and abstaining.answers and passed_on.answers


def test_a_fork_is_found_in_a_workflow_within_another():
    elsewhere = types.FunctionType(passed_on.fn.__code__, {"forks": forks})  # in a module without `Fork`
    assert workflow(roles=("speaker",))(elsewhere).may_fork and forks.designed.may_fork
    assert not voting.may_fork


def test_a_function_with_some_of_its_arguments_is_looked_into():
    globals_of = {"abstaining": functools.partial(forks.designed.fn, TASK)}
    elsewhere = types.FunctionType(
        (lambda task, prompts: (yield from abstaining(prompts))).__code__, globals_of
    )
    assert workflow(roles=("speaker",), name="elsewhere")(elsewhere).may_fork
    bound = workflow(roles=("speaker",), name="bound")(functools.partial(counted.fn, times=1))
    assert bound.answers and bound.may_fork  # this module has `Fork`
    assert workflow(roles=("speaker",))(functools.partial(counted.fn, times=1)).name == "counted"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"roles": None}, "non-empty sequence of distinct names, got None"),
        ({"roles": ("a",), "groups": ["wide"]}, r"groups is \['wide'\]; it must be a dictionary"),
    ],
)
def test_declarations_of_another_form_are_refused(declared, message):
    with pytest.raises(ValueError, match=message):
        workflow(**declared)
    assert workflow(roles=(name for name in ("a", "b")))(counted.fn).roles == ("a", "b")


def test_what_is_not_a_generator_function_is_refused():
    with pytest.raises(ValueError, match="must be a generator function"):
        workflow(roles=("a",))(lambda task, prompts: None)
    with pytest.raises(ValueError, match="generator function: write def, not async def, and yield its calls"):
        workflow(roles=("a",))(awaited)


async def awaited(task, prompts):
    """A workflow of a library in which calls are awaited."""


def lonely(task, *, votes=1):
    yield


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: workflow(lonely), r"@workflow above 'lonely' has no roles: write @workflow\(roles="),
        (
            lambda: workflow(roles=("a",))(lonely),
            r"'lonely' takes \(task, \*, votes=1\); it must take \(task, prompts",
        ),
        (
            lambda: workflow(roles=("a",), families="math"),
            "families is the text 'math'; give a sequence of names",
        ),
        (
            lambda: workflow(roles=("a",), counts="votes"),
            "counts is the text 'votes'; give a sequence of names",
        ),
        (lambda: workflow(roles=("a",), groups={"study": "task"})(three), "group 'study' is the text 'task'"),
    ],
)
def test_a_declaration_that_would_be_read_otherwise_is_refused(declare, told):
    with pytest.raises(ValueError, match=told):
        declare()


def test_settings_need_defaults():
    def needy(task, prompts, *, votes):
        yield

    with pytest.raises(ValueError, match="'needy' need default values: votes"):
        workflow(roles=("a",))(needy)


@pytest.mark.parametrize(
    "roles",
    [
        "generator",
        (),
        ("a", "a"),
        ("a", ""),
        ("a", 5),
        (["a"],),
        {},
        {"": solver},
        {5: solver},
        {"a", "b"},
        frozenset("ab"),
    ],
)
def test_roles_are_distinct_names(roles):
    with pytest.raises(ValueError, match="distinct names"):
        workflow(roles=roles)


def test_a_role_is_not_named_like_a_slot():
    for roles in (("worker", "worker/1"), {"worker": solver, "worker/1": solver}):
        with pytest.raises(ValueError, match="role 'worker/1' has a '/'"):
            workflow(roles=roles)


# ---------------------------------------------------------------- kinds of roles, and groups of their calls


def three(task, prompts, *, tries=3, first="a"):
    yield


def test_kinds_are_declared_where_the_role_is():
    flow = workflow(roles={"writer": solver(slots="tries"), "critic": judge, "host": team})(three)
    assert flow.roles == ("writer", "critic", "host")
    assert [flow.kind_of(role) for role in flow.roles] == ["solver", "judge", "team"]
    assert [flow.slots_of(role) for role in flow.roles] == [3, 1, 1]
    assert flow.slots_of("writer", {"tries": 5}) == flow.bind(tries=5).slots_of("writer") == 5
    assert solver.slots is None  # the kind itself is as it was


def test_roles_that_are_only_named_are_of_the_team():
    flow = workflow(roles=("writer", "critic"))(three)
    assert [flow.kind_of(role) for role in flow.roles] == ["team", "team"]
    assert [flow.slots_of(role) for role in flow.roles] == [1, 1]


@pytest.mark.parametrize("kind", ["solver", "solvr", None, 1, Kind, ("solver",)])
def test_what_is_no_kind_is_refused(kind):
    known = "it must be one of: solver, judge, picker, planner, team, as imported from marl_jax.workflows"
    with pytest.raises(ValueError, match=f"the kind of role 'critic' is .*; {known}"):
        workflow(roles={"writer": solver, "critic": kind})


def test_slots_name_a_setting_of_the_workflow():
    message = "slots of role 'writer' name 'votes', which is no setting; there is: tries, first"
    with pytest.raises(ValueError, match=message):
        workflow(roles={"writer": solver(slots="votes")})(three)
    with pytest.raises(ValueError, match="is no setting; there is: none"):
        workflow(roles={"speaker": solver(slots="votes")})(single.fn)


def test_the_kinds_of_a_workflow_are_those_that_a_table_knows():
    assert KINDS == table.KINDS


def test_groups_are_declared_by_name_and_kept_when_settings_are_bound():
    flow = workflow(roles={"writer": solver}, groups={"study": ["task", "slot"]})(three)
    assert flow.bind(tries=1).groups == {"study": ("task", "slot")}
    assert workflow(roles={"writer": solver})(three).groups == {}


STUDY = {
    "single": ("task", "role"),
    "voting": ("task", "role", "slot"),
    "eval_opt": ("task", "role"),
    "orch_workers": ("task", "role"),
}


def test_workflows_of_the_study_declare_its_groups_and_no_others():
    declared = {name: flow.groups["study"] for name, flow in BUILT_IN.items() if flow.groups}
    assert declared == STUDY


def test_every_built_in_role_has_the_kind_and_the_number_of_slots_that_its_workflow_says():
    found = {
        name: {role: (flow.kind_of(role), flow.slots_of(role)) for role in flow.roles}
        for name, flow in BUILT_IN.items()
    }
    assert found == {
        "single": {"generator": ("solver", 1)},
        "single_matched": {"generator": ("solver", 4)},
        "single_token_matched": {"generator": ("solver", 16)},
        "voting": {"generator": ("solver", 3), "aggregator": ("picker", 1)},
        "eval_opt": {"generator": ("solver", 1), "evaluator": ("judge", 1)},
        "orch_workers": {"orchestrator": ("planner", 1), "worker": ("solver", 3), "synthesizer": ("team", 1)},
        "planner_coder": {"planner": ("planner", 1), "coder": ("solver", 1)},
        "debate": {"debater": ("solver", 3)},
        "self_refine_with_tests": {"generator": ("solver", 1)},
    }


COUNTS = [
    (voting, "votes"),
    (eval_opt, "rounds"),
    (orch_workers, "workers"),
    (debate, "agents"),
    (debate, "rounds"),
    (single_matched, "calls"),
    (single_token_matched, "calls"),
    (single_token_matched, "tokens"),
    (self_refine_with_tests, "rounds"),
]


@pytest.mark.parametrize(("flow", "setting"), COUNTS, ids=lambda v: getattr(v, "name", v))
def test_how_many_is_a_number_from_1_on(flow, setting):
    for value in (0, -1, True, 2.0, "2"):
        message = (
            f"setting '{setting}' of workflow '{flow.name}' is {value!r}; it must be an integer from 1 on"
        )
        with pytest.raises(ValueError, match=message):
            flow.bind(**{setting: value})
        with pytest.raises(ValueError, match=message):
            flow(TASK, None, **{setting: value})
    assert flow.bind(**{setting: 1}).settings[setting] == 1


def test_only_a_number_that_is_left_open_can_be_none():
    assert eval_opt.bind(rounds=None).settings["rounds"] is None
    with pytest.raises(ValueError, match="'votes' of workflow 'voting' is None"):
        voting.bind(votes=None)


def test_a_workflow_of_ones_own_says_which_of_its_settings_are_counts():
    @workflow(roles=("a",), counts=("times",))
    def own(task, prompts, *, first=0, times=1):
        yield

    assert own.bind(first=-1, times=2).settings == {"first": -1, "times": 2}
    with pytest.raises(ValueError, match="setting 'times' of workflow 'own' is 0"):
        own.bind(times=0)
    with pytest.raises(ValueError, match="setting 'first' of workflow 'own' is 0"):
        workflow(roles=("a",), counts=("first",))(own.fn)
    with pytest.raises(ValueError, match="'own' has no setting 'time'"):
        workflow(roles=("a",), counts=("time",))(own.fn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": []}, "non-empty list"),
        ({"messages": "2+2?"}, "non-empty list"),
        ({"messages": {"role": "user", "content": "x"}}, "non-empty list"),
        ({"messages": [{"role": "user"}]}, "needs 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": 4}]}, "needs 'role' and 'content'"),
        ({"messages": [5]}, "needs 'role' and 'content'"),
        ({"messages": iter(ASK)}, "non-empty list"),
        ({"messages": set("ab")}, "non-empty list"),
        (
            {"messages": [{"role": "sytem", "content": "x"}]},
            "has the role 'sytem'; it must be one of: system, user",
        ),
        ({"messages": [{"role": [], "content": "x"}]}, "it must be one of"),
        ({"messages": ASK, "slot": True}, "slot"),
        ({"messages": ASK, "slot": -1}, "slot"),
        ({"messages": ASK, "slot": "0"}, "slot"),
        ({"messages": ASK, "slot": np.bool_(True)}, "slot"),
        (
            {"messages": ASK, "reads": SAID},
            "reads of a call to 'speaker' are Completion.*; they must be a list of comp",
        ),
        ({"messages": ASK, "reads": None}, "reads of a call to 'speaker' are None"),
        ({"messages": ASK, "reads": "said"}, "reads of a call to 'speaker' are 'said'"),
        ({"messages": ASK, "after": 0}, "after of a call to 'speaker' is 0; it must be a completion"),
        ({"messages": ASK, "read": "boxed"}, "read of a call to 'speaker' is 'boxed'; it must be a function"),
    ],
)
def test_a_malformed_call_is_refused_where_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        Call("speaker", **arguments)


def test_what_a_call_reads_is_kept_whatever_it_was_given_as():
    for reads in ([SAID], (SAID,), iter([SAID])):
        call = Call("speaker", ASK, reads=reads)
        assert call.reads == call.reads == (SAID,)


def test_numbers_of_numpy_are_integers_too():
    made = Call("speaker", ASK, slot=np.int64(1)).slot, Fork(np.int32(2)).ways
    assert (*made, voting.bind(votes=np.int64(3)).settings["votes"]) == (1, 2, 3)
    assert {*map(type, made), type(voting.bind(votes=np.int64(3)).settings["votes"])} == {int}
    drawn = Call("speaker", ASK, labels={"level": np.int64(2), "share": np.float32(0.5), "kind": "a"}).labels
    assert json.dumps(drawn) == '{"level": 2, "share": 0.5, "kind": "a"}'
    with pytest.raises(ValueError, match="they must map names to texts or numbers"):
        Call("speaker", ASK, labels={"share": np.float32("nan")})


def test_a_tool_is_called_by_its_functions_name():
    assert Tool(sorted, ([2, 1],)).name == "sorted"


@pytest.mark.parametrize("timeout_s", [None, "5", True, 0, -1, math.nan, -math.inf, 1j])
def test_the_time_of_a_tool_is_a_number_above_0(timeout_s):
    with pytest.raises(ValueError, match=r"timeout_s of tool 'sorted' is .*; it must be a number above 0"):
        Tool(sorted, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        ("sorted", (), "fn of a tool is 'sorted'"),
        (awaited, (), "fn of tool 'awaited' is async: give a function that runs it with asyncio.run"),
        (sorted, "ab", "args of tool 'sorted'"),
        (sorted, 5, "args"),
    ],
)
def test_a_tool_is_a_function_and_its_arguments(fn, args, message):
    with pytest.raises(ValueError, match=message):
        Tool(fn, args)


def test_built_in_workflows_are_found_by_name():
    assert set(BUILT_IN) == {
        "single",
        "single_matched",
        "single_token_matched",
        "voting",
        "eval_opt",
        "orch_workers",
        "planner_coder",
        "debate",
        "self_refine_with_tests",
    }
    assert all(entry.name == name for name, entry in BUILT_IN.items())
