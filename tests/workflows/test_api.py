import pytest

from marl_jax.tasks.task import Task
from marl_jax.workflows import BUILT_IN, Call, Tool, workflow

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


@pytest.mark.parametrize("roles", ["generator", (), ("a", "a")])
def test_roles_are_distinct_names(roles):
    with pytest.raises(ValueError, match="distinct names"):
        workflow(roles=roles)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": []}, "non-empty list"),
        ({"messages": "2+2?"}, "non-empty list"),
        ({"messages": {"role": "user", "content": "x"}}, "non-empty list"),
        ({"messages": [{"role": "user"}]}, "needs 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": 4}]}, "needs 'role' and 'content'"),
        ({"messages": ASK, "slot": -1}, "slot"),
        ({"messages": ASK, "slot": "0"}, "slot"),
    ],
)
def test_a_malformed_call_is_refused_where_it_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        Call("speaker", **arguments)


def test_a_tool_is_called_by_its_functions_name():
    assert Tool(sorted, ([2, 1],)).name == "sorted"


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
