"""Rollouts over the real engine: every log-prob is that of the policy, the update and the prompt on record."""

import dataclasses
import random
import re
import time

import jax
import numpy as np
import pytest
from fake_engine import END_ID, TOKENIZER
from micro_engine import CONFIG, RANK, SCALE, SETTINGS, check_logprobs

from marl_jax.models import init
from marl_jax.models.lora import init_lora, merge
from marl_jax.policies import SamplingSettings, isolated
from marl_jax.rollouts import rollout
from marl_jax.sampling import Engine, Request, programs
from marl_jax.task import Task
from marl_jax.workflows import Call, Tool, eval_opt, load_prompts, voting, workflow

PARAMS = init(jax.random.key(0), CONFIG)
POLICIES = ("a", "b", "c")
TASKS = [Task(f"t{i}", "math", f"{i}+{i}=?") for i in range(3)]


def adapters(seed):
    """Adapters that matter: b is not zero."""
    tree = init_lora(seed, CONFIG, rank=RANK, num_adapters=len(POLICIES))
    noise = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + (0.05 * noise.normal(size=leaf.shape)).astype(leaf.dtype), tree)


def engine(seed=1):
    return Engine(PARAMS, CONFIG, SETTINGS, adapters=adapters(seed), adapter_scale=SCALE, policies=POLICIES)


def run(flow, engines, policy_map, samples=2, **options):
    table = rollout(
        flow, TASKS, engines, TOKENIZER, policy_map, prompts=load_prompts("math", "micro"), samples=samples,
        parse=lambda task, text: (re.findall(r"\d+", text) or [None])[0],
        settings=SamplingSettings(max_new_tokens=12), **options,
    )  # fmt: skip
    return table.episodes()


def timeless(episodes):
    return [dataclasses.replace(episode, seconds=0.0) for episode in episodes]


def merged(seed):
    return {
        policy: merge(PARAMS, jax.tree.map(lambda leaf, i=i: leaf[i], adapters(seed)), SCALE)
        for i, policy in enumerate(POLICIES)
    }


def prefills(episodes):
    """Tokens that have to be fed if each first prompt is prefilled once per policy and histories are kept."""
    first = {(c.policy, c.prompt_tokens) for e in episodes for c in e.calls if c.after is None}
    fed = sum(len(prompt) - 1 for _, prompt in first)
    for episode in episodes:
        for call in episode.calls:
            if call.after is not None:
                before = episode.calls[call.after]
                fed += len(call.prompt_tokens) - len(before.prompt_tokens) - len(before.tokens)
    return fed


def test_a_completion_ends_at_what_ends_a_text_by_its_own_model():
    """Published models list more than the end of a turn; each policy has the list of its own model."""
    ends = {"p0": (END_ID, *range(30, 60)), "p1": (END_ID, *range(60, 90))}
    settings = dataclasses.replace(SETTINGS, stops=32)
    engines = {
        name: Engine(PARAMS, dataclasses.replace(CONFIG, eos_token_id=own), settings, policies=(name,))
        for name, own in ends.items()
    }
    calls = [call for episode in run(voting, engines, isolated(voting.roles)) for call in episode.calls]
    for call in calls:
        assert not {*call.tokens[:-1]} & {*ends[call.policy]}
        assert (call.finish_reason == "stop") == (call.tokens[-1] in ends[call.policy])
    for name in ends:
        assert {call.tokens[-1] for call in calls if call.policy == name} & {*ends[name][1:]}


def test_a_prompt_that_a_group_shares_is_prefilled_once_per_policy():
    served = engine()
    episodes = run(voting, served, dict.fromkeys(voting.roles, "a"), samples=8)
    assert served.stats.prefilled_tokens == prefills(episodes)
    drafts = [c for e in episodes for c in e.calls if c.role == "generator"]
    assert len(drafts) == 72 and len({c.prompt_tokens for c in drafts}) == 3


def test_voters_of_their_own_policies_never_meet_in_the_cache():
    served = engine()
    voters = {"generator/0": "a", "generator/1": "b", "generator/2": "c", "aggregator": "a"}
    episodes = run(voting, served, voters, samples=4)
    weights = merged(1)
    check_logprobs(episodes, weights)
    with pytest.raises(AssertionError):  # the policies differ enough for the check to tell them apart
        check_logprobs(episodes, {**weights, "b": weights["c"]})
    assert served.stats.prefilled_tokens == prefills(episodes)


def test_a_roles_next_turn_goes_on_from_its_own_cache():
    served = engine()
    episodes = run(eval_opt.bind(rounds=2), served, {"generator": "a", "evaluator": "b"}, samples=4)
    assert any(call.turn == 1 for episode in episodes for call in episode.calls)
    check_logprobs(episodes, merged(1))
    assert served.stats.prefilled_tokens == prefills(episodes)


def test_a_shared_conversation_meets_no_other_policys_cache():
    episodes = run(
        eval_opt.bind(shared=True, rounds=2), engine(), {"generator": "a", "evaluator": "b"}, samples=4
    )
    assert any(call.after is not None for episode in episodes for call in episode.calls)
    check_logprobs(episodes, merged(1))


