"""Hostile programs: each is refused or fails as it should, and the world outside is as it was."""

import os
import re
import resource
import socket
import time

import pytest
from hostile import Attack, files, kernel, network, objects, poison, processes, resources, verdict
from hostile.world import World

from marl_jax.rewards import Pool, run_program

ATTACKS = [
    *(
        attack
        for theme in (files, processes, network, kernel, resources, verdict)
        for attack in theme.ATTACKS
    ),
    *objects.ATTACKS,
    *objects.ATTACKS_ON_THE_LINK,
]
MEMORY_MB = 256


@pytest.fixture(scope="module")
def pool():
    """Should isolation have a hole: what a zygote inherits here still stands between a bomb and the machine."""
    guards = {resource.RLIMIT_NPROC: 4096, resource.RLIMIT_FSIZE: 1 << 30}
    before = {which: resource.getrlimit(which) for which in guards}
    for which, most in guards.items():
        hard = before[which][1]
        resource.setrlimit(which, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    with Pool(workers=1) as pool:
        yield pool
    for which, limits in before.items():
        resource.setrlimit(which, limits)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    os.environ["MARL_JAX_TEST_SECRET"] = "SECRET-in-the-environment"
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()
    del os.environ["MARL_JAX_TEST_SECRET"]


def _tests(attack: Attack, world: World) -> list[dict]:
    if attack.check is not None:
        return [{"check": attack.check, "setup": f"SECRET = {world.secret!r}"}]
    if attack.script:
        return [{"stdin": "", "stdout": world.secret}]
    expected = world.secret if attack.fails is not None else attack.answer
    return [{"call": "attack", "args": [world.facts], "expected": expected}]


def test_there_are_enough_of_them():
    assert len(ATTACKS) + len(poison.POISONS) >= 80
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_attack_comes_to_nothing(attack, pool, world):
    before = time.monotonic()
    verdict = run_program(
        attack.program,
        _tests(attack, world),
        time_limit_s=attack.seconds,
        memory_limit_mb=MEMORY_MB,
        pool=pool,
    )
    if attack.fails is None:
        assert verdict.passed, f"not refused: {verdict.reason}"
    else:
        assert not verdict.passed
        assert re.search(attack.fails, verdict.reason), verdict.reason
    assert not verdict.lost, "the attack reached the zygote"
    assert world.secret not in verdict.reason
    assert time.monotonic() - before < attack.seconds + 30  # what sleeps, sleeps for a minute
    assert world.harm() == []


@pytest.mark.parametrize("attack", objects.ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_a_check_in_the_programs_own_process_would_pass(attack, pool):
    together = f"{attack.program}\nSECRET = 'x'\n{attack.check}\nprint('passed')"
    passed = run_program(together, [{"stdin": "", "stdout": "passed"}], pool=pool)
    assert passed.passed, passed.reason


@pytest.mark.parametrize("name", ["walk the frames", "ask the collector", "search the memory"])
def test_the_searches_find_what_is_there(name, pool, world):
    (attack,) = (attack for attack in ATTACKS if attack.name == name)
    planted = f"PLANTED = {world.secret!r}\n{attack.program}"
    found = [world.secret.removeprefix("SECRET-").encode() if name == "search the memory" else world.secret]
    tests = [{"call": "attack", "args": [world.facts], "expected": found}]
    assert run_program(planted, tests, time_limit_s=attack.seconds, pool=pool).passed


HARMS = {
    "a message reached": lambda world: socket.create_connection(world.tcp.getsockname()).close(),
    "a file appeared": lambda world: (world.drop / "x").touch(),
    "the canary changed": lambda world: world.canary.write_text("changed"),
    "the victim's limits changed": lambda world: resource.prlimit(
        world.victim.pid, resource.RLIMIT_NOFILE, (9, 9)
    ),
    "the victim died": lambda world: (world.victim.kill(), world.victim.wait()),
}


@pytest.mark.parametrize("harm", HARMS)
def test_harm_would_be_seen(harm, tmp_path):
    world = World(tmp_path)
    try:
        assert world.harm() == []
        HARMS[harm](world)
        assert any(found.startswith(harm) for found in world.harm())
    finally:
        world.close()


@pytest.mark.parametrize("poisoned", poison.POISONS, ids=lambda poisoned: poisoned.name.replace(" ", "-"))
def test_nothing_is_left_for_the_next_program(poisoned, pool):
    run_program(poisoned.plant, [{"stdin": "", "stdout": "-"}], time_limit_s=0.5, pool=pool)
    look = f"def look():\n    return {poisoned.look}\n"
    looked = run_program(look, [{"call": "look", "args": [], "expected": poisoned.clean}], pool=pool)
    assert looked.passed, looked.reason
