"""One script per question; the last line of its output is one JSON object."""

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from marl_jax.models import ModelConfig
from marl_jax.sampling import programs
from marl_jax.sampling.admission import Admission, Waiting

BENCH = ModelConfig(  # 0.85M parameters, the micro shape of all benchmarks
    vocab_size=512,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)

MAX_NEW = 64  # tokens of the longest completion whose length is imposed


class Unannounced(Admission):
    """Queues every request as if it might run to the limit, because imposed lengths are not known in advance."""

    def _rung(self, waiting: Waiting) -> int:
        request = dataclasses.replace(waiting.request, max_new_tokens=MAX_NEW)
        return super()._rung(waiting._replace(request=request))


@dataclasses.dataclass
class Decoding:
    """All dispatches, and the seconds in which at least one was running; filled in when the context ends."""

    seconds: float = 0.0
    dispatches: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)  # positions before, `Sampled`


@contextlib.contextmanager
def watch_decoding() -> Iterator[Decoding]:
    """Record every dispatch of every engine without blocking any."""
    decode, watched, spans = programs.decode, Decoding(), []

    def wait(start: float, sampled: programs.Sampled) -> tuple[float, float]:
        jax.block_until_ready(sampled)
        return start, time.perf_counter()

    def begin(params: Any, adapters: Any, cache: Any, lanes: programs.Lanes, **kwargs: Any) -> Any:
        position, start = lanes.position.copy(), time.perf_counter()
        cache, sampled = decode(params, adapters, cache, lanes, **kwargs)
        spans.append(watchers.submit(wait, start, sampled))
        watched.dispatches.append((position, sampled))
        return cache, sampled

    with concurrent.futures.ThreadPoolExecutor(8) as watchers, mock.patch.object(programs, "decode", begin):
        yield watched
    end = 0.0
    for start, stop in sorted(span.result() for span in spans):
        watched.seconds += max(0.0, stop - max(start, end))
        end = max(end, stop)
