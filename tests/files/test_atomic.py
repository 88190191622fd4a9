"""Files that are whole or not there, whoever else writes them."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dmlkit.files.atomic import atomic_folder, atomic_write
from tests.files.test_outputs import no_space


def test_writers_at_once_do_not_meet(tmp_path: Path):
    target = tmp_path / ("long" * 60 + ".txt")  # 244 characters, of 255 that a file system takes
    with atomic_write(target) as first, atomic_write(target) as second:
        first.write_text("first")
        second.write_text("second")
        assert first != second
    assert target.read_text() == "first"  # the last to end
    assert [file.name for file in tmp_path.iterdir()] == [target.name]


def test_what_fails_leaves_the_old_file(tmp_path: Path):
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(target) as partial:
        partial.write_text("ne")
        raise RuntimeError
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_writer_left_is_removed_and_what_others_write_is_not(tmp_path: Path):
    mark = "0123456789abcdef" * 2
    others = [f".c.json.{mark}.partial", ".a.json.partial", f"a.json.{mark}.partial", f".a.json.{mark[1:]}.partial"]
    for name in (f".a.json.{mark}.partial", *others):
        (tmp_path / name).touch()
    with atomic_write(tmp_path / "a.json") as first, atomic_write(tmp_path / "a.json") as second:
        assert first.exists() and second.exists()
        second.touch()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*others, "a.json"])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="takes a folder that nobody can write into")
def test_a_fault_names_the_file_that_was_asked_for():
    with pytest.raises(OSError) as refused, atomic_write(Path("/proc/recipe.yaml")):
        pass
    assert (refused.value.filename, refused.value.filename2) == ("/proc/recipe.yaml", None)


def test_a_folder_in_the_place_of_the_file_is_named_and_a_fault_of_another_file_keeps_its_name(tmp_path: Path):
    target = tmp_path / "there"
    (target / "inside").mkdir(parents=True)
    with pytest.raises(OSError) as refused, atomic_write(target):
        pass
    assert (refused.value.filename, refused.value.filename2) == (str(target), None)
    with pytest.raises(FileNotFoundError) as missing, atomic_write(tmp_path / "file"):
        (tmp_path / "source").read_text()
    assert missing.value.filename == str(tmp_path / "source")
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


def test_a_full_disk_names_the_file(tmp_path: Path):
    target = tmp_path / "file"
    # no fixture: while it held, pytest would write its report, which is a file for some
    with no_space(), pytest.raises(OSError) as full, atomic_write(target) as partial:
        partial.write_bytes(bytes(2000))
    assert full.value.filename == str(target)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from dmlkit.files.atomic import atomic_folder
with atomic_folder(Path(sys.argv[1])) as partial:
    (partial / "new").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_replaced_in_one_step_and_a_kill_leaves_the_earlier_one(tmp_path: Path):
    target = tmp_path / "folder"
    with atomic_folder(target) as partial:
        (partial / "old").touch()
    assert subprocess.run([sys.executable, "-c", KILLED, target], check=False).returncode == -signal.SIGKILL
    assert [entry.name for entry in target.iterdir()] == ["old"] and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match="stop"), atomic_folder(target) as partial:  # removes what was left
        (partial / "new").touch()
        raise ValueError("stop")
    assert [entry.name for entry in tmp_path.rglob("*")] == ["folder", "old"]
    was_there, is_over = set[bool](), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            was_there.add(target.exists())

    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(200):
        with atomic_folder(target) as partial:
            (partial / str(number)).touch()
    is_over.set()
    watcher.join()
    assert was_there == {True}
    assert [entry.name for entry in tmp_path.rglob("*")] == ["folder", "199"]


def test_where_folders_cannot_be_exchanged_they_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dmlkit.files.atomic.exchange", lambda *_: False)
    for name in ("old", "new"):
        with atomic_folder(tmp_path / "folder") as partial:
            (partial / name).touch()
    assert [entry.name for entry in tmp_path.rglob("*")] == ["folder", "new"]
