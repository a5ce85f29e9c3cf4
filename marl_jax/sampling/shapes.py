"""Shapes of an engine and the memory that they take, chosen before anything is allocated or compiled.

`plan` turns a byte budget and the lengths to serve into `EngineSettings`: the number of lanes, the widths and
attended lengths that get a program, the chunks of prompts. The same settings give the same bits; they are small,
frozen and JSON-like, so that a run can store them and use them again.
"""

import bisect
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from marl_jax import user_cache
from marl_jax.models import ModelConfig
from marl_jax.models.decode import cache_bytes
from marl_jax.models.weight_table import num_parameters
from marl_jax.sampling.programs import Features
from marl_jax.sampling.rungs import apportion, best_lengths

MAX_PROGRAMS = 12  # decode shapes per configuration
RUNGS = 8  # at most; more rungs pad less, but each makes every decode program longer
# Below this many rows the matrix products of a CPU round differently, so a batch that thins out is never made
# narrower than this; whether wider batches agree to the bit is measured (`stability`).
STABLE_WIDTH = 64


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes at which a kind of device runs at full speed; larger ones only add padding and idle lanes."""

    lanes: int  # default maximum
    steps: int  # per dispatch: more if a dispatch is costly, but lanes that end early idle until its end
    prefill_tokens: int  # tokens of one prefill
    columns: int  # attended lengths are multiples of this
    banks: int  # more than one if a program leaves some of the device idle
    # Narrower batches may compute the same bits; on an H100 none did, on TPUs none is assumed to.
    compacts: bool


CPU = Sizes(lanes=256, steps=4, prefill_tokens=512, columns=16, banks=2, compacts=True)
ACCELERATOR = Sizes(lanes=512, steps=8, prefill_tokens=2048, columns=128, banks=1, compacts=False)


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The static shapes of an engine."""

    widths: tuple[int, ...]  # numbers of lanes of a bank, falling: it is compacted as it thins out
    # Cache lengths, rising: those to which a bank's cache grows with its longest lane, or those of the rungs.
    lengths: tuple[int, ...]
    chunks: tuple[int, ...]  # prompt lengths that one prefill takes, rising
    prefill_tokens: int  # tokens of one prefill, over all its rows
    prefixes: int  # prompts cached for reuse
    steps: int = 8  # decode steps per dispatch
    stops: int = 8  # stop tokens per request, at most
    features: Features = Features()  # optional features of its programs
    # If memory is short: the number of lanes of each length, all in memory at the same time (`rungs`).
    lanes_at: tuple[int, ...] = ()
    banks: int = 1  # groups of lanes that take turns (`banks`)

    def __post_init__(self) -> None:
        for name, order in (("widths", "falling"), ("lengths", "rising"), ("chunks", "rising")):
            values = getattr(self, name)
            ordered = sorted(set(values), reverse=order == "falling")
            if not values or min(values) < 1 or list(values) != ordered:
                raise ValueError(f"{name} is {values}; it must be {order} and positive")
        if self.lanes_at:
            one_each = len(self.lanes_at) == len(self.lengths) and min(self.lanes_at) >= 1
            if not one_each or self.widths != (sum(self.lanes_at),):
                raise ValueError(
                    f"lanes_at is {self.lanes_at}; it must be positive, one for each of the {len(self.lengths)} "
                    f"lengths, and add up to {self.widths}, the only width"
                )
            if self.banks > 1:
                raise ValueError(f"lanes_at is {self.lanes_at} with {self.banks} banks; it is for one bank")
        if len(self.shapes) > MAX_PROGRAMS:
            raise ValueError(
                f"{len(self.widths)} widths x {len(self.lengths)} lengths make {len(self.shapes)} decode programs, "
                f"more than {MAX_PROGRAMS}; give fewer of either"
            )
        if min(self.steps, self.stops, self.prefixes, self.prefill_tokens, self.banks) < 1:
            raise ValueError(f"steps, stops, prefixes, prefill_tokens and banks must be at least 1 in {self}")

    @property
    def lanes(self) -> int:
        """The largest number of lanes, in all banks together."""
        return self.banks * self.widths[0]

    @property
    def context(self) -> int:
        """The longest cache, in tokens."""
        return self.lengths[-1]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(width, length) of every decode program."""
        return list(itertools.product(self.widths, self.lengths))

    @property
    def rungs(self) -> list[tuple[int, int]]:
        """(lanes, length) of each cache that a bank begins with."""
        return list(zip(self.lanes_at, self.lengths)) or [(self.widths[0], self.lengths[0])]

    @property
    def caches(self) -> list[tuple[int, int]]:
        """(lanes, length) of each cache of all banks, when all have grown."""
        return self.rungs if self.lanes_at else self.banks * [(self.widths[0], self.context)]

    @property
    def copied(self) -> int:
        """The number of rows that one copy between caches takes; rows of rungs are long, and few enter at a time."""
        return min(8 if self.lanes_at else 64, self.widths[0])

    def chunk_of(self, length: int) -> int:
        """The shortest chunk with room for `length` tokens; the longest chunk if none has."""
        return next((chunk for chunk in self.chunks if chunk >= length), self.chunks[-1])

    def prefill_rows(self, chunk: int) -> int:
        """The number of prompts that one prefill of this chunk length takes.

        The number is fixed: fewer rows could round differently, and the bits of a prompt would depend on others.
        """
        return max(1, self.prefill_tokens // chunk)


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests that an engine is planned for."""

    max_prompt: int  # tokens of the longest prompt
    max_new: int  # tokens of the longest completion
    min_prompt: int = 1  # tokens of the shortest prompt
    requests: int | None = None  # number of requests; None: more than lanes
    histories: int = 0  # prompts kept for later turns at the same time (`Request.keep`)
    stops: int = 8  # stop tokens of a request, at most
    features: Features = Features()  # features that the requests need
    # (prompt, sampled) tokens of a sample of the calls; the rungs are chosen for them.
    calls: tuple[tuple[int, int], ...] = ()


