"""A small process next to each process of a run on several hosts: it finds the others, and reports lost ones.

    process k ──pipe── companion k ──TCP── companion 0 ──pipe── process 0

Run by its path, without JAX: JAX aborts a process at once if the coordinating one is lost, and may wait forever in
a program of all devices if another one is. If a pipe or connection ends without `bye` or `failed`, its process was
killed. Words: `stop` (asked to end), `failed` (by an error), `bye` (the run is over).
"""

import contextlib
import errno
import json
import os
import select
import selectors
import signal
import socket
import sys
import time
from typing import Any, NoReturn

PAUSE_S = 0.2  # seconds between two attempts to reach process 0
HELLO_S = 5.0  # seconds for the first line of a process that has connected
GRACE_S = 5.0  # seconds for processes that fail for the same reason to report it, and for a process to end
SILENT_S = 20  # seconds without a sign from a machine until it counts as lost
PIPE = 0  # stdin, the pipe from this companion's own process
KILLED = "was lost: it was killed, or its machine went away"
FAILED = "ended with an error, which is in its own log"


def main(index: int, count: int, hosts: list[str], port: int, wait_s: float) -> None:
    """Meet the others at process 0, then watch."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its own process decides when to end
    name = f"process {index} of {count} (pid {os.getppid()} on {socket.gethostname()})"
    if index == 0:
        links, names, free = _await_all(count, hosts[0], port, wait_s, name)
    else:
        links, names, free = _reach_first(index, count, hosts, port, wait_s, name)
    _say(f"ready {free}")
    _Watch(index, links, names).run()


# ---------------------------------------------------------------- to meet


def _await_all(
    count: int, host: str, port: int, wait_s: float, name: str
) -> tuple[dict[int, socket.socket], list[str], int]:
    """At process 0: (connections by process, names of processes, a free port of this machine)."""
    listener = _listen(host, port)
    if not port:
        _say(f"at {listener.getsockname()[1]}")
    links: dict[int, socket.socket] = {}
    names = [name, *(f"process {k} of {count}" for k in range(1, count))]
    deadline = time.monotonic() + wait_s
    while True:
        links = {k: link for k, link in links.items() if not _has_ended(link)}  # an ended one may reconnect
        if len(links) == count - 1:
            break
        if not _readable(listener, deadline):
            missing = ", ".join(str(k) for k in range(1, count) if k not in links)
            _refuse(
                f"process {missing} of {count} did not connect within {wait_s:.0f} s: start the command on every host, "
                "each with its own --process, or correct mesh.hosts",
                links,
            )
        try:
            link = listener.accept()[0]
            link.settimeout(HELLO_S)
            hello = json.loads(_line(link))
            other, total, name_of_other = int(hello["index"]), int(hello["count"]), str(hello["name"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # something else, which uses the wrong port
        if other in links and _has_ended(links[other]):
            del links[other]
        if total != count or not 0 < other < count or other in links:
            problem = (
                f"process {other} says that there are {total} processes, and process 0 that there are {count}"
                if total != count
                else f"two processes say that they are process {other}"
            )
            _refuse(
                f"{problem}: give all the same --config.mesh.hosts, and each its own --process",
                {**links, -1: link},
            )
        links[other], names[other] = link, name_of_other
    free = _free_port(listener.getsockname()[1] + 1)
    for link in links.values():
        link.sendall(f"ready {json.dumps({'port': free, 'names': names})}\n".encode())
    listener.close()
    return links, names, free


def _reach_first(
    index: int, count: int, hosts: list[str], port: int, wait_s: float, name: str
) -> tuple[dict[int, socket.socket], list[str], int]:
    """At another process: ({0: its connection}, names and free port as process 0 sent them)."""
    deadline, answer = time.monotonic() + wait_s, ""
    where = " or ".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)
    while not answer:
        link = None
        for host in hosts:
            try:
                link = link or socket.create_connection((host, port), max(0.1, deadline - time.monotonic()))
            except (OSError, UnicodeError):
                continue
        if link is None and time.monotonic() >= deadline:
            _refuse(
                f"nobody answers at {where} after {wait_s:.0f} s: start process 0 on that machine, or correct "
                "--coordinator"
            )
        if link is None:
            _readable(None, time.monotonic() + PAUSE_S)
            continue
        with contextlib.suppress(OSError):
            link.sendall(json.dumps({"index": index, "count": count, "name": name}).encode() + b"\n")
            if _readable(link, deadline + 2 * HELLO_S):  # process 0 may have started later than this one
                link.settimeout(HELLO_S)
                answer = _line(link)
        if not answer and time.monotonic() >= deadline:
            _refuse(f"process 0 at {where} ended before all processes had connected: start the command again")
    word, _, rest = answer.partition(" ")
    if word == "refused":
        _refuse(rest)
    if word != "ready":
        _refuse(
            f"the program that answers at {where} is no process of this run: correct --coordinator, or name a free port"
        )
    reply = json.loads(rest)
    return {0: link}, reply["names"], reply["port"]  # type: ignore[dict-item]


def _listen(host: str, port: int) -> socket.socket:
    """Listen at this host's address if the machine has it, else at all addresses of the machine.

    The machine may resolve its own name to a loopback address (127.0.1.1, say), which the others cannot reach.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:  # a UnicodeError for invalid names, such as a..b
        _refuse(f"there is no machine '{host}' ({getattr(error, 'strerror', error)}): correct --coordinator")
    family, *_, (address, *_) = min(addresses, key=lambda one: one[0] != socket.AF_INET)
    reachable = host == "localhost" or _is_loopback(host) or not _is_loopback(str(address))
    try:
        if host and reachable:
            try:
                return socket.create_server((address, port), family=family)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        _refuse(
            f"port {port} of this machine cannot be used ({error.strerror}): name another in --coordinator (under "
            "a scheduler in JAX_COORDINATOR_PORT), for all processes, or end the program that uses it"
        )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _readable(source: socket.socket | None, deadline: float) -> bool:
    """Whether `source` is readable by then; exits if the pipe is: its process writes nothing yet, so it has ended."""
    inputs: list[Any] = [PIPE] if source is None else [PIPE, source]
    ready = select.select(inputs, [], [], max(0.0, deadline - time.monotonic()))[0]
    if PIPE in ready:
        sys.exit(0)
    return bool(ready)


