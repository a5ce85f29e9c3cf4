"""How the processes of a run find each other, and how they end together.

    --coordinator=HOST:PORT --process=K   companions meet at HOST:PORT, then JAX is initialized at a free port of HOST
    neither                               the same with what SLURM or Open MPI announces; JAX joins a TPU pod or GKE

Called once, before JAX computes anything. If a process is lost, the others end within seconds if its machine still
runs, and else within JAX's heartbeat.
"""

import collections
import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import logging

from marl_jax.errors import UserError
from marl_jax.hosts import talk
from marl_jax.threads import Workers

WAIT_S = 300.0  # seconds for all processes to connect
REASON_S = 1.0  # seconds that a failing process waits for its companion
FOUND_S = 20.0  # seconds for companions to meet, once their processes have found each other
HEARTBEAT_S = 20  # seconds without a sign from a process until JAX counts it as lost
END_S = 30  # seconds for all processes to come to the end
LOST = 1  # the exit code of a process that ends because another is lost

_COMPANION = Path(__file__).with_name("companion.py")  # run by its path: it loads no JAX


class HostsError(UserError, RuntimeError):
    """The processes of a run cannot work together; the text is one line, or one line per difference."""


@contextlib.contextmanager
def joined(
    hosts: int,
    coordinator: str | None = None,
    process: int | None = None,
    *,
    devices: int = 1,
    wait_s: float = WAIT_S,
) -> Iterator[None]:
    """A context in which this process is one of `hosts` processes; it does nothing if `hosts` is 1.

    `coordinator` is HOST:PORT of process 0, and `process` the number of this one; both or neither are given. `devices`
    is the number of this process's own devices.
    """
    if hosts == 1:
        if coordinator or process is not None:
            raise HostsError(
                "--coordinator and --process are for a run on several hosts: set --config.mesh.hosts to their "
                "number, or leave them out"
            )
        yield
        return
    with contextlib.suppress(AttributeError):  # its handler would take SIGTERM from the run
        jax.config.update("jax_enable_preemption_service", False)
    global _companion
    address, local_devices = "", None
    if coordinator or process is not None:
        at: tuple[str, int] | None = _checked(hosts, coordinator, process)
    else:
        at, process, local_devices = _scheduled(hosts, devices)
    if at:
        companion = _Companion(process, hosts, at[0].strip("[]"), at[1], wait_s)
        address = f"{at[0]}:{companion.ready()}"
    else:
        _find(hosts, wait_s)
        companion = _meet(hosts)
    try:
        if address:
            _begin(hosts, process, address, local_devices)
        _check_devices()
        _companion = companion
        yield
        talk.any_of(False)  # another may still write files, and JAX's shutdown waits only half a minute
    except BaseException:
        companion.say("failed")
        time.sleep(REASON_S)  # the companion ends this process if another was killed: that is the reason
        raise
    else:
        jax.distributed.shutdown()  # waits for all
        companion.say("bye")
    finally:
        _companion = None


def on_stop(heard: Callable[[], None]) -> None:
    """Set what is called, on another thread, when a process is asked to stop."""
    if _companion is not None:
        _companion.on_stop = heard


def request_stop() -> None:
    """Tell all processes that this one was asked to stop; for a handler of signals."""
    if _companion is not None:
        _companion.say("stop")


# ---------------------------------------------------------------- with a coordinator, or by the cluster


def _checked(hosts: int, coordinator: str | None, process: int | None) -> tuple[str, int]:
    """Host and port of process 0; an IPv6 address keeps its brackets, as JAX expects it."""
    if not coordinator or process is None:
        missing = "--process=K" if coordinator else "--coordinator=HOST:PORT"
        raise HostsError(
            f"{missing} is missing: every process needs both --coordinator and --process, or neither"
        )
    if not 0 <= process < hosts:
        raise HostsError(f"--process={process} is not in 0 to {hosts - 1}, as mesh.hosts is {hosts}")
    return _host_and_port(coordinator, f"--coordinator={coordinator}")


