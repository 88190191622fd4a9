"""Galleries that are written by several processes, and by some that are killed."""

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import pytest

from dmlkit.errors import UserError
from dmlkit.files import lock
from dmlkit.gallery.change import (
    add_images,
    compact_gallery,
    create_gallery,
    remove_images,
    rename_label,
    restore_version,
)
from dmlkit.gallery.files import MANIFEST
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.migrate import migrate_gallery
from dmlkit.vectors import fill, store
from tests.conftest import END, refuses
from tests.datasets import trees
from tests.fuzz.conftest import FULL
from tests.gallery.conftest import BIRDS
from tests.gallery.test_gallery import rows_of
from tests.processes import KILLED, Forked, end_before_change, wait_until
from tests.vectors.stored import ON_CPU


@pytest.fixture(autouse=True)
def nothing_is_embedded(place: Path) -> None:
    """Forget what tests before these have stored in the runs, since a change that embeds nothing is killed nowhere."""
    for run in ("run", "other"):
        shutil.rmtree(place / run / "vectors", ignore_errors=True)


FRACTIONS = [index / 20 for index in range(1, 20, 1 if FULL else 4)]
"""Of the time that a change takes, at which it is killed."""


def create(place: Path, gallery: Path) -> None:
    create_gallery(place / "run", place / "photos", gallery, model=ON_CPU)


def add(place: Path, gallery: Path) -> None:
    add_images(gallery, place / "photos", model=ON_CPU)


def remove(place: Path, gallery: Path) -> None:
    remove_images(gallery, labels=["crow"])


def rename(place: Path, gallery: Path) -> None:
    rename_label(gallery, "crow", "dove")


def restore(place: Path, gallery: Path) -> None:
    restore_version(gallery, 1)


def compact(place: Path, gallery: Path) -> None:
    compact_gallery(gallery)


def migrate(place: Path, gallery: Path) -> None:
    migrate_gallery(gallery, place / "other", model=ON_CPU)


Change = Callable[[Path, Path], None]


def make(change: Change, place: Path, gallery: Path, last: int | None = None) -> None:
    end_before_change(last)
    begun(gallery).touch()
    change(place, gallery)


def begun(gallery: Path) -> Path:
    """Is there once a process begins its change."""
    return gallery.with_suffix(".begun")


def started(change: Change, place: Path, gallery: Path) -> Forked:
    """A process that has just begun a change."""
    process = Forked(make, change, place, gallery)
    wait_until(begun(gallery).exists, process)
    return process


def ended(process: Forked) -> int:
    return process.wait(END)


@pytest.fixture
def some(place: Path, tmp_path: Path) -> Path:
    """A gallery of two birds, in two files."""
    for name in BIRDS[:2]:
        if (tmp_path / "before").exists():
            add_images(tmp_path / "before", place / "photos" / name, label=name, model=ON_CPU)
        else:
            create_gallery(place / "run", place / "photos" / name, tmp_path / "before", label=name, model=ON_CPU)
    return tmp_path / "before"


CHANGES = [create, add, remove, rename, restore, compact, migrate]


@pytest.mark.heavy
@pytest.mark.parametrize("change", CHANGES)
def test_a_kill_leaves_the_gallery_before_or_after(change: Change, place: Path, some: Path, tmp_path: Path):
    """At some moments of the time that it takes, and before its changes of the disk."""
    whole, gallery = tmp_path / "whole", tmp_path / "killed"
    if change is not create:
        shutil.copytree(some, whole)
    process, since = started(change, place, whole), perf_counter()
    assert ended(process) == 0
    seconds = perf_counter() - since
    after, killed, states = rows_of(whole), 0, set[str]()
    before = {} if change is create else rows_of(some)

    def check() -> None:
        if change is create and not (gallery / MANIFEST).exists():
            states.add("before")
            change(place, gallery)  # the same command starts over
        found = rows_of(gallery)
        GalleryFolder(gallery).check()
        assert found in (before, after)
        states.add("after" if found == after else "before")
        if found == before:
            change(place, gallery)
            assert rows_of(gallery) == after
        assert [entry.name for entry in gallery.iterdir() if "partial" in entry.name or "creating" in entry.name] == []
        shutil.rmtree(gallery)

    for moment in (*FRACTIONS, *range(1, 1000, 1 if FULL else 4)):
        begun(gallery).unlink(missing_ok=True)
        if change is not create:
            shutil.copytree(some, gallery)
        if moment in FRACTIONS:
            process = started(change, place, gallery)
            sleep(moment * seconds)
            process.kill()
        else:
            process = Forked(make, change, place, gallery, moment)
        code = ended(process)
        killed += code in (-signal.SIGKILL, KILLED)
        check()
        if moment not in FRACTIONS and code == 0:
            break
    sys.stdout.write(f"{change.__name__}: {killed} kills, the last before change {moment}; {states}\n")
    assert killed > 0


