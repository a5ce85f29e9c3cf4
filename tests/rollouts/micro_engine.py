"""One micro model and one shape of engine for all tests here, and the log-probs they must come to."""

import dataclasses

import jax
import numpy as np

from marl_jax.models import ModelConfig, forward
from marl_jax.sampling import EngineSettings

CONFIG = dataclasses.replace(ModelConfig.preset("xs"), num_hidden_layers=1)
SETTINGS = EngineSettings(
    widths=(16,), lengths=(256,), chunks=(32,), prefill_tokens=256, prefixes=96, steps=4
)
RANK, SCALE = 4, 2.0

_logprobs = jax.jit(lambda params, tokens: jax.nn.log_softmax(forward(params, CONFIG, tokens)[0]))


def check_logprobs(episodes, weights):
    """Every call's log-probs against one forward pass of its policy's own (merged) weights."""
    for call in (call for episode in episodes for call in episode.calls):
        tokens = np.zeros((1, SETTINGS.context), np.int32)
        tokens[0, : len(call.prompt_tokens + call.tokens)] = call.prompt_tokens + call.tokens
        logp = np.asarray(_logprobs(weights[call.policy], tokens))
        at = len(call.prompt_tokens) - 1 + np.arange(len(call.tokens))
        np.testing.assert_allclose(call.logprobs, logp[at, call.tokens], atol=2e-5)
