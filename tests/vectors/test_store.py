"""The store of points: whole parts or none after any kill, any process at any time, never a point of something else."""

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dmlkit.datasets import GlyphsConfig, VectorsConfig
from dmlkit.files.image_file import Box
from dmlkit.vectors import store as store_module
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.store import VectorStore, hash_images, image_keys, keys_of, open_part, write_part
from tests.datasets import trees
from tests.processes import KILLED, Forked, end_before_change, wait_until

IMAGES, PART = 40, 8


def keys(start: int = 0) -> np.ndarray:
    """Keys of a list of images; those of another start are other images."""
    return keys_of([number.to_bytes(16, "big") for number in range(start, start + IMAGES)])


def points(own: np.ndarray) -> torch.Tensor:
    """What the image of each key has as its point: a number of its own."""
    numbers = own[:, 12:16].astype(np.int64) @ (256 ** np.arange(4)[::-1])
    return torch.from_numpy(np.stack([numbers, -numbers], axis=1)).float()


def fill_slowly(folder: str, start: int, place: str, order: int, last: int) -> None:
    """Write what is missing of a list part by part, in one of two orders; end as by kill -9 at the ``last`` change."""
    end_before_change(last, "fsync", "mkdir")
    own = keys(start)
    Path(place).touch()
    missing = np.flatnonzero(VectorStore(Path(folder), 2).find(own, exact=True) < 0)
    for part in np.array_split(missing, max(1, len(missing) // PART))[::order] if len(missing) else ():
        write_part(Path(folder), own[part], points(own[part]))


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(store_module, "warn", texts.append)
    return texts


def check_whole(folder: Path, *lists: np.ndarray) -> None:
    store = VectorStore(folder, 2)
    for own in lists:
        rows = store.find(own, exact=True)
        assert (rows >= 0).all() and torch.equal(store.points_at(rows), points(own))


def test_a_kill_between_any_two_changes_of_the_disk_costs_one_part(tmp_path: Path, warned: list[str]):
    for step in count(1):
        folder = tmp_path / str(step)
        process = Forked(fill_slowly, str(folder), 0, str(tmp_path / "x"), 1, step)
        process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == KILLED
        rows = VectorStore(folder, 2).find(keys())
        found = points(keys())[rows >= 0]
        assert torch.equal(VectorStore(folder, 2).points_at(rows[rows >= 0]), found) and len(found) % PART == 0
        assert Forked(fill_slowly, str(folder), 0, str(tmp_path / "x"), 1, 0).communicate()[0] == ""
        check_whole(folder, keys())
        assert not warned and {path.suffix for path in folder.iterdir()} == {".safetensors"}, step
        shutil.rmtree(folder)
    assert step > 2 * IMAGES // PART  # a partial file is flushed and renamed, for each part


@pytest.mark.parametrize("start", [0, IMAGES // 2, IMAGES])
def test_two_processes_that_fill_at_once_lose_no_point(start: int, tmp_path: Path, warned: list[str]):
    """The same images, some of the same, and others."""
    folder = tmp_path / "store"
    writers = [
        Forked(fill_slowly, str(folder), first, str(tmp_path / str(order)), order, 0)
        for first, order in ((0, 1), (start, -1))
    ]
    read: list[int] = []

    def ended() -> bool:  # readers see whole parts alone meanwhile
        store = VectorStore(folder, 2)
        rows = store.find(keys())
        assert torch.equal(store.points_at(rows[rows >= 0]), points(keys())[rows >= 0])
        read.append(int((rows >= 0).sum()))
        return all(writer.poll() == 0 for writer in writers)

    wait_until(ended, *writers)
    assert read == sorted(read) and not warned
    check_whole(folder, keys(), keys(start))


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 2
    path.write_bytes(content)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def other_model(path: Path) -> None:
    path.unlink()
    write_part(path.parent, keys()[:PART], torch.zeros(PART, 3))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "altered": (alter, "is not what was written: its checksum differs from its name"),
    "a FIFO": (fifo, "this is a FIFO; expected a regular file"),
    "of another model": (other_model, "has points of another model"),
    "missing": (Path.unlink, ""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_part_is_named_and_its_images_alone_are_missing(name: str, tmp_path: Path, warned: list[str]):
    fill_in_parts(tmp_path)
    damage, reason = DAMAGES[name]
    damage(part_of(tmp_path))
    assert np.flatnonzero(VectorStore(tmp_path, 2).find(keys()) < 0).tolist() == [*range(PART)]
    assert [(reason in line, line.endswith("; its images are embedded again")) for line in warned] == (
        [(True, True)] if reason else []
    )
    assert all(str(tmp_path) in line and "\n" not in line for line in warned)
    write_part(tmp_path, keys()[:PART], points(keys()[:PART]))
    check_whole(tmp_path, keys())
    assert len(warned) == bool(reason)  # the damaged one is gone


def fill_in_parts(folder: Path) -> None:
    for start in range(0, IMAGES, PART):
        write_part(folder, keys()[start : start + PART], points(keys()[start : start + PART]))


def part_of(folder: Path) -> Path:
    """The file of the first part of the list."""
    return next(folder / name for name, own in VectorStore(folder, 2).parts.items() if (own == keys()[:PART]).all())


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5), st.lists(st.integers(0, 9), max_size=8))
def test_find_is_a_search_through_all_rows(tmp_path_factory: pytest.TempPathFactory, parts: Any, wanted: list[int]):
    """Also with an image in several parts, of which the first row counts, and with batches that must be the same."""
    folder = tmp_path_factory.mktemp("store")
    for number, images in enumerate(parts):
        own = keys_of([bytes([image] * 16) for image in images])
        own[:, -1] = number % 2
        write_part(folder, own, torch.zeros(len(images), 2))
    store = VectorStore(folder, 2)
    asked = keys_of([bytes([image] * 16) for image in wanted])
    asked[:, -1] = 1
    whole = [bytes(row) for own in store.parts.values() for row in own]

    def at(key: np.ndarray) -> int:
        return whole.index(bytes(key)) if bytes(key) in whole else -1

    for exact, width in ((False, 16), (True, 24)):
        rows = [bytes(row[:width]) for own in store.parts.values() for row in own]
        expected = [rows.index(bytes(key[:width])) if bytes(key[:width]) in rows else -1 for key in asked]
        if not exact:  # those of the same batch come first
            expected = [one if (one := at(key)) >= 0 else other for key, other in zip(asked, expected, strict=True)]
        assert store.find(asked, exact=exact).tolist() == expected


def test_local_features_and_faults_are_kept_with_the_points(tmp_path: Path):
    own, local = keys(), torch.randn(PART, 3, 5).half()
    faults = {bytes(own[PART][:16]).hex(): "8.jpg: cannot read this image"}
    write_part(tmp_path, own[:PART], points(own[:PART]), local, faults)
    store = VectorStore(tmp_path, 2, (3, 5))
    (tensors, kept_faults) = open_part(tmp_path / next(iter(store.parts)), store.shapes)
    assert torch.equal(tensors["local"], local) and store.faults == kept_faults == faults


def changed_keys(images: list[Path], change: Callable[[], object]) -> list[int]:
    """The images whose ids a change alters."""
    before = image_keys(ImageList([*map(str, images)]))
    change()
    after = image_keys(ImageList([*map(str, images)]))
    return np.flatnonzero((before[:, :16] != after[:, :16]).any(1)).tolist()


def test_an_image_is_known_by_its_file_size_and_time(tmp_path: Path):
    photos = [trees.photo(tmp_path / "photos" / f"{index}.jpg", index) for index in range(3)]
    assert changed_keys(photos, lambda: None) == []
    assert changed_keys(photos, lambda: trees.photo(photos[1], 9)) == [1]
    assert changed_keys(photos, lambda: os.utime(photos[2], (1, 1))) == [2]
    assert changed_keys(photos, photos[0].unlink) == [0]
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    linked = [str(tmp_path / "link" / photo.name) for photo in photos]
    assert (image_keys(ImageList(linked)) == image_keys(ImageList([*map(str, photos)]))).all()


def test_keys_of_a_batch_change_with_each_of_its_images():
    ids = [number.to_bytes(16, "big") for number in range(300)]
    other = keys_of([*ids[:150], bytes([9] * 16), *ids[151:]])
    same = (keys_of(ids) == other).all(1)
    assert same[:128].all() and not same[128:256].any() and same[256:].all()
    assert (keys_of(ids)[:, :16] == other[:, :16]).all(1).sum() == 299


def test_a_box_is_another_image_than_its_file(tmp_path: Path):
    photo, config = str(trees.photo(tmp_path / "0.jpg", 0)), GlyphsConfig()
    boxes = [Box(0.0, 0.0, 8.0, 8.0), Box(0.0, 0.0, 8.0, 9.0)]
    images = ImageList([photo] * 2, boxes=boxes)
    own = image_keys(images, config)[:, :16]
    assert len({bytes(one) for one in [*own, *image_keys(ImageList([photo]), config)[:, :16]]}) == 3
    assert not image_keys(images)[:, :16].any()  # without options of a dataset only files are known
    images = ImageList([photo] * 2, boxes=[box._replace(margin=0.5) for box in boxes])
    assert (image_keys(images, config)[:, :16] != own).any(1).all()


def test_samples_in_memory_count_by_their_content(tmp_path: Path):
    glyphs = [GlyphsConfig(classes=8, images_per_class=3, size=16, seed=seed) for seed in (0, 0, 1)]
    one, again, other = (hash_images(config.build("test"), config) for config in glyphs)
    assert one == again != other
    values = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    np.save(tmp_path / "y.npy", np.arange(12) // 3)
    config = VectorsConfig(embeddings=str(tmp_path / "x.npy"), labels=str(tmp_path / "y.npy"))
    hashes = list[str]()
    for change in (0, 0, 1):
        values[10, 2] += change
        np.save(tmp_path / "x.npy", values)
        os.utime(tmp_path / "x.npy", (1, 1))
        hashes.append(hash_images(config.build("test"), config))
    assert hashes[0] == hashes[1] != hashes[2]
