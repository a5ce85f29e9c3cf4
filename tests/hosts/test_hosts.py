"""Processes find each other, tell each other values and errors, and see who is lost; what cannot be is refused."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hosts_kit import ended, free_port, play, said, start

from marl_jax import hosts
from marl_jax.config.run_config import ConfigError, MeshConfig, load_config
from marl_jax.episodes import CallRecord, Episode
from marl_jax.hosts import companion, joining
from marl_jax.hosts.gathering import merged
from marl_jax.hosts.layout import fingerprint
from marl_jax.runs import train
from marl_jax.runs.loading.parts import PartsError, make_mesh
from marl_jax.table import COLUMNS, Ragged, Table
from marl_jax.task import Task

TALK = Path(__file__).with_name("talk_run.py")


# ---------------------------------------------------------------- the table


def episode(task, sample, roles):
    calls = [
        CallRecord(
            role, f"p-{role}", slot, 0, (1, task), (task, sample, slot), (-0.5, -1.0, -2.0), f"{role} {task}", "stop",
            None, version=3,
        )
        for slot, role in enumerate(roles)
    ]  # fmt: skip
    return Episode(
        Task(f"task-{task}", "math", "?", gold="1"),
        sample,
        "own",
        tuple(calls),
        None,
        key=(0, 1, task, sample),
    )


ROLES = [("writer",), ("writer", "critic"), ("writer", "judge"), (), ("judge", "critic", "critic")]
EVERY = [episode(task, sample, roles) for task, roles in enumerate(ROLES) for sample in range(2)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_of_a_rollout_make_the_table_of_one_process(count):
    by_task = [EVERY[start : start + 2] for start in range(0, len(EVERY), 2)]
    shares = [[one for task in by_task[k::count] for one in task] for k in range(count)]
    found, expected = merged([Table.of(share) for share in shares]), Table.of(EVERY)
    for name in COLUMNS:
        mine, theirs = getattr(found, name), getattr(expected, name)
        if isinstance(theirs, Ragged):
            assert [row.tolist() for row in mine] == [row.tolist() for row in theirs], name
        elif theirs is None:
            assert mine is None, name
        else:
            assert mine.dtype == theirs.dtype, name
            np.testing.assert_array_equal(mine, theirs, name)
    for name in ("roles", "policies", "text", "answer", "about", "bare_episodes"):
        assert getattr(found, name) == getattr(expected, name), name


def test_a_fingerprint_of_weights_changes_with_any_bit_and_with_any_two_that_change_places():
    leaves = [np.float32([1.5, -2.0, 3e-9]), np.linspace(-1, 1, 3, dtype=jnp.bfloat16)]
    known = fingerprint(list(map(jnp.asarray, leaves)))
    for place, leaf in enumerate(leaves):
        bits = leaf.view(np.uint16 if leaf.itemsize == 2 else np.uint32)
        changed = [
            bits ^ (np.arange(3) == at) * bits.dtype.type(1 << bit)
            for at in range(3)
            for bit in range(8 * leaf.itemsize)
        ]
        for one in [*changed, bits[[1, 0, 2]], bits[[0, 2, 1]]]:
            others = [
                one.astype(bits.dtype).view(leaf.dtype) if k == place else other
                for k, other in enumerate(leaves)
            ]
            assert fingerprint(list(map(jnp.asarray, others))) != known
    assert fingerprint([jnp.arange(3), jnp.ones(3, int)]) != fingerprint([jnp.ones(3, int), jnp.arange(3)])


# ---------------------------------------------------------------- processes


def test_what_processes_tell_each_other_is_equal_to_the_bit_and_an_error_of_one_is_of_all(tmp_path):
    play(TALK, tmp_path, 2, "talk", http_proxy="http://127.0.0.1:9")  # as on many clusters; nobody is there
    assert all("all told" in said(tmp_path, k) for k in range(2))


def test_one_process_is_alone_and_needs_nobody():
    with hosts.joined(1):
        assert (hosts.count(), hosts.index(), hosts.is_first()) == (1, 0, True)
        assert hosts.from_all(lambda: 5) == [5] and hosts.share([1, 2]) == [1, 2] and hosts.any_of(True)
        with pytest.raises(ZeroDivisionError), hosts.sharing_errors():
            hosts.from_first(lambda: 1 / 0)


def lose(tmp_path, which):
    """The exit codes of three processes that wait, once one of them is lost, and how long the others live."""
    processes = start(TALK, tmp_path, 3, "wait")
    while not all("waiting" in said(tmp_path, k) for k in range(3)):
        time.sleep(0.1)
        assert all(process.poll() is None for process in processes)
    processes[which].kill()
    began = time.monotonic()
    return ended(processes, 100.0), time.monotonic() - began


@pytest.mark.campaign
@pytest.mark.parametrize("which", [0, 2])
def test_the_others_of_a_process_that_is_killed_say_so_and_end(tmp_path, which):
    codes, seconds = lose(tmp_path, which)
    assert seconds < 60 and codes[which] == -signal.SIGKILL
    for k in {0, 1, 2} - {which}:
        assert codes[k] not in (0, None)
        ours = [line for line in said(tmp_path, k).splitlines() if "of 3 (pid" in line]
        assert len(ours) == 1 and ours[0].startswith(f"process {which} of 3 (pid ")
        assert "Start the same command again on every host" in ours[0]


def test_process_0_is_lost_and_the_other_says_so(tmp_path):
    """The hard case: JAX ends a process at once where the one that coordinates is gone."""
    processes = start(TALK, tmp_path, 2, "wait")
    while not all("waiting" in said(tmp_path, k) for k in range(2)):
        time.sleep(0.1)
        assert all(process.poll() is None for process in processes)
    processes[0].kill()
    codes = ended(processes, 60.0)
    assert codes[1] not in (0, None)
    deadline = time.monotonic() + 20  # its companion may outlive it for a moment
    while "process 0 of 2 (pid" not in said(tmp_path, 1):
        assert time.monotonic() < deadline, said(tmp_path, 1)
        time.sleep(0.1)


@pytest.mark.campaign
def test_a_stop_of_one_is_heard_by_all(tmp_path):
    play(TALK, tmp_path, 3, "stop")
    assert all("heard" in said(tmp_path, k) for k in range(3))


@pytest.mark.campaign
def test_who_fails_for_ones_own_reason_is_named_and_who_fails_with_all_says_so_itself(tmp_path):
    codes = ended(start(TALK, tmp_path / "one", 2, "fail"), 100.0)
    assert codes[0] not in (0, None) and codes[1] not in (0, None)
    assert "process 1 of 2" in said(tmp_path / "one", 0) and "with an error" in said(tmp_path / "one", 0)
    assert ended(start(TALK, tmp_path / "all", 2, "all_fail"), 100.0) == [2, 2]
    for k in range(2):
        assert said(tmp_path / "all", k).count("a failure of all") == 1
        assert "process" not in said(tmp_path / "all", k).replace("process_", "")


def as_slurm(port, process=0, count=2, local=0):
    """The variables of a task of SLURM."""
    return {
        "SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(process), "SLURM_LOCALID": str(local), "SLURM_STEP_NUM_NODES": "1",
        "JAX_COORDINATOR_PORT": str(port),
    }  # fmt: skip


def announced_by_slurm(tmp_path, hosts):
    """The exit codes of two processes that SLURM started, of a run that is to have so many."""
    port, processes = free_port(), []
    for k in range(2):
        processes += start(TALK, tmp_path, hosts, "talk", coordinator="-", only=[k], **as_slurm(port, k))
    return ended(processes)


def test_a_port_in_use_that_slurm_announces_is_refused(tmp_path):
    """JAX alone would end there by a segmentation fault, and by an abort where the others do not come."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        words = {"coordinator": "-", "only": [0], **as_slurm(port)}
        (code,) = ended(start(TALK, tmp_path, 2, "talk", **words))
    assert code == 2 and f"port {port} of this machine cannot be used" in said(tmp_path, 0), said(tmp_path, 0)