def killed_after_two_parts(change: Change, place: Path, gallery: Path) -> None:
    """A change that embeds its 12 images in parts of 4, and ends as by kill -9 once two of them are there."""
    store.BATCH_IMAGES = fill.BATCH_IMAGES = 4
    write_part, parts = fill.write_part, count()

    def write(*arguments: Any) -> None:
        write_part(*arguments)
        if next(parts) == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    fill.write_part = write
    change(place, gallery)


@pytest.mark.slow
@pytest.mark.parametrize("change", [create, add])
def test_a_kill_costs_one_part(change: Change, place: Path, tmp_path: Path, computed: list[int], monkeypatch):
    gallery, whole = tmp_path / "gallery", tmp_path / "whole"
    create(place, whole)
    if change is add:
        create_gallery(place / "run", None, gallery, model=ON_CPU)
    assert ended(Forked(killed_after_two_parts, change, place, gallery)) == -signal.SIGKILL
    assert (gallery / MANIFEST).exists() == (change is add)
    assert len(list(gallery.glob("vectors/*/*.safetensors"))) == 2
    for module in (store, fill):
        monkeypatch.setattr(module, "BATCH_IMAGES", 4)
    computed.clear()
    change(place, gallery)
    assert computed == [4]
    assert rows_of(gallery) == rows_of(whole)


@pytest.mark.slow
def test_what_a_killed_addition_has_embedded_goes_with_compact_after_a_week(place: Path, tmp_path: Path):
    gallery = tmp_path / "gallery"
    create_gallery(place / "run", None, gallery, model=ON_CPU)
    assert ended(Forked(killed_after_two_parts, add, place, gallery)) == -signal.SIGKILL
    left = list(gallery.glob("vectors/*/*.safetensors"))
    added = add_images(gallery, place / "photos" / "gull", model=ON_CPU)
    assert (added.added, added.resumed) == (3, 0) and len(left) == 2
    compact(place, gallery)  # another process may add the others now
    assert all(path.exists() for path in left)
    for path in left:
        os.utime(path, (1, 1))
    compact(place, gallery)
    assert not any(path.exists() for path in left) and len(rows_of(gallery)) == 3


def write(folder: Path, first: int) -> None:
    """Add five images to the gallery in a folder, and remove two of them."""
    for index in range(first, first + 5):
        photo = trees.photo(folder / f"{index}.jpg", 100 + index, (40, 30))
        assert add_images(folder / "gallery", photo, label=str(index), model=ON_CPU).added == 1
        if index % 2:
            remove_images(folder / "gallery", labels=[str(index)])


@pytest.mark.heavy
def test_writers_take_turns_and_lose_no_row(place: Path, tmp_path: Path):
    gallery = tmp_path / "gallery"
    create_gallery(place / "run", place / "photos" / "crow", gallery, label="crow", model=ON_CPU)

    writers = [Forked(write, tmp_path, first) for first in (0, 10)]
    seen: list[int] = []
    while any(writer.poll() is None for writer in writers):  # readers go on meanwhile
        seen.append(len(GalleryFolder(gallery)))
    assert [ended(writer) for writer in writers] == [0, 0]
    assert all(3 <= count <= 13 for count in seen)
    labels = Counter(GalleryFolder(gallery).labels)
    assert labels == {"crow": 3} | dict.fromkeys(["0", "2", "4", "10", "12", "14"], 1)


@pytest.mark.heavy
def test_the_same_pictures_from_two_writers_are_there_once(place: Path, tmp_path: Path):
    gallery = tmp_path / "gallery"
    create_gallery(place / "run", None, gallery, model=ON_CPU)
    writers = [Forked(add, place, gallery) for _ in range(2)]
    assert [ended(writer) for writer in writers] == [0, 0]
    assert len(rows_of(gallery)) == 12


def fail_with_a_full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_and_a_lock_are_told_and_change_nothing(place, some, tmp_path, monkeypatch):
    before = rows_of(some)
    for name in ("fsync", "replace"):  # of a new part, of the rows
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail_with_a_full_disk)
            if name == "replace":
                patched.setattr(Path, name, fail_with_a_full_disk)
            refuses("No space left on device", add, place, some)
        assert rows_of(some) == before and not (some / ".lock").exists()
    monkeypatch.setattr("dmlkit.gallery.manifest.PATIENCE", 0.1)
    with (
        lock.sole_writer(some, what="another"),
        pytest.raises(UserError, match="a change of a gallery is running in this folder"),
    ):
        remove(place, some)
    assert rows_of(some) == before
    add(place, some)
    assert len(rows_of(some)) == 12