def plan(
    config: ModelConfig,
    load: Load,
    *,
    budget_bytes: int | None = None,
    update_bytes: int = 0,
    lanes: int | None = None,
    steps: int | None = None,
    platform: str | None = None,
    devices: tuple[int, int] = (1, 1),
) -> EngineSettings:
    """Settings for a load within a byte budget.

    `lanes` and `steps` default to what keeps this kind of device busy; default lanes are at most the requests, rounded
    up, and fit the budget. It covers caches and working memory, not the weights, and is half of the free memory by
    default. Something that takes turns with the engine may need `update_bytes` of the budget while the caches stay.
    Histories get rows if memory is left. `platform` (cpu, gpu, tpu) is by default that of the device at hand. `devices`
    counts the devices that share the rows of caches and those that share their heads; the budget is that of one device.
    Lanes of each rung, and prefixes, are a multiple of the first count. The devices of a CPU share one memory.
    """
    for name, value in (("lanes", lanes), ("budget_bytes", budget_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    context = load.max_prompt + load.max_new
    if context > config.max_position_embeddings:
        raise ValueError(
            f"a prompt of {load.max_prompt} tokens and {load.max_new} new ones need {context} positions; "
            f"the model has {config.max_position_embeddings}: shorten the prompt or max_new_tokens"
        )
    sizes = CPU if (platform or jax.default_backend()) == "cpu" else ACCELERATOR
    rows, split = devices[0], (1, 1) if sizes is CPU else devices
    sizes = sizes if steps is None else dataclasses.replace(sizes, steps=steps)
    context = _multiple(context, sizes.columns)
    budget = free_bytes() // 2 if budget_bytes is None else budget_bytes
    needed = lambda settings: memory_bytes(config, settings, update_bytes, split)
    max_lanes = min(load.requests or sizes.lanes, sizes.lanes)
    with_lanes = functools.partial(_growing, config, load, sizes, context, rows)
    count = lanes or round_up(max_lanes)
    if not (lanes or sizes.compacts) and needed(with_lanes(count)) > budget:
        calls = load.calls or _assumed(load)
        lengths, shares = best_lengths(calls, context, multiple=sizes.columns, steps=sizes.steps, most=RUNGS)
        over_rungs = functools.partial(_over_rungs, with_lanes(1), lengths, shares, rows)
        fits = lambda count: needed(over_rungs(count)) <= budget
        # The largest count that fits; 0 if none does.
        count = bisect.bisect_left(range(1, max_lanes // rows + 1), True, key=lambda count: not fits(count))
        with_lanes = over_rungs if count else with_lanes
        count = max(1, count)
    while (need := needed(with_lanes(count))) > budget:
        if lanes or count == 1:
            others = f" or the {_gib(update_bytes)} of an update between rollouts" if update_bytes else ""
            raise ValueError(
                f"{count} lane{'s' * (count > 1)} of {context} tokens need {_gib(need)} on top of the weights, with "
                f"working memory{others}; the budget is {_gib(budget)}: shorten prompts or max_new_tokens, lower "
                "lanes, or raise budget_bytes"
            )
        count = round_up(count // 2)
    settings = with_lanes(count)
    room = (budget - needed(settings)) // _cache_bytes(config, rows, context, split)
    extra = min(_multiple(load.histories, rows), rows * room)
    return dataclasses.replace(settings, prefixes=settings.prefixes + extra)


def lane_bytes(config: ModelConfig, settings: EngineSettings, devices: tuple[int, int] = (1, 1)) -> int:
    """Bytes of the lanes on each of these devices."""
    return sum(_cache_bytes(config, *cache, devices) for cache in settings.caches)


def prefix_bytes(config: ModelConfig, settings: EngineSettings, devices: tuple[int, int] = (1, 1)) -> int:
    """Bytes of the prefix cache on each of these devices."""
    return _cache_bytes(config, settings.prefixes, settings.context, devices)


def memory_bytes(
    config: ModelConfig, settings: EngineSettings, update_bytes: int = 0, devices: tuple[int, int] = (1, 1)
) -> int:
    """Memory of an engine besides the weights, on each device: lanes, prefixes, one array being reshaped, and working
    memory.

    While the engine is idle, something else may take `update_bytes`; the larger of that and working memory counts.
    """
    over, heads = devices
    lanes = lane_bytes(config, settings, devices)
    reshaped = lanes // settings.banks // (2 * config.num_hidden_layers)
    if settings.lanes_at:  # rungs keep their shapes; a copy makes an array of its rows
        reshaped = cache_bytes(config, settings.copied, settings.context) // config.num_hidden_layers
    local_lanes = sum(lanes // _parts(lanes, over) for lanes, _ in settings.caches)
    logits = 4 * local_lanes * config.vocab_size * 4  # raw, tempered, weights, padded, in float32
    # A prefill has a copy of its rows, and scores of one layer over the whole context.
    rows = settings.prefill_rows(settings.chunks[-1])
    scores = 2 * rows * config.num_attention_heads * settings.chunks[-1] * settings.context * 4
    layers = num_parameters(config) * (4 if config.dtype == "float32" else 2) // heads
    # A prefill runs while all banks but one decode; each program copies the layers that it cuts out.
    other_banks = logits * (settings.banks - 1) // settings.banks
    prefill = cache_bytes(config, rows, settings.context) + scores
    working = reshaped + max(logits, other_banks + prefill) + settings.banks * layers
    return lanes + prefix_bytes(config, settings, devices) + max(working, update_bytes)


def free_bytes() -> int:
    """Memory that is free for caches: the accelerator's own count, or the host's available memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return host_bytes()


def host_bytes() -> int:
    """Free memory of the host."""
    host = 8 << 30  # if the system does not say
    with contextlib.suppress(OSError, ValueError):  # a Mac does not say how much is free
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        host = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    left = user_cache.memory_left()
    return host if left is None else min(host, left)


def round_up(n: int) -> int:
    """The next power of two up to 64, the next multiple of 64 above."""
    return -(-n // 64) * 64 if n > 64 else 1 << (n - 1).bit_length()


def round_down(n: int) -> int:
    """The previous power of two up to 64, the previous multiple of 64 above."""
    return n // 64 * 64 if n > 64 else 1 << (n.bit_length() - 1)


def _growing(
    config: ModelConfig, load: Load, sizes: Sizes, context: int, rows: int, count: int
) -> EngineSettings:
    """Settings with `count` lanes in caches that grow; prefixes are a multiple of `rows`."""
    shortest = min(context, load.min_prompt + 2 * sizes.steps)
    # Longer prompts take several prefills.
    longest = min(load.max_prompt, max(512, sizes.prefill_tokens))
    chunks = _ladder(max(1, min(128, longest // 16)), longest, 4)
    in_banks = count >= sizes.banks * STABLE_WIDTH and count % sizes.banks == 0
    banks = sizes.banks if in_banks else 1
    widths = {count // banks}
    if sizes.compacts:
        # The cost of a step grows with the lanes and with the columns they attend: spend the programs on the one that
        # varies more.
        parts = (6, 4, 3, 2, 1) if context < 4 * shortest else (4, 2)
        narrower = (count // banks * p // 8 // 32 * 32 for p in parts)
        widths |= {width for width in narrower if width >= STABLE_WIDTH}
    # A rung saves work in proportion to the lanes, and costs a program.
    rungs = 1 + (context - shortest) // (32 if count > STABLE_WIDTH else 256)
    # Lanes by length add up to a triangle of programs.
    programs = MAX_PROGRAMS // max(len(widths), 2 if sizes.compacts else 3)
    candidates = min(load.features.candidates, config.vocab_size)
    return EngineSettings(
        widths=tuple(sorted(widths, reverse=True)),
        lengths=_ladder(max(shortest, context // 16), context, min(rungs, programs), multiple=sizes.columns),
        chunks=chunks,
        prefill_tokens=max(chunks[-1], min(sizes.prefill_tokens, count * chunks[-1])),
        prefixes=_multiple(max(1, count // 2), rows),
        steps=sizes.steps,
        stops=load.stops,
        features=dataclasses.replace(load.features, candidates=candidates),
        banks=banks,
    )


def _over_rungs(
    settings: EngineSettings, lengths: Sequence[int], shares: np.ndarray, rows: int, count: int
) -> EngineSettings:
    """Settings with `count` times `rows` lanes over rungs of these lengths."""
    rungs = [(rows * lanes, length) for lanes, length in zip(apportion(count, shares), lengths) if lanes]
    lanes_at, lengths = zip(*rungs)
    cells = sum(lanes * length for lanes, length in rungs)
    # Prompts are kept in an eighth of the memory of the lanes.
    prefixes = _multiple(max(1, min(rows * count // 2, max(2, cells // (8 * settings.context)))), rows)
    return dataclasses.replace(
        settings, widths=(rows * count,), lengths=lengths, lanes_at=lanes_at, prefixes=prefixes
    )


def _assumed(load: Load) -> list[tuple[int, int]]:
    """Calls of all lengths, if nothing is known about them: short prompts are as frequent as long ones."""
    shortest = max(load.min_prompt, load.max_prompt // 64)
    prompts = np.geomspace(shortest, load.max_prompt, 7).astype(int).tolist()
    return [(prompt, max(1, load.max_new * part // 4)) for prompt in prompts for part in (1, 2, 3, 4)]


def _cache_bytes(config: ModelConfig, rows: int, length: int, devices: tuple[int, int]) -> int:
    """Bytes of a cache on each device: rows and heads are split where the devices divide them, else copied."""
    over, heads = devices
    shared = _parts(rows, over) * _parts(config.num_key_value_heads, heads)
    return cache_bytes(config, rows, length) // shared


def _parts(count: int, devices: int) -> int:
    return devices if count % devices == 0 else 1


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def _ladder(low: int, high: int, rungs: int, multiple: int = 16) -> tuple[int, ...]:
    """Up to `rungs` lengths from above `low` to `high` in even ratios, multiples of `multiple` but for the last."""
    steps = (low * (high / low) ** (i / rungs) for i in range(1, rungs + 1))
    return tuple(sorted({min(high, _multiple(int(s + 0.999), multiple)) for s in steps}))


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**28 else f"{n / 2**20:.1f} MiB"
