"""Kinds of device: memory, bandwidth and peak rates as their makers state them, and the machine at hand.

    seconds of a piece of work = max(operations / (peak x COMPUTE), bytes / (bandwidth x BANDWIDTH))

The two shares are assumptions about how much of its rates a program reaches, the same for all kinds; they are not
measured. The rates of the host's processor are measured, with a product and a copy.
"""

import dataclasses
import functools
import timeit
from collections.abc import Callable

import jax
import numpy as np

from marl_jax import user_cache
from marl_jax.sampling.shapes import free_bytes, host_bytes

COMPUTE, BANDWIDTH = 0.4, 0.6


@dataclasses.dataclass(frozen=True)
class Device:
    """One device; rates are per second. float32 means full float32 products, which is what the models ask for."""

    name: str
    platform: str  # as JAX calls it: cpu, gpu, tpu
    memory: int  # bytes a program can have: 9/10 of what is built in, or what is free on the machine at hand
    bandwidth: float = 0.0  # bytes; a rate of 0 is not known
    bfloat16: float = 0.0  # operations of dense matrix products
    float32: float = 0.0
    capability: str = ""  # NVIDIA's "compute capability", which decides which kernels exist

    def seconds(self, operations: float, moved: float, dtype: str) -> float | None:
        """Seconds of `operations` in `dtype` that move `moved` bytes; None if rates are not known."""
        peak = self.bfloat16 if dtype == "bfloat16" else self.float32
        if not peak:
            return None
        return max(operations / (peak * COMPUTE), moved / (self.bandwidth * BANDWIDTH))


def _kind(
    name: str, gigabytes: int, bandwidth: float, bfloat16: float, float32: float, capability: str = ""
) -> Device:
    platform, memory = "gpu" if capability else "tpu", int(0.9 * gigabytes * 1e9)
    return Device(name, platform, memory, bandwidth * 1e9, bfloat16 * 1e12, float32 * 1e12, capability)


# Data sheets of NVIDIA (SXM boards, without sparsity) and Google. TPUs make a float32 product of six bfloat16 ones.
KINDS = (
    _kind("A100", 80, 2039, 312, 19.5, "8.0"),
    _kind("H100", 80, 3350, 989, 67, "9.0"),
    _kind("H200", 141, 4800, 989, 67, "9.0"),
    _kind("TPU v5e", 16, 819, 197, 197 / 6),
    _kind("TPU v6e", 32, 1640, 918, 918 / 6),
)
# JAX's names of kinds, where they differ.
_TPU_NAMES = {"TPU v5 lite": "TPU v5e", "TPU v6 lite": "TPU v6e"}


def host() -> Device:
    """This machine's processor, with the memory that is free; bfloat16 is computed as float32 there."""
    best = _rates()
    return Device("CPU", "cpu", host_bytes(), best["moved"], best["product"], best["product"])


def here() -> Device:
    """The device that JAX runs on, with the memory that is free; without rates if its kind is not in `KINDS`."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return host()
    name = _TPU_NAMES.get(device.device_kind, device.device_kind)
    capability = getattr(device, "compute_capability", "")
    unknown = Device(name, device.platform, 0, capability=capability)
    kind = next((kind for kind in KINDS if kind.name in name), unknown)
    return dataclasses.replace(kind, memory=free_bytes())


@functools.cache
def _rates() -> dict[str, float]:
    """Rates of this processor. Other work makes it look slower, never faster: the best ever measured counts."""
    a = np.ones((768, 768), np.float32)
    b = np.ones(1 << 23, np.float32)
    rates = {
        "product": 2 * 768**3 / _shortest(lambda: a @ a),
        "moved": 2 * b.nbytes / _shortest(lambda: b.copy()),
    }
    file = user_cache.home() / "measured" / f"rates-{user_cache.digest(user_cache.processor())}.json"
    stored = user_cache.load(file)
    best = {name: max(rate, float(stored.get(name) or 0.0)) for name, rate in rates.items()}
    if best != stored:
        user_cache.store(file, best)
    return best


def _shortest(work: Callable[[], object]) -> float:
    return min(timeit.repeat(work, number=1))
