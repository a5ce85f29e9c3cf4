"""How fast is sampling, against the memory bandwidth, against vLLM and, on CPU, against transformers `generate`?

    python -m benchmarks.sampling                                     # micro model, side by side with torch on CPU
    python -m benchmarks.sampling --vllm --notorch                    # with a vLLM server, which make vllm installs
    python -m benchmarks.sampling --shape=0.6b --lanes=256 --prompts=256 --samples=1 --prompt=448 --new=64

Prints one JSON object on the last line. Rates are medians over rounds in which the contenders take turns.
`mbu` = bytes that decoding must move / time / bandwidth. It must read the weights once per step and the cached tokens
of every active lane, and nothing else: padding, idle lanes and copies count as waste.
"""

import dataclasses
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import BENCH, watch_decoding
from marl_jax.models import ModelConfig, init, save_hf
from marl_jax.models.decode import cache_bytes
from marl_jax.models.tokenizer import build_micro_tokenizer
from marl_jax.models.weight_table import num_parameters
from marl_jax.rollouts.vllm.started import ServerRequirements, Started
from marl_jax.rollouts.vllm.vllm_config import VllmConfig
from marl_jax.rollouts.vllm.wire import Server
from marl_jax.sampling import Engine, Load, Request, plan
from marl_jax.threads import Workers

FLAGS = flags.FLAGS
flags.DEFINE_string("shape", "bench", "bench (0.8M parameters) or a preset of ModelConfig")
flags.DEFINE_integer("prompts", 64, "different prompts")
flags.DEFINE_integer("samples", 8, "samples of each prompt")
flags.DEFINE_integer("prompt", 64, "tokens of a prompt")
flags.DEFINE_integer("new", 64, "new tokens of each sample; ragged lengths are uniform from 4 to this")
flags.DEFINE_integer("lanes", None, "lanes of the engine; by default as planned")
flags.DEFINE_integer("rounds", 3, "measured rounds")
flags.DEFINE_bool("torch", True, "run transformers beside it (CPU only)")
flags.DEFINE_bool("vllm", False, "run a vLLM server beside it, asked as a run asks it")
flags.DEFINE_string("vllm_python", VllmConfig().python, "the Python of its environment")
flags.DEFINE_string("vllm_flags", "", "added to its command, such as --enforce-eager")
flags.DEFINE_bool(
    "continuous_batching", False, "run transformers' continuous batching, too; on CPU it may take minutes"
)

Run = Callable[[list[int]], float]  # lengths -> seconds


def main(_: list[str]) -> None:
    config = BENCH if FLAGS.shape == "bench" else ModelConfig.preset(FLAGS.shape)
    rng = np.random.default_rng(0)
    unique = rng.integers(0, config.vocab_size, (FLAGS.prompts, FLAGS.prompt)).tolist()
    prompts = [prompt for prompt in unique for _ in range(FLAGS.samples)]
    lengths = {
        "fixed": [FLAGS.new] * len(prompts),
        "ragged": rng.integers(4, FLAGS.new + 1, len(prompts)).tolist(),
    }
    params = init(0, config)
    ours = Ours(params, config, prompts)
    runs: dict[str, Run] = {"marl_jax": ours}
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "parameters": num_parameters(config),
        "requests": len(prompts),
        "prompt_tokens": FLAGS.prompt,
        "bandwidth_gb_s": round(bandwidth() / 1e9, 1),
        "settings": {
            k: v
            for k, v in vars(ours.engine.settings).items()
            if k in ("banks", "widths", "lengths", "steps")
        },
    }
    served = Served(params, config, prompts) if FLAGS.vllm else None
    if served is not None:
        runs["vllm"] = served
        report["vllm"] = served.version
    if FLAGS.torch and jax.default_backend() == "cpu":
        runs["transformers"] = transformers_run(config, prompts)
    for name, wanted in lengths.items():
        seconds = take_turns(runs, wanted)
        rates = {who: sum(wanted) / statistics.median(times) for who, times in seconds.items()}
        report[name] = {f"{who}_tokens_s": round(rate) for who, rate in rates.items()}
        report[name] |= ours.measure(wanted)
        for other in rates.keys() - {"marl_jax"}:
            pairs = zip(seconds[other], seconds["marl_jax"])
            report[name][f"times_{other}"] = round(statistics.median(a / b for a, b in pairs), 2)
    if served is not None:
        served.close()
    if FLAGS.continuous_batching:
        report["transformers_continuous_batching"] = continuous_batching(config, prompts, lengths["fixed"])
    print(json.dumps(report))


class Ours:
    """The engine; the first run compiles what it needs."""

    def __init__(self, params: Any, config: ModelConfig, prompts: list[list[int]]):
        self.config, self.prompts = config, prompts
        load = Load(FLAGS.prompt, FLAGS.new, min_prompt=FLAGS.prompt, requests=len(prompts))
        settings = plan(config, load, lanes=FLAGS.lanes)
        self.engine = Engine(params, config, settings)
        self.round = 0

    def __call__(self, lengths: list[int]) -> float:
        self.engine.update()  # so that no prompt is still cached
        self.round += 1
        start = time.perf_counter()
        for i, (prompt, length) in enumerate(zip(self.prompts, lengths)):
            self.engine.submit(Request(tuple(prompt), key=(self.round, i), max_new_tokens=length))
        sampled = 0
        while self.engine.pending:
            sampled += sum(len(completion.tokens) for _, completion in self.engine.step())
        assert sampled == sum(lengths)
        return time.perf_counter() - start

    def measure(self, lengths: list[int]) -> dict[str, float]:
        """Useful-token share and bandwidth use of one more run, dispatch by dispatch."""
        stats, before = self.engine.stats, dataclasses.replace(self.engine.stats)
        unread = 0 if self.config.tie_word_embeddings else self.config.vocab_size * self.config.hidden_size
        weights = (num_parameters(self.config) - unread) * jnp.dtype(self.config.dtype).itemsize
        token, moved = cache_bytes(self.config, 1, 1), 0
        with watch_decoding() as decoding:
            seconds = self(lengths)
        for position, out in decoding.dispatches:
            sampled = np.asarray(out.sampled)  # [steps,W]
            cached = position + np.cumsum(sampled, axis=0)  # by each lane when it samples its step
            moved += int(sampled.any(axis=1).sum()) * weights + int(cached[sampled].sum()) * token
        spent = {name: value - getattr(before, name) for name, value in vars(stats).items()}
        return {
            "useful_share": round(spent["sampled_tokens"] / spent["lane_steps"], 3),
            "prefilled_tokens": spent["prefilled_tokens"],
            "decoding_share": round(decoding.seconds / seconds, 3),
            "gb_moved": round(moved / 1e9, 2),
            "mbu": round(moved / decoding.seconds / bandwidth(), 3),
        }