def test_an_update_reaches_the_next_rollout_and_no_old_cache_does():
    served = engine(1)
    policy_map = {"generator": "a", "evaluator": "b"}
    old = run(eval_opt, served, policy_map)
    served.update(adapters=adapters(2))
    new = run(eval_opt, served, policy_map)
    check_logprobs(old, merged(1))
    check_logprobs(new, merged(2))
    assert (
        old[0].calls[0].tokens != new[0].calls[0].tokens
        or old[0].calls[0].logprobs != new[0].calls[0].logprobs
    )


def test_the_same_seed_gives_the_same_episodes_to_the_last_bit():
    runs = [run(voting, engine(), {"generator": "a", "aggregator": "b"}) for _ in range(2)]
    assert timeless(runs[0]) == timeless(runs[1])


def test_slow_tools_and_rows_that_run_short_leave_the_same_bits():
    """Which histories are given up and computed again must follow from the schedule, not from the tools' speed."""

    def jittered(text):
        time.sleep(random.SystemRandom().uniform(0, 0.05))
        return len(text)

    @workflow(roles=("generator",))
    def consults(task, prompts):
        first = yield Call("generator", prompts.generator(question=task.question), keep=True)
        length = yield Tool(jittered, (first.text,))
        ask = [{"role": "user", "content": f"{length} letters"}]
        return (yield Call("generator", ask, after=first))

    def crowded():
        few = dataclasses.replace(SETTINGS, prefixes=5)
        served = Engine(PARAMS, CONFIG, few, adapters=adapters(1), adapter_scale=SCALE, policies=POLICIES)
        episodes = run(consults, served, {"generator": "a"}, samples=4)
        assert served.stats.prefilled_tokens > prefills(episodes)  # rows did run short
        return timeless(episodes), served.stats

    assert crowded() == crowded()


def test_what_an_engine_did_before_changes_nothing():
    """Prompts held over would decide which rows are given up, and so what is computed again, and its last bits."""
    served = engine()
    policy_map = {"generator": "a", "evaluator": "b"}
    runs, fed = [], []
    for _ in range(2):
        before = served.stats.prefilled_tokens
        runs.append(timeless(run(eval_opt, served, policy_map, samples=1)))
        fed.append(served.stats.prefilled_tokens - before)
    assert runs[0] == runs[1]
    assert fed[0] == fed[1]


def in_the_callback(monkeypatch):
    def interrupt(progress):
        if progress.dispatches == 5:
            raise KeyboardInterrupt

    return interrupt


def while_decoding(monkeypatch):
    """The signal may come when the program has taken the cache and the engine has not got it back."""
    decode, dispatches = programs.decode, []

    def interrupted(*args, **kwargs):
        decode(*args, **kwargs)
        raise KeyboardInterrupt

    def count(progress):
        dispatches.append(progress.dispatches)
        if len(dispatches) == 5:
            monkeypatch.setattr(programs, "decode", interrupted)

    return count


def while_prefilling(monkeypatch):
    prefill = programs.prefill

    def interrupted(*args, **kwargs):
        prefill(*args, **kwargs)
        raise KeyboardInterrupt

    return lambda progress: monkeypatch.setattr(programs, "prefill", interrupted)


@pytest.mark.parametrize("stop", [in_the_callback, while_decoding, while_prefilling])
def test_after_ctrl_c_the_engine_serves_as_a_new_one(stop, monkeypatch):
    served, policy_map = engine(), {"generator": "a", "evaluator": "b"}
    expected = timeless(run(eval_opt, engine(), policy_map))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run(eval_opt, served, policy_map, progress=stop(patch))
    assert served.pending == 0
    assert timeless(run(eval_opt, served, policy_map)) == expected


def test_an_engine_that_is_busy_with_something_else_is_refused():
    served = engine()
    served.submit(Request(tokens=(1, 2), key=(0,), max_new_tokens=4, policy="a"))
    with pytest.raises(RuntimeError, match=r"1 requests under way: finish or abandon\(\) them"):
        run(voting, served, dict.fromkeys(voting.roles, "a"))
    assert served.pending == 1


@pytest.mark.parametrize("flow", [voting, eval_opt])
def test_policies_with_weights_of_their_own_have_their_own_engines(flow):
    weights = {f"p{i}": init(jax.random.key(10 + i), CONFIG) for i in range(2)}
    engines = {name: Engine(params, CONFIG, SETTINGS, policies=(name,)) for name, params in weights.items()}
    episodes = run(flow, engines, isolated(flow.roles))
    check_logprobs(episodes, weights)


@pytest.mark.parametrize(
    "settings, names, message",
    [
        (
            {},
            (),
            r"role 'generator' cannot answer: no policy 'p0' is served here; name it when the engine is built: Engine",
        ),
        ({"top_k": 5}, ("p0",), "planned without truncation"),
        ({"min_new_tokens": 3}, ("p0",), "planned without min_new_tokens"),
        ({"max_new_tokens": 10_000}, ("p0",), "shorten the prompt or max_new_tokens"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused_before_anything_runs(settings, names, message):
    served = Engine(init(jax.random.key(0), CONFIG), CONFIG, SETTINGS, policies=names)
    with pytest.raises(ValueError, match=message):
        rollout(
            voting,
            TASKS,
            served,
            TOKENIZER,
            dict.fromkeys(voting.roles, "p0"),
            prompts=load_prompts("math", "micro"),
            parse=lambda task, text: None,
            settings=SamplingSettings(**{"max_new_tokens": 12, **settings}),
        )
    assert served.pending == 0
