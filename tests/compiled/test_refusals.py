"""What has no form in arrays is refused before anything is compiled, in one line that names the hosted road."""

import pytest

from marl_jax.compiled import NoArrayForm, make_step
from marl_jax.config.run_config import load_config

REFUSED = {
    "self_refine_with_tests": ("self_refine_with_tests-shared-xs-code", {}),
    "top-k and top-p": ("voting-isolated-xs-math", {"sampling.top_k": "64"}),
    "stop strings": ("voting-isolated-xs-math", {"sampling.stop_strings": "x"}),
    "rollout.draws": ("voting-isolated-xs-math", {"rollout.draws": "2"}),
    "learner.updates=fixed": ("voting-isolated-xs-math", {"learner.updates": "fixed"}),
    "learner.epochs": ("voting-isolated-xs-math", {"learner.epochs": "2"}),
    "reinforce_pp_baseline": ("voting-isolated-xs-math", {"advantages.estimator": "reinforce_pp_baseline"}),
    "groups of several problems": ("voting-isolated-xs-math", {"advantages.group": "role,slot"}),
    "mesh.model": ("voting-isolated-xs-math", {"mesh.model": "2"}),
    "buffer of tasks": ("voting-isolated-xs-math", {"data.buffer.capacity": "2"}),
    "single_token_matched": ("single_token_matched-shared-xs-math", {}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_arrays_cannot_say_is_refused_by_name(what):
    cell, changes = REFUSED[what]
    config = load_config(f"configs/micro.py:{cell}", [*changes.items()])
    with pytest.raises(NoArrayForm, match=what) as refused:
        make_step(config)
    assert "hosted road" in str(refused.value) and "\n" not in str(refused.value)


def test_prompts_that_may_not_fit_are_refused():
    config = load_config("configs/micro.py:eval_opt-isolated-xs-math", [("engine.max_prompt", "100")])
    with pytest.raises(NoArrayForm, match=r"prompts of role 'generator' may take \d+ tokens, and 100 fit"):
        make_step(config)