@pytest.mark.campaign
def test_what_slurm_announces_is_found(tmp_path):
    assert announced_by_slurm(tmp_path, 2) == [0, 0], said(tmp_path, 0) + said(tmp_path, 1)


@pytest.mark.campaign
def test_another_number_than_slurm_announces_is_refused(tmp_path):
    assert announced_by_slurm(tmp_path, 3) == [2, 2]
    for k in range(2):
        assert "mesh.hosts is 3, and the cluster announces 2 processes: set" in said(tmp_path, k)


@pytest.mark.campaign
def test_unequal_numbers_of_devices_are_refused(tmp_path):
    coordinator = f"127.0.0.1:{free_port()}"
    options = {"coordinator": coordinator}
    processes = [
        one for k in range(2) for one in start(TALK, tmp_path, 2, "talk", only=[k], devices=1 + k, **options)
    ]
    assert ended(processes) == [2, 2]
    for k in range(2):
        assert "process 1 has 2 devices and process 0 has 1: give each the same number" in said(tmp_path, k)


# ---------------------------------------------------------------- what cannot be


class Meeting:
    """Companions without their processes."""

    def __init__(self):
        self.begun = []

    def come(self, index, count, port, wait_s=20.0, host="127.0.0.1"):
        words = [index, count, host, port, wait_s]
        command = [sys.executable, "-P", companion.__file__, *map(str, words)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.begun.append(subprocess.Popen(command, bufsize=0, **pipes))
        return self.begun[-1].stdout

    def end(self):
        for one in self.begun:  # at once: one that sees another lost ends its own process, which is this one
            one.kill()
        for one in self.begun:
            one.wait()
            one.stdin.close()
            one.stdout.close()


@pytest.fixture
def meeting():
    found = Meeting()
    yield found
    found.end()


def test_a_port_in_use_is_refused(meeting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = meeting.come(0, 2, port).readline().decode()
    assert line.startswith(f"refused port {port} of this machine cannot be used") and "--coordinator" in line


LISTENS = {
    "127.0.0.1": "127.0.0.1",
    "localhost": "127.0.0.1",
    "::1": "::1",
    "fd00::2": "fd00::2",
    "node7": "",  # 127.0.1.1, as Debian calls a machine to itself
    "node8": "192.0.2.8",
    "": "",
}


@pytest.mark.parametrize(("host", "address"), LISTENS.items())
def test_process_0_listens_where_the_others_reach_it(monkeypatch, host, address):
    known, asked = {"node7": "127.0.1.1", "node8": "192.0.2.8", "localhost": "127.0.0.1"}, []
    resolve = socket.getaddrinfo
    of = lambda name, *rest, **options: resolve(known.get(name, name), *rest, **options)
    monkeypatch.setattr(socket, "getaddrinfo", of)
    monkeypatch.setattr(socket, "create_server", lambda at, **options: asked.append((at, options)))
    companion._listen(host, 7000)
    ((found, options),) = asked
    assert found == (address, 7000)
    family = socket.AF_INET6 if ":" in address or not address else socket.AF_INET
    assert not socket.has_dualstack_ipv6() or options["family"] == family


@pytest.mark.parametrize(
    ("index", "told"), [(0, "there is no machine 'a..b'"), (1, "nobody answers at a..b:1 ")]
)
def test_a_machine_that_cannot_be_is_refused(meeting, index, told):
    line = meeting.come(index, 2, 1, wait_s=0.5, host="a..b").readline().decode()
    assert line.startswith(f"refused {told}")


def test_a_greeting_of_another_version_is_passed_over(meeting):
    first = meeting.come(0, 2, 0)
    port = int(first.readline().split()[1])  # at PORT
    with socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(b'{"index": 1, "count": 2}\n')
        assert meeting.come(1, 2, port).readline().startswith(b"ready ")
    assert first.readline().startswith(b"ready ")


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\x12\x04\xff\xfe\n"])
def test_another_server_at_the_port_of_process_0_is_told_of(meeting, says):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        came = meeting.come(1, 2, port, wait_s=2.0)
        link, _ = server.accept()
        with link:
            link.recv(100)
            link.sendall(says)
        server.close()
        line = came.readline().decode()
    assert line.startswith(f"refused the program that answers at 127.0.0.1:{port} is no process"), line


def test_a_coordinator_that_does_not_come_is_waited_for_so_long(meeting):
    port = free_port()
    line = meeting.come(1, 2, port, wait_s=0.5).readline().decode()
    assert line.startswith(f"refused nobody answers at 127.0.0.1:{port} after 0 s: start process 0")


def test_processes_that_do_not_come_are_named_to_those_that_did(meeting):
    port = free_port()
    lines = [meeting.come(k, 4, port, wait_s=2.0) for k in (0, 2)]
    for line in lines:
        assert line.readline().decode().startswith("refused process 1, 3 of 4 did not connect within 2 s")


@pytest.mark.parametrize(
    ("index", "count", "told"),
    [
        (1, 3, "process 1 says that there are 3 processes, and process 0 that there are 2"),
        (0, 2, "cannot be used"),
    ],
)
def test_processes_that_count_otherwise_are_refused(meeting, index, count, told):
    first = meeting.come(0, 2, 0)
    port = int(first.readline().split()[1])  # which it has
    assert told in meeting.come(index, count, port).readline().decode()
    if index:
        assert told in first.readline().decode()


def test_two_processes_of_one_number_are_refused(meeting):
    port = free_port()
    first = meeting.come(0, 3, port)
    meeting.come(2, 3, port)
    meeting.come(2, 3, port)
    assert "two processes say that they are process 2" in first.readline().decode()


# A process that says a word after so many seconds, and ends when its companion says something; without a word, at once.
BESIDE = """
import os, subprocess, sys, time
word, seconds, *command = sys.argv[1:]
companion = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
assert companion.stdout.readline().startswith(b"ready ")
time.sleep(float(seconds))
if not word:
    os._exit(9)
companion.stdin.write(word.encode() + b"\\n")
companion.stdout.readline()
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_that_another_was_killed_is_told_by_a_process_that_fails_before_it_hears_of_it(tmp_path, killed):
    port, begun = free_port(), []
    for k in range(2):
        how = ("", "2") if k == killed else ("failed", "0")
        words = [sys.executable, "-P", companion.__file__, k, 2, "127.0.0.1", port, 20.0]
        with (tmp_path / f"{k}.log").open("w") as log:
            command = [sys.executable, "-c", BESIDE, *how, *map(str, words)]
            begun.append(subprocess.Popen(command, stderr=log))
    ended(begun, 30.0)
    assert said(tmp_path, 1 - killed).startswith(f"process {killed} of 2 (pid ")


def test_who_gave_up_before_all_had_come_may_come_again(meeting):
    port = free_port()
    first = meeting.come(0, 3, port)
    meeting.come(1, 3, port)
    time.sleep(0.5)
    meeting.begun[1].stdin.close()  # its process ended
    assert meeting.begun[1].wait(10) == 0
    others = [meeting.come(k, 3, port) for k in (1, 2)]
    assert all(one.readline().startswith(b"ready ") for one in (first, *others))
    for one in meeting.begun:
        one.stdin.write(b"bye\n") if not one.stdin.closed else None
    assert [one.wait(10) for one in meeting.begun] == [0] * 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((1, "a:1", None), "set --config.mesh.hosts"),
        ((2, "a:1", None), "--process=K is missing"),
        ((2, None, 1), "--coordinator=HOST:PORT is missing"),
        ((2, "a", 1), "--coordinator=a is no HOST:PORT"),
        ((2, "a:70000", 1), "is no HOST:PORT"),
        *(
            ((2, f"{host}:1", 1), r"is no HOST:PORT: .*or \[fd00::1\]:7000")
            for host in ("fd00::2", "[]", "[a")
        ),
        ((2, "a:1", 2), "--process=2 is not in 0 to 1"),
    ],
)
def test_flags_that_cannot_be_are_refused(words, told):
    with pytest.raises(hosts.HostsError, match=told), hosts.joined(*words):
        pass


def test_hosts_that_nobody_announces_are_refused(tmp_path):
    (code,) = ended(start(TALK, tmp_path, 2, "talk", coordinator="-", only=[0]), 60.0)
    assert code == 2 and "give each process --coordinator=HOST:PORT" in said(tmp_path, 0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"road": "compiled"}, "set road=hosted"),
        ({"seeds": "2"}, "parallel seeds need one process"),
        ({"rewards.batch": "step"}, "set rewards.batch=task"),
        ({"engine.kind": "vllm"}, "only one process can use a vLLM server"),
    ],
)
def test_what_several_hosts_cannot_share_is_refused(change, told):
    with pytest.raises(ConfigError, match=told):
        load_config("configs/micro.py:voting-isolated-xs-math", [("mesh.hosts", "2"), *change.items()])


@pytest.mark.parametrize(
    ("visible", "devices", "given"),
    [
        ("0", 1, [0]),  # --gpus-per-task=1: each task sees its own
        ("0,1,2,3,4,5,6,7", 8, [*range(8)]),  # a task for each node
        ("0,1,2,3", 1, [3]),  # the GPUs of a node for all its tasks: JAX gives each its own
        (None, 1, [3]),
    ],
)
def test_a_task_of_slurm_takes_the_gpus_that_it_alone_sees(visible, devices, given, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in as_slurm(7000, local=3).items():
        monkeypatch.setenv(name, value)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    at, process, ids = joining._scheduled(2, devices)
    assert (at, process, [*ids]) == (("localhost", 7000), 0, given)


def test_a_model_split_within_processes_on_cpu_needs_threads_for_it(monkeypatch):
    monkeypatch.delenv("PJRT_NPROC", raising=False)
    texts = [("mesh.hosts", "2"), ("mesh.model", "2")]
    with pytest.raises(PartsError, match=r"start all processes with PJRT_NPROC=16"):
        make_mesh(load_config("configs/micro.py:voting-isolated-xs-math", texts))


def test_training_on_several_hosts_needs_them(tmp_path):
    config = dataclasses.replace(
        load_config("configs/micro.py:voting-isolated-xs-math"), mesh=MeshConfig(hosts=2)
    )
    with pytest.raises(hosts.HostsError, match=r"mesh.hosts is 2, and this process is one of 1"):
        train(config, tmp_path / "run")
    assert not os.listdir(tmp_path)
