"""A request that cannot be served is refused in one clear line before anything is compiled."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from kit import CONFIG, SETTINGS, ask, compilations, prompt

from marl_jax.models.lora import init_lora
from marl_jax.sampling import Engine, EngineSettings, Features, Load, Request, generate, plan
from marl_jax.sampling.shapes import memory_bytes

FINE = {"prompts": [[1, 2, 3], [4]], "max_new_tokens": 4, "seed": 0}
BAD = [
    ({"prompts": [[1], []]}, ValueError, "prompt is empty"),
    ({"prompts": [[1] * 510]}, ValueError, "514 positions; the model has 512"),
    ({"prompts": [[1, 96]]}, ValueError, "prompt holds token 96; the vocabulary is 0..95"),
    ({"prompts": [[-1]]}, ValueError, "prompt holds token -1"),
    ({"prompts": [[1, 2.0]]}, TypeError, "prompt holds 2.0"),
    ({"prompts": [[True]]}, TypeError, "prompt holds True"),
    ({"prompts": [[None]]}, TypeError, "prompt holds None"),
    ({"prompts": [[[1, 2]]]}, TypeError, r"prompt holds \[1, 2\]"),
    ({"prompts": [1, 2, 3]}, TypeError, "prompt is 1; it must be a list of token ids"),
    ({"prompts": jnp.arange(3)}, TypeError, "prompt is 0; it must be a list of token ids"),
    ({"prompts": ["what is\n2+2?"]}, TypeError, "prompt is 'what is.*encode text with the tokenizer"),
    ({"prompts": [b"bytes"]}, TypeError, "prompt is b'bytes'"),
    ({"prompts": "what is\n2+2?" * 100}, TypeError, "prompts is 'what is"),
    ({"prompts": None}, TypeError, "prompts is None"),
    ({"temperature": -0.1}, ValueError, "temperature is -0.1"),
    ({"temperature": float("nan")}, ValueError, "temperature is nan"),
    ({"temperature": float("inf")}, ValueError, "temperature is inf"),
    ({"temperature": "hot"}, ValueError, "temperature is 'hot'"),
    ({"temperature": [0.5]}, ValueError, "temperature has 1 values for 2 prompts"),
    ({"top_p": 0}, ValueError, "top_p is 0; it must be above 0 and at most 1"),
    ({"top_p": 1.5}, ValueError, "top_p is 1.5"),
    ({"top_p": float("nan")}, ValueError, "top_p is nan"),
    ({"top_p": None}, ValueError, "top_p is None"),
    ({"top_k": -1}, ValueError, "top_k is -1"),
    ({"top_k": 2.5}, ValueError, "top_k is 2.5"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens is 0"),
    ({"max_new_tokens": 1.5}, ValueError, "max_new_tokens is 1.5"),
    ({"min_new_tokens": 5}, ValueError, "min_new_tokens is 5"),
    ({"min_new_tokens": -1}, ValueError, "min_new_tokens is -1"),
    ({"stop_tokens": [96]}, ValueError, "stop_tokens holds token 96"),
    ({"stop_tokens": 3}, TypeError, "stop_tokens is 3"),
    ({"stop_strings": [""]}, ValueError, "stop_strings is"),
    ({"stop_strings": "x"}, ValueError, "stop_strings need a tokenizer"),
    ({"seed": None}, ValueError, "needs a seed"),
    ({"seed": 1.5}, TypeError, "seed is 1.5; it must be an integer"),
    ({"seed": "x"}, TypeError, "seed is 'x'"),
    ({"request_ids": [1]}, ValueError, "request_ids has 1 values for 2 prompts"),
    ({"request_ids": [1, "b"]}, TypeError, "request id is 'b'"),
    ({"record_kept": True}, ValueError, "top_k is 0; a recorded kept set needs"),
    ({"record_kept": True, "top_k": 513}, ValueError, "top_k is 513; a recorded kept set needs"),
    ({"adapter_index": [0, 1]}, ValueError, "adapter_index is given without adapters"),
    ({"lanes": 0}, ValueError, "lanes is 0"),
    ({"budget_bytes": 10_000}, ValueError, "1 lane of 16 tokens need .* the budget is 0.0 MiB"),
    ({"budget_bytes": 10_000, "lanes": 4}, ValueError, "4 lanes of 16 tokens need"),
]


def refused(error, match, call, *args, **options):
    with compilations() as counted, pytest.raises(error, match=match) as raised:
        call(*args, **options)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300
    assert counted == [0]


@pytest.mark.parametrize(("change", "error", "match"), BAD, ids=lambda value: repr(value)[:40])
def test_generate_refuses(params, change, error, match):
    refused(error, match, generate, params, CONFIG, **(FINE | change))


def test_weights_of_another_dtype_than_the_configs_are_refused(params):
    narrow = dataclasses.replace(CONFIG, dtype="bfloat16")
    refused(
        ValueError, "the weights are float32, and config.dtype is bfloat16", generate, params, narrow, **FINE
    )


@pytest.mark.parametrize("index", [[0, 2], [-2, 0], [0, "a"]])
def test_an_adapter_that_is_not_there_is_refused(params, index):
    adapters = init_lora(0, CONFIG, 2, 2)
    refused(
        ValueError,
        "adapter_index holds .* there are 2 adapters",
        generate,
        params,
        CONFIG,
        adapters=adapters,
        adapter_index=index,
        **FINE,
    )


def test_the_longest_prompt_need_not_have_room_for_the_longest_completion(params):
    short = dataclasses.replace(CONFIG, max_position_embeddings=64)
    asked = {"prompts": [prompt(5), prompt(60)], "seed": 0, "lanes": 8}
    found = generate(params, short, max_new_tokens=[59, 4], **asked)
    assert [len(completion.tokens) for completion in found] == [59, 4]
    with pytest.raises(ValueError, match="60 tokens and 5 new ones need 65 positions; the model has 64"):
        generate(params, short, max_new_tokens=[59, 5], **asked)


def test_the_settings_of_a_good_request_may_be_arrays(params):
    plain = generate(params, CONFIG, [[1, 2], [3]], max_new_tokens=2, seed=3, lanes=8, temperature=0.5)
    arrays = generate(
        params,
        CONFIG,
        [np.array([1, 2]), jnp.array([3])],
        max_new_tokens=np.array([2, 2]),
        seed=np.int64(3),
        lanes=8,
        temperature=np.array(0.5),
        request_ids=np.arange(2),
    )
    assert arrays == plain


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (ask([1], policy="other"), "no policy 'other' is served here; name it when the engine is built"),
        (ask(prompt(40), new=25), "need 65 positions; this engine has 64"),
        (ask([1, 200]), "prompt holds token 200"),
        (ask([1], stop_tokens=(1, 2, 3, 4, 5)), "5 stop tokens; this engine takes up to 4"),
        (ask([1], stop_strings=("a",)), "stop_strings need a tokenizer"),
    ],
)
def test_an_engine_refuses_what_it_was_not_planned_for(engine, request_, match):
    refused(ValueError, match, engine.submit, request_)
    assert engine.pending == 0


def test_an_engine_without_a_feature_says_so(params):
    engine = Engine(params, CONFIG, dataclasses.replace(SETTINGS, features=Features()))
    refused(ValueError, "planned without truncation", engine.submit, ask([1], top_p=0.5))
    refused(ValueError, "planned without min_new_tokens", engine.submit, ask([1], min_new_tokens=1))
    keeper = Engine(
        params, CONFIG, dataclasses.replace(SETTINGS, features=Features(truncate=True, candidates=4))
    )
    refused(ValueError, r"top_k is 5; .* needs top_k of 1\.\.4", keeper.submit, ask([1], top_k=5))


def test_keys_of_requests_are_integers():
    with pytest.raises(TypeError, match=r"key is 0\.5; it must be an integer"):
        Request(tokens=(1,), key=(1, 0.5), max_new_tokens=1)


def test_weights_never_change_under_running_requests(params, engine):
    engine.submit(ask([1]))
    refused(RuntimeError, "1 requests are under way", engine.update, params=params)


def test_more_policies_than_adapters_are_refused(params):
    adapters = init_lora(0, CONFIG, 2, 2)
    with pytest.raises(ValueError, match="3 policies are named for 2 adapters"):
        Engine(params, CONFIG, SETTINGS, adapters=adapters, policies=("a", "b", "c"))
    with pytest.raises(ValueError, match="policies names a policy twice: a, a"):
        Engine(params, CONFIG, SETTINGS, adapters=adapters, policies=("a", "a"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"widths": (8, 16)}, r"widths is \(8, 16\); it must be falling and positive"),
        ({"lengths": ()}, r"lengths is \(\); it must be rising and positive"),
        ({"chunks": (0, 8)}, r"chunks is \(0, 8\)"),
        ({"widths": (64, 32, 16), "lengths": (1, 2, 3, 4, 5)}, "15 decode programs, more than 12"),
        ({"steps": 0}, "must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(SETTINGS, **change)


def test_lanes_follow_from_the_byte_budget():
    before = 10**9
    for budget in (8 << 20, 4 << 20, 1 << 20):
        settings = plan(CONFIG, Load(100, 28, requests=512), budget_bytes=budget)
        assert memory_bytes(CONFIG, settings) <= budget
        assert settings.context == 128
        assert settings.lanes < before
        before = settings.lanes
        # the budget is used: twice the lanes would not fit
        with pytest.raises(ValueError, match="lanes of 128 tokens need"):
            plan(CONFIG, Load(100, 28), lanes=4 * settings.lanes, budget_bytes=budget)


def test_a_plan_has_at_most_a_dozen_decode_programs_and_prefills_every_prompt_at_once():
    for lanes in (1, 8, 64, 100, 512):
        for max_prompt, max_new in ((1, 1), (40, 24), (5, 400), (300, 212)):
            settings = plan(CONFIG, Load(max_prompt, max_new), lanes=lanes, budget_bytes=1 << 30)
            assert isinstance(settings, EngineSettings)
            assert len(settings.widths) * len(settings.lengths) <= 12
            assert settings.lanes == lanes
            assert settings.chunks[-1] == max_prompt
            assert max_prompt + max_new <= settings.context < max_prompt + max_new + 16