def _has_ended(link: socket.socket) -> bool:
    try:
        return bool(select.select([link], [], [], 0)[0]) and not link.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _free_port(wanted: int) -> int:
    for port in (wanted if wanted < 1 << 16 else 0, 0):
        try:
            with socket.socket() as probe:
                probe.bind(("", port))
                return probe.getsockname()[1]
        except OSError:
            continue
    return 0


def _line(link: socket.socket) -> str:
    """The next line; raises an OSError if the connection ends before it."""
    read = b""
    while not read.endswith(b"\n"):
        if not (part := link.recv(1)):
            raise ConnectionResetError
        read += part
    return read.decode(errors="replace").rstrip("\n")


def _refuse(text: str, links: dict[int, socket.socket] | None = None) -> NoReturn:
    for link in (links or {}).values():
        with contextlib.suppress(OSError):
            link.sendall(f"refused {text}\n".encode())
    _say(f"refused {text}")
    sys.exit(0)


def _say(line: str) -> None:
    """Write a line to its own process, if that still runs."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


# ---------------------------------------------------------------- to watch


class _Watch:
    """Passes words on between processes, and ends its own process if another is lost."""

    def __init__(self, index: int, links: dict[int, socket.socket], names: list[str]) -> None:
        self._index, self._links, self._names = index, links, names
        self._parent = os.getppid()
        self._failing = False  # its own process reported an error, and ends by itself
        self._failed: dict[int, float] = {}  # at process 0: {failed process: when others are told}
        self._gone: set[int] = set()  # processes that said bye
        self._rest: dict[int, bytes] = {}  # the received part of an incomplete line
        self._selector = selectors.DefaultSelector()
        self._selector.register(PIPE, selectors.EVENT_READ, -1)
        for k, link in links.items():
            link.settimeout(None)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                ("TCP_KEEPIDLE", 5),
                ("TCP_KEEPINTVL", 5),
                ("TCP_KEEPCNT", 3),
                ("TCP_USER_TIMEOUT", SILENT_S * 1000),
            ):
                if hasattr(socket, option):
                    link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            self._selector.register(link, selectors.EVENT_READ, k)

    def run(self) -> None:
        """Watch until the run is over or a process is lost."""
        while True:
            due = min(self._failed.values(), default=None)
            ready = self._selector.select(None if due is None else max(0.0, due - time.monotonic()))
            for key, _ in ready:
                for word in self._words(key):
                    if key.data == -1:
                        self._from_own(word)
                    elif self._index == 0:
                        self._from_process(key.data, word)
                    else:
                        self._from_first(word)
            for k, when in list(self._failed.items()):
                if time.monotonic() >= when:
                    self._lost(k, FAILED)

    def _words(self, key: selectors.SelectorKey) -> list[str]:
        """The lines that were received; `ended` if no more can come."""
        try:
            read = os.read(PIPE, 4096) if key.data == -1 else key.fileobj.recv(4096)  # type: ignore[union-attr]
        except OSError:
            read = b""
        if not read:
            self._selector.unregister(key.fileobj)
            return ["ended"]
        *lines, rest = (self._rest.pop(key.data, b"") + read).split(b"\n")
        self._rest[key.data] = rest
        return [line.decode() for line in lines]

    def _from_own(self, word: str) -> None:
        """Handle a word of its own process: process 0 acts on it, the others send it to process 0."""
        self._failing = self._failing or word == "failed"
        if self._index == 0:
            self._from_process(0, word)
            return
        if word != "ended":  # process 0 sees that from the end of the connection
            self._tell(self._links[0], word)
        if word in ("bye", "ended"):
            sys.exit(0)

    def _from_process(self, k: int, word: str) -> None:
        """At process 0: handle a word of process `k`."""
        if word == "stop":
            self._tell_all("stop")
        elif word == "bye":
            self._gone.add(k)
            if k == 0:
                self._leave()
        elif word == "failed":
            self._failed[k] = time.monotonic() + GRACE_S
        elif k in self._failed:  # it failed before, and has ended now
            if len(self._gone | set(self._failed)) == len(self._names):
                self._leave()
        elif k not in self._gone:
            self._lost(k, KILLED)

    def _from_first(self, word: str) -> None:
        """At another process: handle a word of process 0."""
        word, _, rest = word.partition(" ")
        if word == "stop":
            _say("stop")
        elif word == "bye":
            sys.exit(0)
        elif word == "lost":
            k, _, why = rest.partition(" ")
            self._end(int(k), why)
        elif word == "ended":
            self._end(0, KILLED)

    def _lost(self, k: int, why: str) -> None:
        self._tell_all(f"lost {k} {why}")
        self._end(k, why)

    def _end(self, lost: int, why: str) -> NoReturn:
        """Report the lost process, and make sure that this one ends.

        If this one fails, too, only a killed process is reported: two that fail may have the same reason.
        """
        if lost != self._index and (why == KILLED or not self._failing):
            text = (
                f"{self._names[lost]} {why}; so this process ends. Start the same command again on every host: it "
                "goes on from the last checkpoint"
            )
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode())
            _say("lost")
        deadline = time.monotonic() + GRACE_S
        while os.getppid() == self._parent and time.monotonic() < deadline:
            time.sleep(0.05)
        if os.getppid() == self._parent:
            os.kill(self._parent, signal.SIGKILL)
        sys.exit(0)

    def _leave(self) -> NoReturn:
        """At process 0: no process is left to be watched."""
        self._tell_all("bye")
        # Read what they still send: if it were unread, the system would reset the connection and `bye` could be lost.
        for link in self._links.values():
            link.settimeout(GRACE_S)
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_WR)
                while link.recv(4096):
                    pass
        sys.exit(0)

    def _tell(self, link: socket.socket, line: str) -> None:
        with contextlib.suppress(OSError):  # it has ended, which `run` notices
            link.sendall(f"{line}\n".encode())

    def _tell_all(self, line: str) -> None:
        for link in self._links.values():
            self._tell(link, line)
        if line == "stop":
            _say("stop")


if __name__ == "__main__":
    _index, _count, _hosts, _port, _wait = sys.argv[1:]
    main(int(_index), int(_count), _hosts.split(","), int(_port), float(_wait))
