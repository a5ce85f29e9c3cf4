"""The mean log-prob of what was said, against a softmax in float64 over the model's own logits."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from marl_jax.episodes import CallRecord
from marl_jax.models import ModelConfig, forward, init, save_hf
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.rewards.likelihood import ROWS, mean_logprobs

MODEL = dataclasses.replace(
    ModelConfig.preset("xs"), num_hidden_layers=1, hidden_size=32, intermediate_size=64
)
PARAMS = init(0, MODEL)


def said(prompt, tokens):
    where = {"role": "a", "policy": "p0", "slot": 0, "turn": 0, "text": "", "answer": None}
    return CallRecord(
        **where, prompt_tokens=prompt, tokens=tokens, logprobs=(0.0,) * len(tokens), finish_reason="stop"
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    save_hf(directory, MODEL, PARAMS, build_micro_tokenizer())
    return str(directory)


def by_hand(call):
    ids = np.array([[*call.prompt_tokens, *call.tokens]])
    logits = np.asarray(forward(PARAMS, MODEL, ids), np.float64)[0]
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    first = len(call.prompt_tokens)
    return np.mean([logp[i - 1, ids[0, i]] for i in range(first, ids.shape[1])])


@pytest.mark.long
def test_it_is_the_mean_over_the_tokens_that_were_said(base):
    rng = np.random.default_rng(0)
    lengths = [(3, 4), (1, 1), (30, 90), *[(5, 7)] * ROWS]  # more than one program's rows, two lengths
    calls = [said(*(tuple(rng.integers(3, 40, n).tolist()) for n in pair)) for pair in lengths]
    assert mean_logprobs(base, calls) == pytest.approx([by_hand(call) for call in calls], abs=2e-5)
    assert mean_logprobs(base, [said((1, 2), ())]) == [0.0] and mean_logprobs(base, []) == []


def test_a_model_that_is_stored_in_float16_is_read_as_it_is_asked_for(base, tmp_path):
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    about = json.loads((tmp_path / "config.json").read_text())
    half = dict.fromkeys(("dtype", "torch_dtype"), "float16")
    (tmp_path / "config.json").write_text(json.dumps(about | half))
    calls = [said((1, 2), (3, 4))]
    with pytest.raises(ValueError, match="with dtype="):
        mean_logprobs(str(tmp_path), calls)
    assert mean_logprobs(str(tmp_path), calls, dtype="float32") == mean_logprobs(base, calls)


def test_ids_of_another_tokenizer_are_told(base):
    with pytest.raises(ValueError, match=f"token {MODEL.vocab_size} is beyond the vocabulary"):
        mean_logprobs(base, [said((1,), (MODEL.vocab_size,))])


def test_a_model_that_is_written_again_is_read_again(tmp_path):
    call = said((1, 2), (3, 4))
    values = []
    for seed in (0, 1):
        save_hf(tmp_path, MODEL, init(seed, MODEL), build_micro_tokenizer())
        values += mean_logprobs(str(tmp_path), [call])
    assert values[0] == pytest.approx(by_hand(call), abs=1e-5) and abs(values[1] - values[0]) > 1e-4


def test_a_call_beyond_the_positions_of_the_model_is_refused(base):
    with pytest.raises(ValueError, match=r"a call of \d+ tokens is longer than"):
        mean_logprobs(base, [said((1,), (2,) * MODEL.max_position_embeddings)])
