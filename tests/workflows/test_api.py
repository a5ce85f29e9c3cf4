import math

import pytest

from marl_jax.tasks.task import Task
from marl_jax.workflows import (
    BUILT_IN,
    Call,
    Tool,
    debate,
    eval_opt,
    orch_workers,
    self_refine_with_tests,
    single_matched,
    single_token_matched,
    voting,
    workflow,
)

TASK = Task("t", "math", "2+2?")
ASK = [{"role": "user", "content": "2+2?"}]


@workflow(roles=("speaker",))
def counted(task, prompts, *, rng, times=2):
    for _ in range(times):
        yield Call("speaker", ASK)
    return str(rng)


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


def test_what_is_not_a_generator_function_is_refused():
    with pytest.raises(ValueError, match="must be a generator function"):
        workflow(roles=("a",))(lambda task, prompts: None)


def test_settings_need_defaults():
    def needy(task, prompts, *, votes):
        yield

    with pytest.raises(ValueError, match="'needy' need default values: votes"):
        workflow(roles=("a",))(needy)


@pytest.mark.parametrize("roles", ["generator", (), ("a", "a"), ("a", ""), ("a", 5), (["a"],)])
def test_roles_are_distinct_names(roles):
    with pytest.raises(ValueError, match="distinct names"):
        workflow(roles=roles)


def test_a_role_is_not_named_like_a_slot():
    with pytest.raises(ValueError, match="role 'worker/1' has a '/'"):
        workflow(roles=("worker", "worker/1"))


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
            "is of 'sytem'; its role must be one of: system, user",
        ),
        ({"messages": [{"role": [], "content": "x"}]}, "its role must be one of"),
        ({"messages": ASK, "slot": True}, "slot"),
        ({"messages": ASK, "slot": -1}, "slot"),
        ({"messages": ASK, "slot": "0"}, "slot"),
    ],
)
def test_a_malformed_call_is_refused_where_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        Call("speaker", **arguments)


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
