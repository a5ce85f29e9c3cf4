"""The world outside the sandbox, laid out so that any harm to it shows."""

import os
import pathlib
import platform
import resource
import secrets
import select
import socket
import subprocess
import sys

from hostile.calls import CALLS


class World:
    """Things worth attacking: a secret in many places, files, listeners, processes."""

    def __init__(self, directory: pathlib.Path):
        self.secret = f"SECRET-{secrets.token_hex(8)}"
        directory.chmod(0o777)
        # Nothing but the sandbox itself stands between a program and these files.
        for parent in directory.parents:
            if parent.stat().st_uid == os.getuid() and parent != pathlib.Path("/"):
                parent.chmod(parent.stat().st_mode | 0o755)
        self.drop = directory / "drop"
        self.drop.mkdir()
        self.drop.chmod(0o777)
        self.canary = directory / "canary"
        self.canary.write_text(self.secret)
        self.canary.chmod(0o666)
        self._canary_state = self._state_of_canary()
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix_path = str(directory / "s")
        self.unix.bind(self.unix_path)
        os.chmod(self.unix_path, 0o777)
        self.unix.listen()
        self.unix_datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.unix_datagram.bind(self.unix_path + "d")
        os.chmod(self.unix_path + "d", 0o777)
        self.abstract = f"marl-{secrets.token_hex(4)}"
        self.abstract_unix = socket.socket(socket.AF_UNIX)
        self.abstract_unix.bind("\0" + self.abstract)
        self.abstract_unix.listen()
        self.victim = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)", self.secret],
            env={"SECRET": self.secret},
        )
        self._limits = resource.prlimit(self.victim.pid, resource.RLIMIT_NOFILE)

    @property
    def facts(self) -> dict:
        """What an attacker is told."""
        return {
            "canary": str(self.canary),
            "drop": str(self.drop),
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "unix": self.unix_path,
            "abstract": self.abstract,
            "victim": self.victim.pid,
            "host": os.getpid(),
            "nr": {name: numbers[platform.machine()] for name, numbers in CALLS.items()},
        }

    def harm(self) -> list[str]:
        """Everything that is not as it was."""
        listeners = [self.tcp, self.udp, self.unix, self.unix_datagram, self.abstract_unix]
        found = [f"a message reached {reached}" for reached in select.select(listeners, [], [], 0)[0]]
        found += [f"a file appeared: {name}" for name in os.listdir(self.drop)]
        if os.path.exists(f"/dev/shm/{self.abstract}"):
            found.append("shared memory appeared")
        if self._state_of_canary() != self._canary_state:
            found.append("the canary changed")
        if self.victim.poll() is not None:
            found.append("the victim died")
        # Stopped or traced; a busy machine may show it waiting for its disk.
        elif pathlib.Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
            found.append("the victim was stopped")
        elif resource.prlimit(self.victim.pid, resource.RLIMIT_NOFILE) != self._limits:
            found.append("the victim's limits changed")
        return found

    def close(self) -> None:
        """End it."""
        self.victim.kill()
        self.victim.wait()
        for listener in (self.tcp, self.udp, self.unix, self.unix_datagram, self.abstract_unix):
            listener.close()

    def _state_of_canary(self) -> tuple:
        status = self.canary.stat()
        return (self.canary.read_text(), status.st_mode, status.st_mtime_ns, status.st_nlink, status.st_uid)
