"""A checkpoint is complete or absent, comes back to the bit, and damage costs one checkpoint at most."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marl_jax.learning.optimiser import OptimiserConfig, transformation
from marl_jax.learning.update import LearnerState
from marl_jax.models import ModelConfig, init
from marl_jax.policies import PolicySpec, init_policies
from marl_jax.run_folder import checkpoints, files
from marl_jax.run_folder.checkpoints import CheckpointError, Checkpoints, restore, steps
from marl_jax.run_folder.files import DiskFull
from marl_jax.run_folder.folder import FolderError, open_folder


class State(flax.struct.PyTreeNode):
    optimiser: object
    damping: object
    steps: int = 0


def trees(seed=0):
    """Weights of two policies in two precisions, what the learner carries for them, and odd leaves."""
    rng = np.random.default_rng(seed)
    weights = {
        "p0": {"w": jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16), "layers": [{"a": jnp.ones(3)}]},
        "p1/x": {"w": jnp.asarray([np.nan, -0.0, np.inf, 1e-45], jnp.float32), "layers": []},
    }
    optimiser = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale(-1.0))
    learner = {
        name: State(optimiser.init(tree), tree if name == "p0" else None, steps=7 + seed)
        for name, tree in weights.items()
    }
    odd = (jnp.uint32(seed), np.arange(3, dtype=np.int64) << 40, np.float64(0.1), 0.1, True, (), None)
    return {"policies": weights, "learner": {"states": learner, "odd": odd}}


def blank(tree):
    """A template that shares no value with the tree."""
    return jax.tree.map(lambda x: type(x)(0) if isinstance(x, int | float) else x * 0, tree)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of the steps 1, 2, 3 in a folder; the second is the best."""
    store = Checkpoints(tmp_path, latest=10)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5)):
        store.save(step, trees(step), {"step": step, "position": [step, 0, 5], "best": 0.1 + 0.2}, score)
    store.close()
    return tmp_path


def test_everything_comes_back_to_the_bit(saved):
    restored, data = restore(saved, "latest", blank(trees()))
    assert_same(restored, trees(3))
    assert data == {"step": 3, "position": [3, 0, 5], "best": 0.1 + 0.2}


def test_data_may_hold_a_task_with_an_infinite_number(tmp_path):
    data = {"buffer": [{"task": {"meta": {"bound": float("inf")}}}]}
    store = Checkpoints(tmp_path)
    store.save(1, trees(), data)
    store.close()
    assert restore(tmp_path, "latest", blank(trees()))[1] == data


def test_weights_can_be_had_alone_by_shape_best_or_step(saved):
    shapes = jax.eval_shape(lambda: trees()["policies"])
    for which, step in (("best", 2), (1, 1), ("latest", 3)):
        restored, data = restore(saved, which, {"policies": shapes})
        assert data["step"] == step
        assert_same(restored, {"policies": trees(step)["policies"]})


@pytest.mark.parametrize("here", [Path("here"), "here", "~/here"])
def test_a_folder_may_be_named_from_where_the_process_stands(tmp_path, monkeypatch, here):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    store = Checkpoints(here)
    store.save(1, {"x": jnp.arange(3)}, {"step": 1})
    store.close()
    assert steps(tmp_path / "here") == steps(here) == [1]
    for which in ("latest", 1):
        assert_same(restore(here, which, {"x": jnp.zeros(3, jnp.int32)})[0]["x"], jnp.arange(3))


def test_policies_and_what_the_learner_carries_for_them_come_back(tmp_path):
    base = init(0, ModelConfig.preset("xs"))
    optimiser = transformation(OptimiserConfig())
    specs = {"p0": PolicySpec(), "p1": PolicySpec(frozen=True)}
    state = {
        "policies": init_policies(specs, {"base": base}),
        "learner": {"p0": LearnerState(optimiser.init(base), damping=base, steps=3, skipped=1)},
    }
    store = Checkpoints(tmp_path)
    store.save(3, state, {"step": 3})
    store.close()
    assert_same(restore(tmp_path, "latest", blank(state))[0], state)