class Served:
    """A vLLM server on this machine, with the same weights: a request for each sample, all in flight, over HTTP."""

    def __init__(self, params: Any, config: ModelConfig, prompts: list[list[int]]):
        self.folder, self.prompts, self.round = Path(tempfile.mkdtemp()), prompts, 0
        self.base = str(self.folder / "base")
        # One sign for each token but 4.
        signs = "".join(map(chr, range(0x10000, 0x10000 + config.vocab_size - 4)))
        save_hf(self.base, config, params, build_micro_tokenizer((), signs))
        # Dev mode has the route that drops cached prompts. On CPU, vLLM's cache takes nearly all memory by default.
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
        # On a CPU vLLM 0.32 crashes if the prompt of a request with a seed is split into chunks.
        unchunked = "--no-enable-chunked-prefill" if jax.default_backend() == "cpu" else ""
        flags = f"{FLAGS.vllm_flags} {unchunked}"
        chosen = VllmConfig(start=True, python=FLAGS.vllm_python, flags=flags, environment=environment)
        needed = ServerRequirements(
            self.base, str(config.dtype), FLAGS.prompt + FLAGS.new, adapters=0, rank=0
        )
        self.started = Started(chosen, needed, self.folder / "log")
        self.server = Server(self.started.start(), chosen.timeout)
        self.version = self.server.ask("/version")["version"]
        self.workers = Workers("vllm", len(prompts))

    def __call__(self, lengths: list[int]) -> float:
        # It fails while the last requests still use a part of the cache.
        while not self.server.ask("/reset_prefix_cache", {})["success"]:
            time.sleep(0.01)
        self.round += 1
        start = time.perf_counter()
        jobs = [
            self.workers.submit(
                self.server.complete,
                Request(tuple(prompt), key=(self.round, i), max_new_tokens=length),
                self.base,
            )
            for i, (prompt, length) in enumerate(zip(self.prompts, lengths))
        ]
        assert sum(len(job.result().tokens) for job in jobs) == sum(lengths)
        return time.perf_counter() - start

    def close(self) -> None:
        self.started.end()
        shutil.rmtree(self.folder)


def bandwidth() -> float:
    """Bytes/s that this device reads and writes in the best of eight runs, each long enough to hide its dispatch."""
    on_cpu = jax.default_backend() == "cpu"
    x, passes = jnp.zeros((64 if on_cpu else 512) << 20, jnp.float32), 1 if on_cpu else 8
    increment = jax.jit(lambda x: jax.lax.fori_loop(0, passes, lambda _, x: x + 1, x), donate_argnums=0)
    x, best = jax.block_until_ready(increment(x)), 1e9
    for _ in range(8):
        start = time.perf_counter()
        x = jax.block_until_ready(increment(x))
        best = min(best, time.perf_counter() - start)
    return 2 * x.nbytes * passes / best


def take_turns(runs: dict[str, Run], lengths: list[int]) -> dict[str, list[float]]:
    """Seconds per round of each contender, after one unmeasured round."""
    seconds: dict[str, list[float]] = {who: [] for who in runs}
    for i in range(FLAGS.rounds + 1):
        for who, run in runs.items():
            time_taken = run(lengths)
            if i:
                seconds[who].append(time_taken)
    return seconds


def transformers_run(config: ModelConfig, prompts: list[list[int]]) -> Run:
    """One `generate` over all rows on torch CPU, each row ending at its imposed length."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    model = transformers_model(config)
    tokens = torch.tensor(prompts)

    class AtLength(StoppingCriteria):
        def __init__(self, lengths: list[int]):
            self.ends = torch.tensor(lengths) + tokens.shape[1]

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] >= self.ends

    def run(lengths: list[int]) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                max_new_tokens=max(lengths),
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([AtLength(lengths)]),
            )
        return time.perf_counter() - start

    return run


def transformers_model(config: ModelConfig) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    published = {
        k: v for k, v in config.to_hf().items() if k not in ("torch_dtype", "dtype", "architectures")
    }
    return Qwen3ForCausalLM(Qwen3Config(**published)).eval()


def continuous_batching(config: ModelConfig, prompts: list[list[int]], lengths: list[int]) -> Any:
    """Tokens/s of transformers' own continuous batching, or why it does not run here."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        max_new_tokens=max(lengths), do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    try:
        model = transformers_model(config)
        start = time.perf_counter()
        done = model.generate_batch(inputs=prompts, generation_config=settings)
        seconds = time.perf_counter() - start
        return round(sum(len(one.generated_tokens) for one in done.values()) / seconds)
    except Exception as error:  # it is new, and made for GPUs: whatever stops it is the answer
        return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    app.run(main)
