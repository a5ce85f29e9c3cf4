"""A vLLM server that the run starts: by the command of the page, again where it died, and never longer than the run."""

import dataclasses
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
from fake_vllm import FakeVllm
from run_kit import records
from vllm_kit import PROMPT, answers, check, config_of, in_full, moved, service_of, train

from marl_jax.config.run_config import ConfigError, EngineConfig, VllmConfig
from marl_jax.rollouts.vllm import client
from marl_jax.rollouts.vllm.started import ServerRequirements, Started
from marl_jax.rollouts.vllm.wire import Server
from marl_jax.rollouts.voices import EngineGone
from marl_jax.run_folder.checkpoints import steps
from marl_jax.run_folder.folder import read
from marl_jax.runs.loading.parts import load_parts
from marl_jax.sampling import Request

pytestmark = pytest.mark.long

FAKE = Path(__file__).with_name("fake_vllm.py")
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
NEEDED = ServerRequirements("models/Qwen3-0.6B", "bfloat16", 25600, 2, 64)


def program(path, *lines):
    """A program in the place of the Python of vLLM's environment."""
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def starting(base, tmp_path, **environment):
    """A run that starts the stand-in, and the file in which its processes are listed."""
    own = f"PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))}"
    python = program(
        tmp_path / "python", f'{own} exec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} "$@"'
    )
    seen = tmp_path / "seen"
    chosen = VllmConfig(
        start=True,
        python=python,
        flags=f"--seen {shlex.quote(str(seen))}",
        environment=environment,
        timeout=60.0,
    )
    return config_of(base, "", engine=EngineConfig("vllm", chosen, max_prompt=72, lanes=8)), seen


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(seen, count):
    """So many processes were there, and none of them is any more."""
    pids = [int(line) for line in seen.read_text().split()]
    assert len(pids) == count
    return not any(map(alive, pids))


@pytest.mark.parametrize("of", ["adapters", "full weights"])
def test_a_run_goes_on_with_a_new_server_where_its_own_died_in_the_middle_of_a_step(base, tmp_path, of):
    config, seen = starting(base, tmp_path, FAKE_DIES_AFTER="18")  # a step has 12 calls, the checks 2
    config = in_full(config) if of == "full weights" else config
    reached, said = train(config, tmp_path / "run")
    assert reached == 2 and ended(seen, 2)
    page = "vLLM started by this run (vllm.log), 8 requests in flight; steps do not repeat to the bit"
    assert page in " ".join(said.split())
    assert read(tmp_path / "run")["settled"]["bit_exact"] is False
    # Beside what the libraries of the server print, which depends on what is installed.
    assert (tmp_path / "run" / "vllm.log").read_text().split().count("ready") == 2
    lines, _ = records(tmp_path / "run")
    assert [(line["step"], line["calls"]) for line in lines] == [(1, 12), (2, 12)]
    # The new one has the weights of step 1: its log-probs are those that the trainer computes.
    assert max(line["role/generator/gap_max"] for line in lines) < 1e-3


class Here:
    """In the place of `Started`: servers in this process, one after another."""

    log = Path("vllm.log")

    def __init__(self, base, dies_after=None):
        self.base, self.dies_after, self.servers, self.running = base, dies_after, [], False

    def start(self):
        self.end()
        self.servers.append(FakeVllm(self.base))
        self.servers[-1].dies_after, self.running = self.dies_after, True
        return self.servers[-1].url

    def end(self):
        if self.running:
            self.servers[-1].__exit__()
        self.running = False


def serving(base, monkeypatch, timeout=20.0, change=lambda config: config, **options):
    """The servers, and the engines that ask them."""
    here = Here(base, **options)
    monkeypatch.setattr(client, "Started", lambda chosen, needed, log: here)
    engine = EngineConfig("vllm", VllmConfig(start=True, timeout=timeout), max_prompt=72, lanes=8)
    config = change(config_of(base, "", engine=engine))
    parts = load_parts(config)
    trees = moved(parts.start(0), 1)
    return here, trees, service_of(config, parts, trees)