def test_a_save_keeps_the_values_of_its_call_when_buffers_are_donated(tmp_path):
    overwrite = jax.jit(lambda x: x + 1, donate_argnums=0)
    value = jnp.arange(200_000.0)
    expected = np.array(value)
    store = Checkpoints(tmp_path)
    store.save(1, {"x": value}, {})
    for _ in range(20):
        value = overwrite(value)
    value.block_until_ready()
    store.close()
    assert_same(restore(tmp_path, 1, {"x": jnp.zeros(200_000)})[0]["x"], jnp.asarray(expected))


def test_the_latest_the_best_and_every_kth_are_kept(tmp_path):
    store = Checkpoints(tmp_path, latest=2, best=True, keep_every=4)
    for step, score in zip(range(1, 10), (0.1, None, 0.7, 0.2, 0.7, float("nan"), 0.3, 0.1, 0.2)):
        store.save(step, {"x": jnp.float32(step)}, {}, score)
    store.close()
    assert steps(tmp_path) == [3, 4, 8, 9]  # of two equal scores the earlier one is the best
    assert sorted(os.listdir(tmp_path)) == ["3", "4", "8", "9"]


def test_the_best_is_kept_though_its_seal_cannot_be_read_for_a_while(tmp_path, caplog):
    store = Checkpoints(tmp_path, latest=2, best=True)
    for step, score in ((1, 0.9), (2, 0.1)):
        store.save(step, {"x": jnp.float32(step)}, {}, score)
    store.wait()
    seal = tmp_path / "1" / "seal.json"
    words = seal.read_bytes()
    seal.write_bytes(b"")
    for step in (3, 4):
        store.save(step, {"x": jnp.float32(step)}, {}, 0.1 * step)
    store.wait()
    assert steps(tmp_path) == [1, 3, 4]
    restore(tmp_path, "best", {"x": jnp.float32(0)})
    assert "best: checkpoint 1 is left out, since its seal is damaged" in caplog.text
    seal.write_bytes(words)
    store.save(5, {"x": jnp.float32(5)}, {}, 0.5)
    store.close()
    assert steps(tmp_path) == [1, 4, 5] and restore(tmp_path, "best", {"x": jnp.float32(0)})[0] == {"x": 1.0}


def strip_some(directory, count=6):
    """Checkpoints of which the older ones are kept for their policies alone."""
    store = Checkpoints(directory, latest=1, keep_every=2, resume_only=("learner",))
    for step in range(1, count + 1):
        store.save(step, trees(step), {"step": step}, score=float(step == 3))
    store.close()


def test_what_is_kept_for_good_gives_up_what_only_a_resume_needs(tmp_path, caplog):
    strip_some(tmp_path)
    assert steps(tmp_path) == [2, 3, 4, 5, 6]
    whole = [step for step in steps(tmp_path) if (tmp_path / str(step) / "learner").exists()]
    assert whole == [5, 6]  # of the newest two are kept, though one was asked for
    shapes = jax.eval_shape(lambda: trees()["policies"])
    for which, step in (("best", 3), (2, 2)):
        restored, data = restore(tmp_path, which, {"policies": shapes})
        assert data["step"] == step
        assert_same(restored["policies"], trees(step)["policies"])
    with pytest.raises(CheckpointError, match="checkpoint 2 is kept without 'learner'"):
        restore(tmp_path, 2, blank(trees()))
    lose(tmp_path / "6")
    restored, data = restore(tmp_path, "latest", blank(trees()))
    assert data["step"] == 5
    assert_same(restored, trees(5))
    lose(tmp_path / "5")
    with pytest.raises(CheckpointError, match=r"can be used: .*; checkpoint 3 is kept without 'learner'"):
        Checkpoints(tmp_path).resume(blank(trees()))


@pytest.mark.parametrize("moment", ["before the seal", "between the seal and the files"])
def test_a_kill_while_giving_up_leaves_a_checkpoint_that_can_be_had(tmp_path, monkeypatch, moment):
    class Killed(BaseException):
        pass

    def kill(*args):
        raise Killed

    strip_some(tmp_path, 5)  # 4 and 5 are whole
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "write_atomically" if moment == "before the seal" else "_remove", kill)
        checkpoints._strip(tmp_path / "4", ("learner",))
    assert (tmp_path / "4" / "learner").exists()
    shapes = jax.eval_shape(lambda: trees()["policies"])
    assert_same(restore(tmp_path, 4, {"policies": shapes})[0]["policies"], trees(4)["policies"])
    checkpoints._strip(tmp_path / "4", ("learner",))
    assert not (tmp_path / "4" / "learner").exists()
    assert_same(restore(tmp_path, 4, {"policies": shapes})[0]["policies"], trees(4)["policies"])


