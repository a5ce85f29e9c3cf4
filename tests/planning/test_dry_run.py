"""What a run asks of its engines, played by its own scheduler before there are weights or data."""

import collections
import json
import re
import subprocess
import sys

import pytest
from plan_kit import fitting, of_all, plan_of

from marl_jax.commands.run_plan import run_plan
from marl_jax.config.run_config import load_config
from marl_jax.models import ModelConfig
from marl_jax.planning.devices import Device
from marl_jax.planning.dry_run import NO_RESULT
from marl_jax.planning.plan import PlanError, demand_of
from marl_jax.terminal.page import plan_page

HERE = Device("test", "cpu", 8 << 30, bandwidth=1e9, bfloat16=1e10, float32=1e10)


def config(cell: str = "voting-shared-xs-math", **overrides: str):
    file = "qwen3" if cell.split("-")[2].endswith("b") else "micro"
    return load_config(f"configs/{file}.py:{cell}", [(k.replace("__", "."), v) for k, v in overrides.items()])


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A configuration whose workflow is the function `mine` of the given source."""

    def write(body: str, name: str, map_=None, **overrides: str):
        head = "from marl_jax.workflows import Call, Tool, workflow\n"
        (tmp_path / f"{name}.py").write_text(head + body)
        monkeypatch.syspath_prepend(str(tmp_path))
        chosen = {"workflow__name": f"{name}:mine", "policies__map": json.dumps(map_ or {"solver": "p0"})}
        return config("single-shared-xs-math", **chosen, **overrides)

    return write


def waves(demand) -> list[list[str]]:
    """The roles of the first episode, those that are called side by side together."""
    found = collections.defaultdict(list)
    for call in demand.calls:
        if call.episode == demand.calls[0].episode:
            found[call.wave].append(call.role)
    return list(found.values())


def test_the_calls_of_an_episode_are_the_most_that_it_makes():
    played = lambda cell: waves(demand_of(config(cell)))
    assert played("voting-shared-xs-math") == [["generator"] * 3, ["aggregator"]]
    assert played("orch_workers-shared-xs-code") == [["orchestrator"], ["worker"] * 3, ["synthesizer"]]
    assert played("eval_opt-shared-xs-math") == [["generator"], ["evaluator"]] * 3
    assert played("eval_opt-shared-xs-code") == [["generator"], ["evaluator"]] * 2


@pytest.mark.long
def test_verdicts_end_episodes_as_often_as_is_assumed():
    def rounds(share: float) -> float:
        demand = demand_of(run, answers={"evaluator": {"\\boxed{Correct}": share}})
        return len(demand.calls) / 2 / (4 * run.rollout.samples)

    run = config("eval_opt-shared-xs-math", rollout__samples="64")
    assert rounds(1.0) == 1 and rounds(0.0) == 3
    assert rounds(0.5) == pytest.approx(1 + 0.5 + 0.25, abs=0.15)
    plan = plan_of(
        run, ModelConfig.preset("xs"), HERE, demand_of(run, answers={"evaluator": {"\\boxed{Correct}": 0.5}})
    )
    page = " ".join(plan_page(run, of_all(run, ModelConfig.preset("xs")), "here", [plan]).split())
    assert "verdicts are evaluator '\\boxed{Correct}' 50%" in page
    given = """{"evaluator": {"\\\\boxed{Correct}": 0.5}}"""
    first = next(run_plan(run, "mean:0.5,sigma:0.6", None, 0.0, given))
    assert "verdicts are evaluator '\\boxed{Correct}' 50%" in " ".join(first.split())
    for wrong, why in (
        ("[]", "give --answers="),
        ('{"evaluator": {"yes": 1, "yes": 0}}', "give --answers="),
        ('{"judge": {"yes": 1}}', "names 'judge', no role"),
    ):
        with pytest.raises(PlanError, match=why):
            next(run_plan(run, "mean:0.5,sigma:0.6", None, 0.0, wrong))


def test_an_answer_of_no_text_leaves_prompts_as_long_as_they_are():
    run = config("eval_opt-shared-xs-math", rollout__samples="2")
    prompts = [
        [len(call.prompt) for call in demand_of(run, 0.5, answers={"generator": {said: 1.0}}).calls]
        for said in ("", "-")
    ]
    assert sum(prompts[0]) <= sum(prompts[1])


def test_no_completion_is_assumed_to_be_shorter_than_it_may_be():
    run = config(sampling__min_new_tokens="48", sampling__top_k="20")
    assert {call.new for call in demand_of(run, 0.1).calls} == {48}
    assert min(call.new for call in demand_of(run).calls) == 48


def test_tuples_loops_and_random_branches_are_played_as_they_run(own):
    run = own(
        """
@workflow(roles=("solver",))
def mine(task, prompts, *, rng):
    ask = [{"role": "user", "content": task.question}]
    first, second = yield (Call("solver", ask), Call("solver", ask, slot=1))
    for turn in range(int(rng.integers(1, 4))):
        last = yield Call("solver", [{"role": "user", "content": first.text + second.text}])
    return last
