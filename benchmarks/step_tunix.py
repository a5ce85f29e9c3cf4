"""tunix's side of `benchmarks.step`, run by the Python of its own environment; it imports nothing of marl_jax.

Reads the work as JSON from standard input, prints the seconds of its steps as JSON on the last line.
"""

import itertools
import json
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

END, PROMPTS = 0, 8  # the end of a text; prompts whose completions are differentiated at a time


class Numbers:
    """A tokenizer of numbers between blanks."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return END

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return END


def main() -> None:
    work = json.load(sys.stdin)
    size, samples, count = work["model"], work["samples"], len(work["prompts"])
    model = qwen3.Qwen3(
        qwen3.ModelConfig(
            num_layers=size["num_hidden_layers"],
            vocab_size=size["vocab_size"],
            embed_dim=size["hidden_size"],
            hidden_dim=size["intermediate_size"],
            num_heads=size["num_attention_heads"],
            head_dim=size["head_dim"],
            num_kv_heads=size["num_key_value_heads"],
            rope_theta=int(size.get("rope_theta") or size["rope_parameters"]["rope_theta"]),
            norm_eps=size["rms_norm_eps"],
            use_tied_embedding=size["tie_word_embeddings"],
        ),
        rngs=nnx.Rngs(0),
    )
    longest = max(map(len, work["prompts"]))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    steps = work["steps"] + 2  # an unmeasured first one, and one whose start ends the last measured one
    cluster = rl_cluster.RLCluster(
        actor=model,
        tokenizer=Numbers(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(work["learning_rate"]),
                eval_every_n_steps=1 << 30,
                max_steps=steps,
                mini_batch_size=count,
                train_micro_batch_size=min(PROMPTS, count),
                rollout_micro_batch_size=count,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=work["new"],
                max_prompt_length=longest,
                kv_cache_size=longest + work["new"],
                temperature=1.0,
                top_p=None,
                eos_tokens=[size["vocab_size"]],  # which is never sampled
            ),
        ),
    )
    impose(cluster.rollout, work["lengths"])
    starts: list[float] = []

    def reward(completions: list[str], **_: object) -> list[float]:
        starts.append(time.perf_counter())
        numbers = [np.array(text.split(), int) for text in completions]
        return [float(np.mean(some % 2 == 0)) for some in numbers]

    learner = GRPOLearner(cluster, GRPOConfig(num_generations=samples, beta=0.0), reward_fns=reward)
    prompts = np.array([" ".join(map(str, prompt)) for prompt in work["prompts"]])
    with mesh:
        learner.train([{"prompts": prompts} for _ in range(steps)])
    print(json.dumps([after - before for before, after in itertools.pairwise(starts[1:])]))


def impose(rollout: object, lengths: list[int]) -> None:
    """Make the rollout return completions of these lengths: sampled to the longest, and cut."""
    generate = rollout.generate

    def imposed(prompts: list[str], rollout_config: RolloutConfig, **options: object) -> object:
        out = generate(prompts, rollout_config, **options)
        assert len(out.tokens) == len(lengths)
        out.tokens = [
            np.where(tokens[:length] == END, END + 1, tokens[:length])
            for tokens, length in zip(map(np.asarray, out.tokens), lengths)
        ]
        out.text = [" ".join(map(str, tokens)) for tokens in out.tokens]
        return out

    rollout.generate = imposed


if __name__ == "__main__":
    main()
