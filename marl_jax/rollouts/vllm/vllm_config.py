"""The settings of a vLLM server; light, since every command imports this module."""

import dataclasses
from collections.abc import Mapping

from marl_jax.fields import Positive

LOCAL = "127.0.0.1"
IN_FLIGHT = 256  # default number of requests in flight
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM supports; an adapter uses the next one


@dataclasses.dataclass(frozen=True)
class VllmConfig:
    """The server that answers with `engine.kind=vllm`, see docs/vllm.md."""

    # Its address, such as http://127.0.0.1:8000; several are separated by commas. With `start` it may be left out.
    url: str = ""
    start: bool = False  # the run starts the server, on this host, and ends it
    python: str = ".venv-vllm/bin/python"  # Python of the environment with vLLM, for `start`
    flags: str = ""  # added to its command, such as "--gpu-memory-utilization 0.8"
    # Added to its environment, such as CUDA_VISIBLE_DEVICES.
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start_timeout: Positive = 900.0  # seconds until it has to be ready
    # Where adapters and full weights are written, which the server reads under the same path; None: a temporary folder
    # of this host.
    folder: str | None = None
    timeout: Positive = 600.0  # seconds that one answer may take


def urls_of(config: VllmConfig) -> list[str]:
    """The addresses of the servers, in the order of the policies."""
    return [url.strip() for url in config.url.split(",")] if config.url else []
