"""A proposer and solvers in one workflow: what is proposed becomes problems, and a kill loses none of them."""

import dataclasses

import pytest
from run_kit import quiet, records
from test_phases import Killed, die_in_step
from tiny_run import tiny_config

from marl_jax.config.phase_fields import Phase
from marl_jax.config.run_config import CheckpointConfig, EvaluationConfig, LogConfig, WorkflowConfig
from marl_jax.policies import isolated
from marl_jax.rollouts import read_episodes
from marl_jax.run_folder.checkpoints import restore
from marl_jax.runs import loop
from marl_jax.table import Table
from marl_jax.task import Task
from marl_jax.tasks.buffer import BufferConfig
from marl_jax.workflows import Call, solver, team, workflow

pytestmark = pytest.mark.long


def executed(text):
    """How many small letters a text has, as a problem; one without any is not valid."""
    count = sum(map(str.islower, text))
    return Task(f"made/{text}", "math", f"letters in {text!r}?", gold=str(count % 3)) if count else None


@workflow(roles={"proposer": team, "solver": solver(slots="tries")}, families=("math",))
def propose_and_solve(task, prompts, *, tries=2, valid=True):
    made = task
    if not task.id.startswith("made/"):
        shown = [example["question"] for example in task.meta.get("examples", ())]
        written = yield Call("proposer", [{"role": "user", "content": f"1{''.join(shown)[:8]}"}])
        made = executed(written.text) if valid else None
    if made is None:
        return None
    ask = [{"role": "user", "content": made.question[:16]}]
    read = lambda text: str(len(text) % 3)
    answers = yield [Call("solver", ask, slot=i, about=made, read=read) for i in range(tries)]
    return answers[0]


def config(base, **settings):
    plain = tiny_config(base, steps=4)
    return dataclasses.replace(
        plain,
        workflow=WorkflowConfig("test_proposing:propose_and_solve", settings, prompts="micro"),
        policies=dataclasses.replace(plain.policies, map=isolated(propose_and_solve.roles)),
        data=dataclasses.replace(plain.data, buffer=BufferConfig(6, 0.5, "learnability", examples=1)),
        evaluation=EvaluationConfig(every=0),
        checkpoints=CheckpointConfig(every=1, best=False),
        logging=LogConfig(episodes_every=1, episodes_problems=4),
    )


@pytest.fixture(scope="module")
def played(base, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("proposing") / "run"
    assert loop.train(config(base), workdir, live=quiet(4)) == 4
    return workdir


def test_what_was_proposed_is_a_problem_of_later_steps(played):
    lines, _ = records(played)
    assert lines[0]["buffer/added"] > 0 and all(0 < line["buffer/size"] <= 6 for line in lines)
    first, last = (read_episodes(played / "episodes" / f"step-{step:06d}.parquet") for step in (1, 4))
    made = {head.task.id for head in last.bare_episodes if head.task.id.startswith("made/")}
    assert made and not any(head.task.id.startswith("made/") for head in first.bare_episodes)
    assert all(call.role == "solver" for one in last.episodes() if one.task.id in made for call in one.calls)
    shown = [head.task.meta.get("examples") for head in last.bare_episodes if head.task.id not in made]
    assert shown and all(shown)


def test_solvers_are_grouped_by_the_problem_that_was_proposed(played):
    table: Table = read_episodes(played / "episodes" / "step-000001.parquet")
    solvers = table.having(role="solver")
    by_task = {}
    for row in solvers.nonzero()[0].tolist():
        by_task.setdefault(table.task_of(row).id, set()).add(int(table.group[row]))
    assert len(by_task) > 1 and all(len(groups) == 1 for groups in by_task.values())
    assert len({*map(frozenset, by_task.values())}) == len(by_task)
    # Read by the call's reader, graded by the answer that was computed.
    for row in solvers.nonzero()[0].tolist():
        right = str(len(table.text[row]) % 3) == table.task_of(row).gold
        assert table.grade[row] == float(right)


@pytest.mark.parametrize("number", [2, 4])
def test_a_kill_loses_nothing_of_the_buffer(base, played, tmp_path, monkeypatch, number):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_in_step(patch, number)
        loop.train(config(base), tmp_path / "run", live=quiet(4))
    assert loop.train(config(base), tmp_path / "run", live=quiet(4)) == 4
    assert records(tmp_path / "run")[0] == records(played)[0]


def test_a_proposer_that_writes_nothing_valid_stops_nothing(base, tmp_path):
    assert (
        loop.train(dataclasses.replace(config(base, valid=False), steps=2), tmp_path / "run", live=quiet(2))
        == 2
    )
    lines, _ = records(tmp_path / "run")
    assert [line["buffer/added"] for line in lines] == [0, 0] and lines[0]["policy/p1/empty"] == 1


def test_what_is_learned_from_again_is_not_counted_again(base, tmp_path):
    """The buffer after a step of collected calls is the one before it."""
    twice = dataclasses.replace(
        config(base), steps=2, phases=(Phase(1, collect=True), Phase(1, source="collected"))
    )
    loop.train(twice, tmp_path / "run", live=quiet(2))
    buffers = [restore(tmp_path / "run" / "checkpoints", step, {})[1]["buffer"] for step in (1, 2)]
    assert buffers[0] == buffers[1] and any(entry["tries"] for entry in buffers[0])
    lines, _ = records(tmp_path / "run")
    assert lines[0]["buffer/added"] > 0 and lines[1]["buffer/added"] == 0
    assert lines[0]["buffer/size"] == lines[1]["buffer/size"]