@pytest.mark.parametrize("fault", ["hangs", "closed", "too few"])
def test_what_a_server_of_the_run_does_not_answer_a_new_one_does(base, monkeypatch, fault):
    here, trees, service = serving(base, monkeypatch, timeout=5.0)
    before = answers(service, trees)
    here.end() if fault == "closed" else here.servers[0].faults.add(fault)
    assert answers(service, trees) == before  # by the same adapters, under the same seeds
    assert len(here.servers) == 2
    # A server that dies between two steps, too.
    here.end()
    service.update(after := moved(trees, 2), {"p0": 1, "p1": 1})
    found = answers(service, after)
    assert len(here.servers) == 3 and found != before
    assert list(here.servers[2].adapters) == here.servers[2].loaded and len(here.servers[2].loaded) == 2
    service.close()
    assert not here.running


def test_answers_that_are_at_hand_when_a_server_dies_are_not_asked_for_again(base, monkeypatch):
    here, _, service = serving(base, monkeypatch)
    engine, request = service.engines["p0"], Request(PROMPT, (0,), 8, policy="p0")
    first = [engine.submit(dataclasses.replace(request, key=(n,))) for n in range(2)]
    wait([engine._jobs[ticket] for ticket in first], timeout=60)
    here.end()
    last = engine.submit(dataclasses.replace(request, key=(2,)))
    wait([engine._jobs[last]], timeout=60)
    assert [ticket for ticket, _ in engine.step()] == first and len(here.servers) == 2
    found = {}
    while engine.pending:
        found |= dict(engine.step())
    assert list(found) == [last]
    service.close()


def test_a_new_server_is_sent_the_full_weights_that_the_one_before_had(base, monkeypatch):
    here, trees, service = serving(base, monkeypatch, change=in_full)
    before = answers(service, trees)
    here.end()
    assert answers(service, trees) == before
    here.end()
    service.update(after := moved(trees, 2), {"p0": 1})
    check(answers(service, after)["p0"], after["p0"], service.engines["p0"].config)
    assert [len(server.reloaded) for server in here.servers] == [1, 1, 1]
    service.close()


def test_several_servers_of_a_run_start_and_end_with_it(base, tmp_path):
    config, seen = starting(base, tmp_path)
    config = in_full(dataclasses.replace(config, steps=1), map={"generator": "p0", "aggregator": "p1"})
    reached, said = train(config, tmp_path / "run")
    assert reached == 1 and ended(seen, 2)
    assert "vLLM started by this run (vllm-*.log)" in " ".join(said.split())
    assert {path.name for path in (tmp_path / "run").glob("*.log")} == {"vllm-p0.log", "vllm-p1.log"}
    lines, _ = records(tmp_path / "run")
    for role in config.roles:
        assert max(line[f"role/{role}/gap_max"] for line in lines) < 1e-3


def test_a_server_that_dies_again_and_again_is_told_in_one_line(base, monkeypatch):
    here, trees, service = serving(base, monkeypatch, dies_after=2)  # the checks alone
    with pytest.raises(EngineGone, match=r"cannot be reached .*: see its log, 'vllm.log'") as told:
        answers(service, trees, count=10)
    assert "\n" not in str(told.value) and len(here.servers) == 1 + client.RESTARTS
    service.close()
    assert not here.running


def test_a_run_that_is_asked_to_stop_ends_its_server(base, tmp_path, monkeypatch):
    config, seen = starting(base, tmp_path)
    complete, asked = Server.complete, []

    def interrupted(self, *args):
        asked.append(args)
        if len(asked) == 2 + 12 + 4:  # in the second step
            os.kill(os.getpid(), signal.SIGTERM)
        return complete(self, *args)

    monkeypatch.setattr(Server, "complete", interrupted)
    reached, _ = train(config, tmp_path / "run")
    assert reached == 1 and steps(tmp_path / "run" / "checkpoints") == [1] and ended(seen, 1)