""",
        "branching",
        rollout__samples="50",
    )
    demand = demand_of(run)
    lengths = collections.Counter(call.episode for call in demand.calls).values()
    assert {*lengths} == {3, 4, 5} and demand.most_calls == 5
    assert sum(lengths) / len(lengths) == pytest.approx(4, abs=0.3)
    assert [len(wave) for wave in waves(demand)][:2] == [2, 1]


def test_tools_are_not_called_and_give_no_result(own, tmp_path):
    run = own(
        f"""
def leave_a_mark(text):
    open({str(tmp_path / "called")!r}, "w").write(text)

@workflow(roles=("solver",))
def mine(task, prompts):
    ask = [{{"role": "user", "content": task.question}}]
    draft = yield Call("solver", ask)
    result, other = yield [Tool(leave_a_mark, (draft.text,)), Call("solver", ask)]
    assert result == {NO_RESULT!r}, result
    yield Call("solver", ask)
""",
        "with_tools",
    )
    assert waves(demand_of(run)) == [["solver"]] * 3
    assert not (tmp_path / "called").exists()


def test_a_workflow_is_played_as_far_as_its_limit_of_calls(own):
    source = """
@workflow(roles=("solver",))
def mine(task, prompts):
    ask = [{"role": "user", "content": task.question}]
    yield Call("solver", ask)
    yield [Call("solver", ask, slot=i) for i in range(100)]
"""
    for limit, played in ((64, [1]), (101, [1, 100])):
        run = own(source, "wide", rollout__limits__max_calls=str(limit))
        assert [len(wave) for wave in waves(demand_of(run))] == played


def test_a_workflow_that_cannot_be_played_without_a_task_is_planned_all_the_same(own):
    run = own(
        """
@workflow(roles=("solver",))
def mine(task, prompts):
    yield Tool(len, ("x",))
    return (yield Call("solver", task.meta["messages"]))
""",
        "needy",
    )
    plan = plan_of(run, ModelConfig.preset("xs"), HERE)
    assert plan.calls == 0 and plan.seconds is None and "KeyError: 'messages'" in plan.failed
    assert plan.total > 0


def test_a_call_that_nobody_answers_is_told_in_one_line(own):
    source = """
@workflow(roles=("solver",))
def mine(task, prompts):
    ask = [{"role": "user", "content": task.question}]
    yield [Call("solver", ask, slot=i) for i in range(2)]
    yield Call("critic", ask)
"""
    for map_, line in (
        (
            {"solver": "p0"},
            "workflow.name 'astray:mine' calls 'critic', but declares only: solver: add it to its roles",
        ),
        (
            {"solver/0": "p0"},
            "policies.map lacks 'solver/1', which 'astray:mine' calls: add it, or 'solver' for all slots",
        ),
    ):
        with pytest.raises(PlanError, match=re.escape(line)) as error:
            fitting(own(source, "astray", map_), ModelConfig.preset("xs"), HERE)
        assert "\n" not in str(error.value)


def test_prompts_hold_what_they_show():
    demand = demand_of(config("voting-shared-0.6b-math", sampling__max_new_tokens="2000"), 0.5)
    *drafts, choice = demand.calls[:3] + demand.calls[-1:]
    assert {call.new for call in demand.calls} == {1000}
    assert len({call.prompt for call in drafts}) == 1 and [call.fed > 0 for call in drafts] == [
        True,
        False,
        False,
    ]
    assert choice.role == "aggregator" and choice.fed == len(choice.prompt)
    assert 3000 + 128 < len(choice.prompt) < 3000 + 128 + 200  # three drafts, the question, and some words


def test_a_later_turn_is_fed_what_its_history_does_not_hold():
    demand = demand_of(config("eval_opt-shared-0.6b-math", sampling__max_new_tokens="2000"), 0.5)
    episode = demand.calls[0].episode
    first, _, second, *_ = (call for call in demand.calls if call.episode == episode)
    # The last token that was sampled lies in no cache.
    assert len(second.prompt) - second.fed == len(first.prompt) + 1000 - 1
    assert first.keeps_row and not second.keeps_row


def test_samples_share_the_prompt_of_their_problem_and_nothing_else():
    demand = demand_of(config("eval_opt-shared-xs-math"))
    first = [call.prompt for call in demand.calls if call.first and call.role == "generator"]
    later = [call.prompt for call in demand.calls if not (call.first and call.role == "generator")]
    assert len({*first}) == demand.problems and len({*later}) == len(later)


def test_a_prompt_that_is_too_long_is_cut_as_the_longest_that_fits():
    run = config("voting-shared-xs-math", engine__max_prompt="64")
    assert max(len(call.prompt) for call in demand_of(run).calls) == 64
    assert waves(demand_of(run)) == [["generator"] * 3, ["aggregator"]]


@pytest.mark.parametrize("train", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_a_plan_compiles_nothing(train):
    child = f"""
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
)
from marl_jax.planning.devices import KINDS
from marl_jax.planning.plan import find_models, make_plan
from marl_jax.config.run_config import load_config
run = load_config("configs/micro.py:eval_opt-isolated-xs-math", [("policies.train", "{train}")])
make_plan(run, find_models(run)[0], KINDS[0])
assert not compiled, compiled
jax.jit(lambda x: x + 1)(1.0)
assert compiled  # it is heard of
"""
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
