"""Sampling alone: the engine in one call, from any Qwen3 directory.

python -m examples.sample [DIRECTORY]
"""

import sys

from marl_jax.models import load_hf
from marl_jax.models.tokenizer import load_tokenizer
from marl_jax.rollouts import Chat
from marl_jax.sampling import generate

directory = sys.argv[1] if len(sys.argv) > 1 else "configs/bases/micro-s"
config, params = load_hf(directory)
tokenizer = load_tokenizer(directory, config)
prompt = Chat(tokenizer).start([{"role": "user", "content": "47+38=?"}])
for completion in generate(
    params, config, [prompt] * 4, max_new_tokens=32, temperature=0.7, seed=0, stop_tokens=config.stop_tokens
):
    print(completion.finish_reason, sum(completion.logprobs), repr(tokenizer.decode(completion.tokens)))
