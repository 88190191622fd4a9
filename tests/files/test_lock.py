"""One writer a folder, held against other processes."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from errno import EROFS
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from filelock import FileLock

from dmlkit.errors import UserError
from dmlkit.files.lock import LOCK, is_held, sole_writer
from tests.conftest import END

HOLDER = """
import sys, time
from pathlib import Path
from dmlkit.files.lock import sole_writer
with sole_writer(Path(sys.argv[1]), what="a training"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """A process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_and_a_killed_one_holds_nothing(holder, tmp_path: Path):
    folder = tmp_path / "run"
    refused = pytest.raises(UserError, match="a study is running in this folder")
    with refused, sole_writer(folder, what="a study", patience=0.1):
        pass
    assert (folder / ".lock").exists()
    holder.kill()
    holder.wait()
    with sole_writer(folder, what="a study"):
        assert (folder / ".lock").exists()
    assert not list(folder.iterdir())


def test_a_folder_made_for_nothing_is_removed(tmp_path: Path):
    with pytest.raises(RuntimeError), sole_writer(tmp_path / "new", what="a training"):
        raise RuntimeError
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").mkdir()
    with sole_writer(tmp_path / "old", what="a training"):
        pass
    assert (tmp_path / "old").exists()


def test_who_waits_for_a_folder_that_is_removed_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, waits, acquire = tmp_path / "new", Event(), FileLock.acquire

    def announced(self: FileLock, *args: Any, **options: Any) -> Any:
        waits.set()
        return acquire(self, *args, **options)

    def write() -> bool:
        with sole_writer(folder, what="a training", patience=END):
            return is_held(folder)

    with ThreadPoolExecutor(1) as pool:
        with sole_writer(folder, what="a training"):
            monkeypatch.setattr(FileLock, "acquire", announced)
            waiting = pool.submit(write)
            assert waits.wait(END)
        # The empty folder remains if the second writer locks it before it is removed.
        assert waiting.result(END)


def test_a_folder_is_held_while_a_process_lives_in_it_and_looking_leaves_no_trace(tmp_path: Path):
    assert not is_held(tmp_path / "none") and not is_held(tmp_path)
    with sole_writer(tmp_path, what="a training"):
        assert is_held(tmp_path)
    (tmp_path / LOCK).touch()  # of a process that was killed
    assert not is_held(tmp_path)
    with sole_writer(tmp_path, what="a training"):
        assert is_held(tmp_path)
    assert not is_held(tmp_path) and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_into_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(lock: FileLock, **_: object) -> None:
        raise OSError(EROFS, "Read-only file system", lock.lock_file)

    monkeypatch.setattr(FileLock, "acquire", refuse)
    message = re.escape(f"{tmp_path}: cannot write into this folder: Read-only file system")
    with pytest.raises(UserError, match=f"^{message}$"), sole_writer(tmp_path, what="a change"):
        pass