def test_the_page_shows_the_command_that_runs():
    address = "http://127.0.0.1:8000"
    # Beside a run that has the first GPU.
    beside = lambda needed: f"    CUDA_VISIBLE_DEVICES=1 {needed.shown(VllmConfig(), address)}\n"
    assert beside(NEEDED) in PAGE.read_text()
    chosen = VllmConfig(flags="--gpu-memory-utilization 0.8", environment={"CUDA_VISIBLE_DEVICES": "1"})
    shown = shlex.split(NEEDED.shown(chosen, address))
    assert shown[1] == "CUDA_VISIBLE_DEVICES=1" and shown[-2:] == ["--gpu-memory-utilization", "0.8"]
    assert shown[2:] == NEEDED.command(chosen, address)
    # vLLM takes no adapters of rank 4, but has room for them in rank 8.
    small = dataclasses.replace(NEEDED, rank=4).shown(chosen, address)
    assert "--max-lora-rank 8 " in small
    assert "lora" not in dataclasses.replace(NEEDED, adapters=0, rank=0).command(chosen, address)
    in_full = dataclasses.replace(NEEDED, adapters=0, rank=0, full=True)
    assert beside(in_full) in PAGE.read_text()
    assert in_full.shown(VllmConfig(), address).startswith("VLLM_SERVER_DEV_MODE=1 ")


def refused(tmp_path, match, **changes):
    with pytest.raises(EngineGone, match=match) as told:
        Started(VllmConfig(start=True, **changes), NEEDED, tmp_path / "log").start()
    assert "\n" not in str(told.value)


def test_a_server_that_does_not_start_is_told_in_one_line(tmp_path):
    refused(
        tmp_path, r"engine.vllm.python is 'no/python', which is no program: .*make vllm", python="no/python"
    )
    told = ["one thing", "ValueError: memory is short", "RuntimeError: it failed. See root cause above."]
    broken = program(tmp_path / "broken", *(f"echo '{line}'" for line in told), "echo", "exit 3")
    (tmp_path / "log").write_text("of before\n")
    what = r"at its start \(exit code 3\) and logged 'ValueError: memory is short': see its log, '.*/log'"
    refused(tmp_path, what, python=broken)
    pid = tmp_path / "pid"
    slow = program(tmp_path / "slow", f"echo $$ > {shlex.quote(str(pid))}; echo loading; exec sleep 600")
    refused(tmp_path, r"not ready within .*, 2 s, and logged 'loading'", python=slow, start_timeout=2.0)
    assert ended(pid, 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        refused(
            tmp_path, rf"engine.vllm.url is {url}, and its port .* use\): .*free port", python=slow, url=url
        )


OWNER = """
import sys, time
from pathlib import Path
from marl_jax.rollouts.vllm.started import ServerRequirements, Started
from marl_jax.rollouts.vllm.vllm_config import VllmConfig
needed = ServerRequirements("base", "float32", 80, 1, 8)
started = Started(VllmConfig(start=True, python=sys.argv[1]), needed, Path(sys.argv[2]))
print(started.start(), flush=True)
time.sleep(600)
"""


def test_a_server_and_its_children_end_with_a_run_that_is_killed(tmp_path):
    pids, health = tmp_path / "pids", tmp_path / "health"
    health.touch()
    folder, listed = shlex.quote(str(tmp_path)), shlex.quote(str(pids))
    serve = f"{shlex.quote(sys.executable)} -m http.server --bind 127.0.0.1 --directory {folder}"
    python = program(
        tmp_path / "python",
        f"(trap '' TERM; exec sleep 600) & echo $! $$ > {listed}",
        'while [ "$1" != --port ]; do shift; done',
        f'exec {serve} "$2"',
    )
    command = [sys.executable, "-c", OWNER, python, tmp_path / "log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout.readline().startswith(b"http://127.0.0.1:")
        child, server = map(int, pids.read_text().split())
        assert alive(child) and alive(server)
        owner.kill()
    end = time.monotonic() + 30
    while (alive(child) or alive(server)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(child) and not alive(server)


def test_what_is_set_of_a_start_is_checked_with_the_configuration(base):
    def problems(**changes):
        with pytest.raises(ConfigError) as told:
            config_of(base, "", engine=EngineConfig("vllm", VllmConfig(**changes), max_prompt=72))
        return told.value.problems

    assert any("engine.vllm.start=true" in line for line in problems())
    for url in (
        "http://10.0.0.7:8000",
        "https://127.0.0.1:8000",
        "http://localhost",
        "http://127.0.0.1:99999",
    ):
        (line,) = problems(start=True, url=url)
        assert url in line and "leave the url out" in line
    (line,) = problems(start=True, flags="--a 'b")
    assert "engine.vllm.flags" in line and "close its quotes" in line