def _host_and_port(address: str, what: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    valid = re.fullmatch(r"[^][:]+|\[[^][]+\]", host)
    if not valid or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise HostsError(
            f"{what} is no HOST:PORT: name the machine of process 0 and a free port, as in 10.0.0.1:7000 or "
            "[fd00::1]:7000"
        )
    return host, int(port)


def _begin(hosts: int, process: int | None, address: str, local_devices: Any) -> None:
    local = address.startswith(("127.", "localhost:", "[::1]:"))
    # If http_proxy is set, as on many clusters, gRPC would connect to process 0 through that proxy.
    exempt, host = "no_grpc_proxy", address.rpartition(":")[0].strip("[]")
    before = os.environ.get(exempt) or os.environ.get("no_proxy")
    os.environ[exempt] = f"{before},{host}" if before else host
    with contextlib.suppress(AttributeError):
        jax.config.update("jax_check_proxy_envs", False)  # JAX's warning of proxies
    try:
        jax.distributed.initialize(
            address,
            hosts,
            process,
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address if local else None,
            initialization_timeout=int(HEARTBEAT_S + END_S),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=END_S,
        )
    except RuntimeError as error:  # for example, JAX has computed something before
        raise HostsError(f"JAX cannot join the processes: {' '.join(str(error).split())}") from error


def _scheduled(hosts: int, devices: int) -> tuple[tuple[str, int] | None, int | None, Any]:
    """What SLURM or Open MPI announces: host and port of process 0, this process's number, its devices (None: all).

    JAX's own `initialize` would end with a segmentation fault if the port is in use, and abort if others do not come.
    """
    from jax._src.clusters import ClusterEnv, OmpiCluster, SlurmCluster  # there is no public way to ask

    if not (found := [one.name for one in (OmpiCluster, SlurmCluster) if one.is_env_present()]):
        return None, None, None
    # JAX gives local process k only GPU k, which is wrong if all GPUs that this process can see are its own.
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    known = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        named = [*map(int, filter(None, os.environ.get("JAX_LOCAL_DEVICE_IDS", "").split(",")))]
        local = range(devices) if len(visible) == devices else named or None
        address, count, process, taken = ClusterEnv.auto_detect_unset_distributed_params(
            known, None, None, local, found[0], int(WAIT_S)
        )
    except (ValueError, RuntimeError) as error:
        raise HostsError(
            f"what {found[0]} announces, or a variable JAX_*, cannot be used ({error}): correct it, or give each "
            "process --coordinator=HOST:PORT of process 0 and its own --process=K"
        ) from None
    assert address is not None and count is not None  # both announce them
    _check_count(hosts, count)
    host, _, port = address.rpartition(":")
    if ":" in host and not host.startswith("["):
        address = f"[{host}]:{port}"
    what = f"the address of process 0 that {found[0]} or JAX_* announces, '{address}',"
    return _host_and_port(address, what), process, taken


def _find(hosts: int, wait_s: float) -> None:
    """Join the processes that another kind of cluster announces."""
    try:
        jax.distributed.initialize(
            initialization_timeout=int(wait_s),
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=END_S,
        )
    except ValueError as error:
        raise HostsError(
            f"mesh.hosts is {hosts}, and nothing announces the other processes, as SLURM, Open MPI, a TPU pod or GKE "
            f"would ({error}): give each process --coordinator=HOST:PORT of process 0 and its own --process=K"
        ) from None
    _check_count(hosts, jax.process_count())


def _check_count(hosts: int, count: int) -> None:
    if count != hosts:
        raise HostsError(
            f"mesh.hosts is {hosts}, and the cluster announces {count} processes: set --config.mesh.hosts={count}, or "
            "start as many"
        )


def _meet(hosts: int) -> "_Companion":
    """Start the companion of a process that has found the others; only JAX watches if companions cannot meet."""
    started: list[_Companion] = []

    def address() -> tuple[str, int]:
        started.append(_Companion(0, hosts, "", 0, FOUND_S))
        name = socket.gethostname()
        with contextlib.suppress(OSError):
            name = f"{name},{socket.gethostbyname(name)}"
        return name, started[0].ready("at")

    names, port = talk.from_first(address)
    companion = started[0] if started else _Companion(jax.process_index(), hosts, names, port, FOUND_S)
    try:
        companion.ready()
    except HostsError as error:
        logging.warning("%s; if a process is lost, only JAX's own messages say so", error)
    return companion


def _check_devices() -> None:
    devices = collections.Counter(device.process_index for device in jax.devices())
    for process, number in sorted(devices.items()):
        if number != devices[0]:
            raise HostsError(
                f"process {process} has {number} devices and process 0 has {devices[0]}: give each the same number, "
                "such as by CUDA_VISIBLE_DEVICES"
            )


class _Companion:
    """The companion process of this one, see `companion`."""

    def __init__(self, index: int | None, count: int, hosts: str, port: int, wait_s: float) -> None:
        self.on_stop: Callable[[], None] = lambda: None
        self._workers = Workers("companion")
        words = (index, count, hosts, port, wait_s)
        self._process: Any = subprocess.Popen(
            [sys.executable, "-P", str(_COMPANION), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # signals of a terminal are for the run
        )

    def ready(self, word: str = "ready") -> int:
        """Wait for the line that begins with `word`, and return the port in it; a refusal is raised."""
        first, _, rest = self._process.stdout.readline().decode().rstrip("\n").partition(" ")
        if first != word:
            raise HostsError(rest or "the process that watches the others ended")
        if word == "ready":
            self._workers.submit(self._listen)
        return int(rest)

    def say(self, word: str) -> None:
        """Send it a word; does nothing if it has ended."""
        with contextlib.suppress(OSError):
            os.write(self._process.stdin.fileno(), f"{word}\n".encode())

    def _listen(self) -> None:
        for line in self._process.stdout:
            if line == b"lost\n":
                os._exit(LOST)
            self.on_stop()


_companion: _Companion | None = None
