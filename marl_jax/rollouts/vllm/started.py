"""The command of a vLLM server, and a server that the run starts with it.

    run ──pipe──► keeper ──► server       the pipe closes when the run ends, in any way, and the keeper ends the server

The command is made only here: the run executes it, errors quote it, and docs/vllm.md shows it.
"""

import dataclasses
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from marl_jax.packaged import resolve_path
from marl_jax.rollouts.vllm import keeper
from marl_jax.rollouts.vllm.vllm_config import IN_FLIGHT, LOCAL, RANKS, VllmConfig
from marl_jax.rollouts.vllm.wire import Server
from marl_jax.rollouts.voices import EngineGone

LOOK_S, HEALTH_S = 0.2, 5.0
_ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}  # enables the routes that load adapters
_WEIGHTS = {"VLLM_SERVER_DEV_MODE": "1"}
# Not passed on: the server would import packages of this environment, or ask for a key of another server.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_API_KEY")
_HEAD = ("--hf-overrides", '{"head_dtype": "float32"}')  # logits in float32, as here


@dataclasses.dataclass(frozen=True)
class ServerRequirements:
    """The demands of a run on its server."""

    base: str  # directory of the base
    dtype: str
    longest: int  # tokens of a prompt and its answer
    adapters: int
    rank: int
    full: bool = False  # all weights are sent, not adapters
    lanes: int = IN_FLIGHT  # requests at a time

    @property
    def environment(self) -> dict[str, str]:
        """The variables that enable the routes for sending weights."""
        return _WEIGHTS if self.full else _ADAPTERS

    def command(self, config: VllmConfig, address: str) -> list[str]:
        """The server's command line; `shown` adds the environment that it needs."""
        parts = urlsplit(address)
        max_rank = next((max_rank for max_rank in RANKS if max_rank >= self.rank), self.rank)
        lora = f"--enable-lora --max-loras {self.adapters} --max-lora-rank {max_rank}".split()
        return [
            *(os.path.expanduser(config.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(resolve_path(self.base))),
            *("--host", parts.hostname or LOCAL, "--port", str(parts.port or 80), "--dtype", self.dtype),
            *("--max-model-len", str(self.longest), *(lora if self.adapters else ())),
            *("--max-num-seqs", str(self.lanes), *(_HEAD if self.dtype == "bfloat16" else ())),
            *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
            *shlex.split(config.flags),
        ]

    def shown(self, config: VllmConfig, address: str) -> str:
        """The command as typed in a shell, with its environment."""
        named = {**self.environment, **config.environment}
        words = [f"{name}={shlex.quote(value)}" for name, value in named.items()]
        return " ".join([*words, shlex.join(self.command(config, address))])


class Started:
    """The server of a run, which ends with the run. It may be started again if it has died."""

    def __init__(self, config: VllmConfig, needed: ServerRequirements, log: Path):
        self.log, self._config, self._needed = log, config, needed
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start a new server; returns its address once it is ready."""
        self.end()
        if shutil.which(os.path.expanduser(self._config.python)) is None:
            raise EngineGone(
                f"engine.vllm.python is '{self._config.python}', which is no program: name the Python of an "
                "environment with vLLM, such as the .venv-vllm/bin/python of `make vllm`"
            )
        address = f"http://{LOCAL}:{self._port()}"
        variables = {name: value for name, value in os.environ.items() if name not in _OURS}
        with self.log.open("ab") as log:
            began = log.tell()
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", keeper.__file__, *self._needed.command(self._config, address)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**variables, **self._needed.environment, **self._config.environment},
                start_new_session=True,  # signals of a terminal must reach only the run
            )
        try:
            self._wait(address, began)
        except BaseException:
            self.end()
            raise
        return address

    def end(self) -> None:
        """End the server, and wait until it has ended."""
        if self._keeper is not None:
            self._keeper.stdin.close()  # type: ignore[union-attr]
            self._keeper.wait()
        self._keeper = None

    def _port(self) -> int:
        """The chosen port, or one that is free."""
        port = urlsplit(self._config.url).port or 0
        with socket.socket() as probe:
            # A server that has just died may have used the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOCAL, port))
            except OSError as error:
                raise EngineGone(
                    f"engine.vllm.url is {self._config.url}, and its port cannot be used ({error.strerror}): end the "
                    "program that has it, or leave the url out for a free port"
                ) from None
            return int(probe.getsockname()[1])

    def _wait(self, address: str, began: int) -> None:
        assert self._keeper is not None
        server, end = Server(address, HEALTH_S), time.monotonic() + self._config.start_timeout
        while self._keeper.poll() is None and time.monotonic() < end:
            try:
                server.ask("/health")
                return
            except EngineGone:
                time.sleep(LOOK_S)
        with self.log.open("rb") as log:
            log.seek(began)
            lines = [line.strip() for line in log.read().decode(errors="replace").split("\n") if line.strip()]
        if (code := self._keeper.poll()) is None:
            what = f"was not ready within engine.vllm.start_timeout, {self._config.start_timeout:g} s,"
        else:
            what = f"ended at its start (exit code {code})"
            # The last error of all is often one that points to another: "See root cause above".
            lines = [line for line in lines if "Error: " in line and "root cause" not in line] or lines
        last = f"'{lines[-1][:500]}'" if lines else "nothing"
        raise EngineGone(f"the vLLM server {what} and logged {last}: see its log, '{self.log}'")