def test_a_kill_between_the_two_names_of_a_step_that_is_saved_again_loses_nothing(saved):
    """The old one has given up its place, and the new one has not taken it."""
    (saved / "2").rename(saved / ".deleting-2")
    shutil.copytree(saved / "3", saved / ".saving-4")
    unseal(saved / ".saving-4")
    (saved / "3").rename(saved / ".saving-3")
    Checkpoints(saved, latest=10).close()
    assert sorted(path.name for path in saved.iterdir()) == ["1", "3"]
    assert_same(restore(saved, 3, blank(trees()))[0], trees(3))


def test_a_folder_that_is_moved_during_a_save_is_the_reason_that_is_told(tmp_path, monkeypatch):
    digest = checkpoints._digest

    def moved(path, sync=False):
        if (tmp_path / "run").exists():
            (tmp_path / "run").rename(tmp_path / "moved")
        return digest(path, sync)

    monkeypatch.setattr(checkpoints, "_digest", moved)
    with open_folder(tmp_path / "run") as folder:
        store = Checkpoints(folder / "checkpoints")
        store.save(1, trees(), {})
        with pytest.raises(FolderError, match="no longer the folder that this run began in"):
            store.close()


def test_an_error_between_the_two_names_puts_the_old_one_back(saved, monkeypatch):
    rename = os.rename

    def full(old, new):
        if Path(old).name == ".saving-3":
            raise OSError(28, "No space left on device")
        rename(old, new)

    store = Checkpoints(saved, latest=10)
    monkeypatch.setattr(checkpoints.os, "rename", full)
    with pytest.raises(DiskFull):
        store.save(3, trees(7), {"step": 3})
        store.close()
    assert sorted(path.name for path in saved.iterdir()) == ["1", "2", "3"]
    assert_same(restore(saved, 3, blank(trees()))[0], trees(3))


def test_what_was_not_asked_for_may_go_while_a_checkpoint_is_read(saved):
    """A run that goes on takes the states of the learner off its older checkpoints."""
    shutil.rmtree(saved / "3" / "learner")
    shapes = jax.eval_shape(lambda: trees()["policies"])
    assert_same(restore(saved, 3, {"policies": shapes})[0], {"policies": trees(3)["policies"]})
    with pytest.raises(CheckpointError, match="checkpoint 3 is damaged"):
        restore(saved, 3, blank(trees()))


def test_other_processes_wait_until_the_first_has_sealed_what_they_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints.hosts, "is_first", lambda: False)
    place, written = tmp_path / ".saving-3", SimpleNamespace(result=lambda: None)
    place.mkdir()
    with ThreadPoolExecutor() as pool:
        saving = pool.submit(Checkpoints._finish, None, written, place, {"step": 3})
        assert wait([saving], timeout=3 * checkpoints.POLL_S).not_done
        place.rename(tmp_path / "3")
        saving.result(timeout=60)


