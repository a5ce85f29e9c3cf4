"""A new built-in workflow is one file, its prompts and its entry in `BUILT_IN`: no other module knows it."""

import pytest

from configs import micro, qwen3, study
from marl_jax.config import cells
from marl_jax.pretraining import transcripts
from marl_jax.workflows import BUILT_IN, Call, judge, solver, workflow


@workflow(roles={"generator": solver, "critic": judge})
def critique(task, prompts):
    draft = yield Call("generator", prompts.generator(question=task.question))
    yield Call("critic", prompts.evaluator(question=task.question, solution=draft), reads=[draft])
    return draft


@pytest.mark.parametrize("task", ["math", "code"])
def test_a_new_entry_has_cells_and_leaves_the_making_of_bases_alone(monkeypatch, task):
    before = [*transcripts.flows(task)]
    monkeypatch.setitem(BUILT_IN, "critique", critique)
    monkeypatch.setattr(cells, "WORKFLOWS", (*cells.WORKFLOWS, "critique"))
    for made in (micro, qwen3, study):
        scale = made.SCALES[0]
        config = made.get_config(f"critique-isolated-{scale}-{task}")
        assert config.roles == ("generator", "critic") and config.policies.map.keys() == {*config.roles}
    transcripts.flows.cache_clear()
    assert [*transcripts.flows(task)] == before
