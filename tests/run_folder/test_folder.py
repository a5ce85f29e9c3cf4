"""A run folder belongs to one process, remembers what it was started with, and says in one line what is wrong."""

import dataclasses
import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from marl_jax.config.run_config import load_config
from marl_jax.run_folder import files, folder
from marl_jax.run_folder.files import DiskFull, write_atomically
from marl_jax.run_folder.folder import LOCK, FolderError, begin, check_held, open_folder

CONFIG = load_config("configs/micro.py:voting-isolated-xs-math")
VERSIONS = folder.versions()
DIGESTS = {"base": "a" * 64, "tokenizer": "b" * 64, "data": "c" * 64, "prompts": "d" * 64}
# Holds the folder, has a child that outlives it, and says when it is ready.
HOLDER = """
import subprocess, sys, time
from marl_jax.run_folder.folder import open_folder
with open_folder(sys.argv[1]):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def same_code(monkeypatch):
    """Tests may run while the library is being edited."""
    monkeypatch.setattr(folder, "versions", lambda: VERSIONS)


def test_a_second_process_is_refused_until_the_first_is_gone_even_by_sigkill(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    child = int(holder.stdout.readline())
    try:
        with (
            pytest.raises(FolderError, match=rf"another process \(pid {holder.pid} on .*\) is running in"),
            open_folder(tmp_path),
        ):
            pass
        holder.kill()
        holder.wait()
        with open_folder(tmp_path) as path:
            assert path == tmp_path
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()


def test_the_same_process_cannot_open_it_twice_and_can_again_afterwards(tmp_path):
    with open_folder(tmp_path / "deep" / "run"):  # noqa: SIM117
        with pytest.raises(FolderError, match=f"pid {os.getpid()}"), open_folder(tmp_path / "deep" / "run"):
            pass
    with open_folder(tmp_path / "deep" / "run"):
        pass


def test_a_folder_that_was_moved_or_replaced_is_written_to_no_more(tmp_path):
    """What a process saves by its name would get into whatever lies there now."""
    place = tmp_path / "run"
    with open_folder(place) as path:
        with pytest.raises(FolderError, match="pid"), open_folder(place):
            pass
        check_held(path)
        place.rename(tmp_path / "moved")
        with pytest.raises(FolderError, match="no longer the folder that this run began in"):
            check_held(path)
        with open_folder(tmp_path / "moved2") as other:
            check_held(other)
        place.mkdir()
        (place / LOCK).touch()
        with pytest.raises(FolderError, match="no longer the folder"):
            check_held(path)
    check_held(path)  # it is nobody's any more


def test_a_home_that_does_not_exist_is_a_name_like_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_folder("~nosuchuser/run") as path:
        assert path == tmp_path / "~nosuchuser" / "run"


@pytest.mark.parametrize("place", ["FILE", "FILE/below", "/proc/self", "/proc/none/run", ""])
def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path, place):
    (tmp_path / "FILE").write_text("")
    place = place.replace("FILE", f"{tmp_path}/FILE")
    with pytest.raises(FolderError, match="--workdir") as error, open_folder(place):
        pass
    assert "\n" not in str(error.value)


def test_a_folder_with_files_of_something_else_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "index.md").write_text("a page")
    (tmp_path / "more").mkdir()
    strange = pytest.raises(FolderError, match=r"holds files that are not a run's \(index\.md and 1 more\)")
    with strange, open_folder(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.md", "more"]


def test_a_folder_in_which_a_start_came_to_nothing_can_be_used(tmp_path):
    with open_folder(tmp_path):
        pass
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "train.log").write_text("what a shell keeps of the run")
    (tmp_path / "metrics.jsonl").write_text("")
    with open_folder(tmp_path / "seed-0"):  # as where several seeds were refused
        pass
    with open_folder(tmp_path):
        pass


def leave_results(folder):
    """As a run does that made a step."""
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def test_the_first_start_writes_all_that_the_run_depends_on(tmp_path):
    settled = begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 64, "lengths": (32, 64)})
    record = json.loads((tmp_path / "config.json").read_text())
    assert settled == record["settled"] == {"lanes": 64, "lengths": [32, 64]}
    assert record["schema"] == 1 and record["digests"] == DIGESTS and record["changes"] == []
    assert {"marl_jax", "code", "jax", "jaxlib"} <= set(record["versions"])
    assert folder.read_config(tmp_path) == CONFIG


def test_the_same_start_again_leaves_the_file_alone_and_settles_nothing_anew(tmp_path):
    begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 64})
    before = (tmp_path / "config.json").read_bytes()
    assert begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 1}) == {"lanes": 64}
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_changed_start_is_refused_with_every_difference(tmp_path, monkeypatch):
    begin(tmp_path, CONFIG, DIGESTS)
    leave_results(tmp_path)
    changed = dataclasses.replace(
        CONFIG, steps=7, policies=dataclasses.replace(CONFIG.policies, base="other")
    )
    monkeypatch.setattr(folder, "versions", lambda: {**VERSIONS, "jax": "9.9.9"})
    with pytest.raises(FolderError) as error:
        begin(tmp_path, changed, {**DIGESTS, "prompts": "e" * 64})
    jax = VERSIONS["jax"]
    assert str(error.value).splitlines()[1:-1] == [
        f'  config.policies.base: "{CONFIG.policies.base}" -> "other"',
        "  config.steps: 200 -> 7",
        '  digests.prompts: "dddddddddddd..." -> "eeeeeeeeeeee..."',
        f'  versions.jax: "{jax}" -> "9.9.9"',
    ]


def test_a_folder_from_before_a_field_came_and_another_went_is_the_same_run(tmp_path):
    settled = begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 64})
    leave_results(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    mixing = record["config"]["learner"]["interventions"]["mixing"]
    del mixing["roles"], record["config"]["steps"]
    mixing["clip_roles"] = False
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert folder.read_config(tmp_path) == CONFIG
    assert begin(tmp_path, CONFIG, DIGESTS) == folder.settled_for(tmp_path, CONFIG) == settled
    mixing["another"] = 1
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(FolderError, match=r"cannot be used: learner.interventions.mixing.another is unknown"):
        folder.read_config(tmp_path)


def test_what_an_accepted_change_leaves_of_the_settled_values_is_known_before_it_is_accepted(tmp_path):
    begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 64, "road": "compiled", "devices": 1})
    changed = lambda **changes: dataclasses.replace(CONFIG, **changes)
    assert folder.settled_for(tmp_path, changed(steps=7)) == {}  # of a start that failed
    leave_results(tmp_path)
    assert folder.settled_for(tmp_path, changed(steps=7)) == {"lanes": 64, "road": "compiled", "devices": 1}
    assert folder.settled_for(tmp_path, changed(road="compiled", steps=7)) == {"lanes": 64}
    fewer = dataclasses.replace(CONFIG.data, problems=3)
    assert folder.settled_for(tmp_path, changed(data=fewer)) == {"lanes": 64, "road": "compiled"}
    longer = dataclasses.replace(CONFIG.sampling, max_new_tokens=CONFIG.sampling.max_new_tokens - 1)
    assert folder.settled_for(tmp_path, changed(sampling=longer)) == {}


def test_what_is_wrong_with_a_stored_configuration_is_told_once(tmp_path):
    begin(tmp_path, CONFIG, DIGESTS)
    record = json.loads((tmp_path / "config.json").read_text())
    record["config"]["workflow"]["name"] = "votin"
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(FolderError) as error:
        folder.read_config(tmp_path)
    told = str(error.value)
    assert told.count("cannot be used") == 1 and " it: " not in told and "\n" not in told
    assert told.endswith("did you mean 'voting'?")


def test_a_change_that_was_accepted_and_fails_is_taken_back(tmp_path):
    for lanes in (1, 2):  # a first start stays, failed or not
        with pytest.raises(ValueError, match="does not fit"), folder.restored_on_error(tmp_path):
            changed = dataclasses.replace(CONFIG, steps=200 + lanes)
            begin(tmp_path, changed, DIGESTS, lambda: {"lanes": 64}, accept_changes=True)
            leave_results(tmp_path)
            raise ValueError("does not fit")
        assert folder.read_config(tmp_path).steps == 201
    with folder.restored_on_error(tmp_path):
        begin(tmp_path, CONFIG, DIGESTS, accept_changes=True)
    assert folder.read_config(tmp_path) == CONFIG


def test_an_accepted_change_is_noted_and_compared_with_from_then_on(tmp_path):
    begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 64})
    leave_results(tmp_path)
    longer = dataclasses.replace(CONFIG, steps=300)
    assert begin(tmp_path, longer, DIGESTS, lambda: {"lanes": 1}, accept_changes=True) == {"lanes": 64}
    assert begin(tmp_path, longer, DIGESTS) == {"lanes": 64}
    assert folder.read(tmp_path)["changes"] == [["config.steps: 200 -> 300"]]
    with pytest.raises(FolderError, match=r"config\.steps: 300 -> 200"):
        begin(tmp_path, CONFIG, DIGESTS)


@pytest.mark.parametrize(
    "changed",
    [
        {"engine": dataclasses.replace(CONFIG.engine, lanes=32)},
        {"sampling": dataclasses.replace(CONFIG.sampling, max_new_tokens=17)},
        {"role_sampling": {"generator": {"max_new_tokens": 17}}},
    ],
)
def test_an_accepted_change_of_what_the_shapes_follow_from_settles_them_anew(tmp_path, changed):
    begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 64})
    leave_results(tmp_path)
    other = dataclasses.replace(CONFIG, **changed)
    assert begin(tmp_path, other, DIGESTS, lambda: {"lanes": 1}, accept_changes=True) == {"lanes": 1}
    assert begin(tmp_path, other, DIGESTS) == {"lanes": 1}


def test_what_is_settled_later_is_handed_back_and_changes_nothing_else(tmp_path):
    begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 64})
    before = folder.read(tmp_path)
    folder.settle(tmp_path, {"lanes": 32})
    assert begin(tmp_path, CONFIG, DIGESTS) == {"lanes": 32}
    assert folder.read(tmp_path) == before | {"settled": {"lanes": 32}}


@pytest.mark.parametrize("left", ["metrics.jsonl", "eval.jsonl", "checkpoints/2/seal.json"])
def test_a_start_that_came_to_nothing_binds_nobody(tmp_path, left):
    begin(tmp_path, CONFIG, DIGESTS, lambda: {"lanes": 64})
    (tmp_path / "metrics.jsonl").touch()
    other = dataclasses.replace(CONFIG, steps=7)
    assert begin(tmp_path, other, DIGESTS, lambda: {"lanes": 1}) == {"lanes": 1}
    assert folder.read_config(tmp_path) == other and folder.read(tmp_path)["changes"] == []
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("{}")
    with pytest.raises(FolderError, match=r"config\.steps: 7 -> 200"):
        begin(tmp_path, CONFIG, DIGESTS)


def test_a_role_that_came_or_went_is_a_difference():
    assert folder.differences({"a": {"x": 1}}, {"a": {"y": 1.0}}) == [
        "a.x: 1 -> nothing",
        "a.y: nothing -> 1.0",
    ]
    assert folder.differences({"a": 1}, {"a": 1.0}) == ["a: 1 -> 1.0"]
    assert folder.differences({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}) == []


def begin_broken(folder, **parts):
    """A record of which some parts are others, or None: not there."""
    (folder / "config.json").unlink(missing_ok=True)
    begin(folder, CONFIG, DIGESTS)
    record = {name: part for name, part in {**read_json(folder), **parts}.items() if part is not None}
    (folder / "config.json").write_text(json.dumps(record))


def read_json(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("text", ["[]", "{}", '"x"', '{"model_type": "qwen3", "vocab_size": 64}'])
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with (
        pytest.raises(FolderError, match=r"no run in .* \(its config.json is not a run's\)"),
        open_folder(tmp_path),
    ):
        pass
    with pytest.raises(FolderError, match="no run in"):
        begin(tmp_path, CONFIG, DIGESTS)
    assert os.listdir(tmp_path) == ["config.json"] and (tmp_path / "config.json").read_text() == text


@pytest.mark.parametrize("part", ["config", "digests", "versions", "settled", "changes"])
@pytest.mark.parametrize("value", ["x", None])
def test_a_record_that_lost_a_part_is_refused_by_its_name(tmp_path, part, value):
    begin_broken(tmp_path, **{part: value})
    with (
        pytest.raises(FolderError, match=rf"damaged \({part}\)|config.json is not a run's"),
        open_folder(tmp_path),
    ):
        pass


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/2/seal.json"])
def test_results_without_the_record_are_not_gone_on_from(tmp_path, left):
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("{}")
    for start in (lambda: open_folder(tmp_path).__enter__(), lambda: begin(tmp_path, CONFIG, DIGESTS)):
        with pytest.raises(FolderError, match=r"has results of a run, but no config.json: restore it"):
            start()


def test_the_run_around_a_place_is_found_with_its_record_or_without(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with open_folder(tmp_path / "run") as run:
        begin(run, CONFIG, DIGESTS)
        leave_results(run)
    for place, found in ((tmp_path, None), (run, run), (run / "checkpoints" / "20", run)):
        assert folder.enclosing_run(place) == found
    (run / "config.json").unlink()
    with pytest.raises(FolderError, match="--out is empty: give a directory"):
        folder.output_folder("")
    with pytest.raises(FolderError, match=r"'/proc/self' cannot be used \(.*\): choose another --out"):
        folder.output_folder("/proc/self")
    assert (
        folder.enclosing_run(run / "checkpoints") == run and folder.enclosing_run(tmp_path / "other") is None
    )


def test_no_run_and_a_broken_record_are_told_apart(tmp_path):
    with pytest.raises(FolderError, match=r"there is no run in .*train it first"):
        folder.read(tmp_path / "none")
    (tmp_path / "config.json").write_text('{"schema": 1,')
    with pytest.raises(FolderError, match="is no JSON"):
        folder.read(tmp_path)
    begin_broken(tmp_path, config={"schema": 0})
    with pytest.raises(FolderError, match="schema 0, this version reads 1"):
        folder.read_config(tmp_path)


def test_the_folder_of_several_seeds_says_where_its_runs_are(tmp_path):
    for seed in (10, 2):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}" / "config.json").touch()
    with pytest.raises(FolderError, match=r"its runs are one folder down, such as '.*/seed-2'$"):
        folder.read(tmp_path)


def test_the_digest_of_a_model_holds_the_ends_of_texts_that_stand_beside_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    plain = folder.digest_model(tmp_path)
    seen = []
    for ends in ("2", "null", "3", "[2, 3]", "[2, 4]"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ends}, "temperature": 0.6}}')
        seen.append(folder.digest_model(tmp_path))
    assert seen[:2] == [plain, plain]
    assert len({plain, *seen}) == 4


def test_digests_follow_the_files_that_matter(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"):
        (tmp_path / name).write_text(name)
    model, tokenizer = folder.digest_model(tmp_path), folder.digest_tokenizer(tmp_path)
    (tmp_path / "README.md").write_text("other")
    assert (model, tokenizer) == (folder.digest_model(tmp_path), folder.digest_tokenizer(tmp_path))
    (tmp_path / "model.safetensors").write_text("other")
    assert folder.digest_model(tmp_path) != model and folder.digest_tokenizer(tmp_path) == tokenizer
    (tmp_path / "chat_template.jinja").write_text("new")
    assert folder.digest_tokenizer(tmp_path) != tokenizer
    with pytest.raises(FolderError, match="cannot be read"):
        folder.digest_model(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FolderError, match="holds no model"):
        folder.digest_model(tmp_path / "empty")


def test_a_full_disk_is_told_and_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomically(path, "old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(DiskFull, match=r"the disk of .* is full .* make room and start the same command"):
            write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["config.json"]


def test_the_kernels_own_word_for_a_full_disk_is_understood_through_other_errors():
    def wrapped():
        try:
            with open("/dev/full", "w") as file:
                file.write("x")
        except OSError as error:
            raise ValueError("could not write") from error

    with pytest.raises(DiskFull), files.disk_errors(Path("/dev/full")):
        wrapped()
    with pytest.raises(DiskFull), files.disk_errors(Path("/dev/full")):
        raise RuntimeError("RESOURCE_EXHAUSTED: write: No space left on device")
    with pytest.raises(KeyError), files.disk_errors(Path("/dev/full")):
        raise KeyError("other")


def test_a_limit_of_a_files_size_is_told_as_such(tmp_path):
    child = "import pathlib, sys\nfrom marl_jax.run_folder.files import write_atomically\n"
    child += "write_atomically(pathlib.Path(sys.argv[1]), 'x' * 4096)"
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "-", sys.executable, "-c", child, tmp_path / "f.json"]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert "exceeds the size limit of files: raise the limit (ulimit -f) and start the same" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_folder_whose_name_is_not_utf_8_is_refused(tmp_path):
    with (
        pytest.raises(folder.FolderError, match="no name in UTF-8"),
        folder.open_folder(tmp_path / "caf\udce9"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "unmounted")
    with (
        pytest.raises(folder.FolderError, match=r"link to .*unmounted"),
        folder.open_folder(tmp_path / "run"),
    ):
        pass


def test_reading_results_without_a_config_asks_to_restore_it(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(folder.FolderError, match="restore it"):
        folder.read(tmp_path)


def test_a_file_system_that_syncs_only_files_is_no_error(tmp_path, monkeypatch):
    sync, number = os.fsync, errno.EINVAL

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        files.write_atomically(tmp_path / "file", "text")