def truncate(place):
    largest = max(checkpoints._files(place), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def lose(place):
    checkpoints._files(place)[0].unlink()


def flip(place):
    largest = max(checkpoints._files(place), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def unseal(place):
    (place / "seal.json").write_text('{"step": 3, "fil')


def seal_with_a_list(place):
    (place / "seal.json").write_text("[]")


def flip_in_the_seal(place, at=0):
    seal = bytearray((place / "seal.json").read_bytes())
    seal[at or seal.index(b'"position": [3') + 13] ^= 1
    (place / "seal.json").write_bytes(seal)


@pytest.mark.parametrize("damage", [truncate, lose, flip, unseal, seal_with_a_list, flip_in_the_seal])
def test_a_damaged_newest_checkpoint_falls_back_says_so_and_loses_nothing(saved, damage, caplog):
    damage(saved / "3")
    before = {path: path.read_bytes() for path in checkpoints._files(saved)}
    restored, data = restore(saved, "latest", blank(trees()))
    assert data["step"] == 2
    assert_same(restored, trees(2))
    assert {path: path.read_bytes() for path in checkpoints._files(saved)} == before
    lines = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert len(lines) == 1 and "checkpoint 3 is damaged" in lines[0] and "going back to step 2" in lines[0]
    with pytest.raises(CheckpointError, match="checkpoint 3 is damaged"):
        restore(saved, 3, blank(trees()))

    store = Checkpoints(saved, latest=10)
    assert store.resume(blank(trees()))[1]["step"] == 2
    store.save(3, trees(3), {"step": 3})
    store.close()
    assert steps(saved) == [1, 2, 3] and (saved / "3.damaged").is_dir()
    assert restore(saved, "latest", blank(trees()))[1] == {"step": 3}


def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_passed_over(saved, monkeypatch, caplog):
    import orbax.checkpoint.experimental.v1 as ocp

    load = ocp.load_checkpointables

    def beside_its_run(place, wanted):
        if place.name == "3":
            shutil.rmtree(place)
            raise FileNotFoundError(place)
        return load(place, wanted)

    monkeypatch.setattr(ocp, "load_checkpointables", beside_its_run)
    restored, data = restore(saved, "latest", blank(trees()))
    assert data["step"] == 2
    assert_same(restored, trees(2))
    assert "checkpoint 3 was removed by its run while it was read: going back to step 2" in caplog.text


@pytest.mark.long
def test_a_seal_is_what_was_written_in_every_byte_and_one_without_a_digest_is_of_an_earlier_version(saved):
    place = saved / "2"
    content, whole = (place / "seal.json").read_bytes(), checkpoints._read_seal(place)
    for at in range(1, len(content)):
        flip_in_the_seal(place, at)
        with contextlib.suppress(checkpoints.Damaged):
            assert checkpoints._read_seal(place) == whole, content[at - 9 : at + 9]
        (place / "seal.json").write_bytes(content)
    (place / "seal.json").write_text(json.dumps(whole))
    assert restore(saved, "best", blank(trees()))[1]["step"] == 2


def test_what_the_metrics_do_not_reach_is_set_aside(saved, caplog):
    lose(saved / "2")
    store = Checkpoints(saved, latest=10)
    assert store.resume(blank(trees()), recorded=2)[1]["step"] == 1
    store.close()
    assert sorted(os.listdir(saved)) == ["1", "2.damaged", "3.unrecorded"]
    assert (
        "checkpoint 3 is ahead of metrics.jsonl, which has no step 3; checkpoint 2 is damaged" in caplog.text
    )
    with pytest.raises(
        CheckpointError, match=r"checkpoint 1 is ahead of metrics.jsonl, which has no step 1; rest"
    ):
        Checkpoints(saved).resume(blank(trees()), recorded=0)
    assert steps(saved) == [1]


def test_only_the_name_that_a_step_is_saved_under_is_a_checkpoint(saved):
    for name in ("010", "3.damaged", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT FOUR}"):
        (saved / name).mkdir()
    (saved / "7").touch()
    assert steps(saved) == [1, 2, 3]


def test_a_save_returns_before_its_files_are_complete(tmp_path, monkeypatch):
    going_on, digest = threading.Event(), checkpoints._digest

    def held_up(*args, **options):
        assert going_on.wait(60)
        return digest(*args, **options)

    monkeypatch.setattr(checkpoints, "_digest", held_up)
    store = Checkpoints(tmp_path)
    store.save(1, {"x": jnp.arange(3)}, {})
    assert steps(tmp_path) == []
    waiting = [threading.Thread(target=store.wait) for _ in range(2)]
    for thread in waiting:
        thread.start()
        thread.join(0.2)
    assert all(thread.is_alive() for thread in waiting)  # the second, too
    going_on.set()
    store.close()
    assert steps(tmp_path) == [1]


def test_nothing_to_restore_and_nothing_that_fits_are_told(saved, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    assert Checkpoints(empty).resume({}) is None
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .* train first"):
        restore(empty, "latest", {})
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 .* there is: 1, 2, 3"):
        restore(saved, 9, {})
    with pytest.raises(CheckpointError, match="holds no 'adapters'; there is: policies, learner"):
        restore(saved, 1, {"adapters": {}})
    template = blank(trees()["policies"])
    template["p0"]["w"] = jnp.zeros((3, 6), jnp.bfloat16)
    with pytest.raises(CheckpointError, match=r"'policies' p0\.w is \(\(3, 5\), .*checkpoint and \(\(3, 6\)"):
        restore(saved, 1, {"policies": template})
    for place in "123":
        lose(saved / place)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: checkpoint 3 is damaged"):
        restore(saved, "latest", {})


def test_a_state_without_arrays_does_not_fit_one_that_has_some(tmp_path):
    weights = {"w": jnp.ones(3)}
    plain, adam = (
        transformation(c).init(weights) for c in (OptimiserConfig("sgd", b1=0.0), OptimiserConfig())
    )
    store = Checkpoints(tmp_path)
    store.save(1, {"learner": LearnerState(plain, None, steps=1)}, {"step": 1})
    with pytest.raises(
        CheckpointError, match=r"does not fit: 'learner' optimiser.*nothing in the checkpoint"
    ):
        store.resume({"learner": LearnerState(adam, None)})
    assert_same(
        store.resume({"learner": LearnerState(plain, None)})[0]["learner"], LearnerState(plain, None, 1)
    )
    store.close()


def test_a_full_disk_stops_with_a_clear_message_and_harms_nothing(saved, monkeypatch):
    store = Checkpoints(saved, latest=10)

    def full(path):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        store.save(4, trees(4), {"step": 4})
        with pytest.raises(DiskFull, match="is full"):
            store.wait()
    assert sorted(os.listdir(saved)) == ["1", "2", "3"]
    store.save(4, trees(4), {"step": 4})
    store.close()
    assert restore(saved, "latest", blank(trees()))[1] == {"step": 4}


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of one megabyte."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here; the injected error above stands for it")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("left", [100_000, 0])
def test_a_disk_that_is_really_full_stops_at_once_and_goes_on_after_making_room(tiny_disk, left, caplog):
    tree = {"x": jax.random.normal(jax.random.key(0), (50_000,))}
    store = Checkpoints(tiny_disk / "checkpoints", latest=9)
    store.save(1, tree, {"step": 1})
    store.wait()
    free = shutil.disk_usage(tiny_disk).free
    (tiny_disk / "ballast").write_bytes(bytes(free - left))
    start = time.monotonic()
    with pytest.raises(DiskFull, match="is full"):
        store.save(2, tree, {"step": 2})
        store.wait()
    assert time.monotonic() - start < 60
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    visible = [name for name in os.listdir(store.directory) if not name.startswith(".")]
    assert visible == [
        "1"
    ]  # a thread of Orbax may still write below its temporary name while that is removed
    (tiny_disk / "ballast").unlink()
    store.save(3, tree, {"step": 3})  # for the same reason not step 2; a run ends here, and another saves it
    store.close()
    Checkpoints(store.directory, latest=9).close()  # the next start removes what was left
    assert sorted(os.listdir(store.directory)) == ["1", "3"]
    assert restore(store.directory, "latest", blank(tree))[1] == {"step": 3}


SAVER = """
import sys, pathlib
import jax.numpy as jnp
from marl_jax.run_folder.checkpoints import Checkpoints
store = Checkpoints(pathlib.Path(sys.argv[1]), latest=3)
tree = lambda step: {"x": {str(i): jnp.full((50, 50), step + i) for i in range(8)}}
found = store.resume(tree(0))
step = found[1]["step"] if found else 0
assert not found or all((found[0]["x"][str(i)] == step + i).all() for i in range(8))
print(step, flush=True)
while True:
    step += 1
    store.save(step, tree(step), {"step": step})
"""


def kill_at_random_moments(directory, kills):
    """Every start finds a whole checkpoint that is no older than the newest one before the kill."""
    rng, newest = random.Random(0), 0
    for kill in range(kills):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(directory)], stdout=subprocess.PIPE, text=True
        )
        line = saver.stdout.readline()
        while kill and not steps(directory) and saver.poll() is None:  # however slow the machine is
            time.sleep(0.01)
        time.sleep(0.05 + rng.random())
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        assert line and int(line) >= newest
        newest = max([newest, *steps(directory)])
    assert newest > 0
    left = {"x": {str(i): jnp.zeros((50, 50), jnp.int32) for i in range(8)}}
    for step in steps(directory):
        assert (restore(directory, step, left)[0]["x"]["7"] == step + 7).all()


@pytest.mark.long
def test_sigkill_while_saving_never_harms_older_checkpoints(tmp_path):
    kill_at_random_moments(tmp_path, 3)


@pytest.mark.campaign
def test_sigkill_while_saving_fifty_times(tmp_path):
    kill_at_random_moments(tmp_path, 50)
