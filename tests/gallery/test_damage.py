"""Galleries and embeddings whose files are lost, cut or altered: one error, or the answers of before."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dmlkit.errors import UserError
from dmlkit.gallery.change import (
    GallerySettings,
    add_images,
    compact_gallery,
    create_gallery,
    remove_images,
    restore_version,
)
from dmlkit.gallery.files import GallerySummary
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.index import index_gallery
from dmlkit.identify.identify import identify
from dmlkit.identify.rule import LabelRule
from dmlkit.identify.search import search
from dmlkit.vectors.run import embed
from tests.conftest import Cli
from tests.datasets import trees
from tests.fuzz.conftest import FULL
from tests.gallery.conftest import BIRDS
from tests.gallery.test_gallery import rows_of
from tests.gallery.test_index import stocked
from tests.vectors.stored import ON_CPU


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery of four parts and five versions, and embeddings to ask with."""
    folder = tmp_path_factory.mktemp("whole")
    gallery = folder / "gallery"
    first, settings = place / "photos" / "crow", GallerySettings(thumbnails=True)
    create_gallery(place / "run", first, gallery, label="crow", settings=settings, model=ON_CPU)
    for name in BIRDS[1:]:
        add_images(gallery, place / "photos" / name, label=name, model=ON_CPU)
    remove_images(gallery, images=[str(place / "photos" / name / "1.jpg") for name in ("crow", "dove")])
    trees.photos(folder / "asked", (f"{index}.jpg" for index in range(6)), first=300, side=(40, 30))
    embed(place / "run", folder / "asked", output=folder / "asked_points", device="cpu")
    return folder


class Damage(NamedTuple):
    """What happens to a file."""

    file: str
    kind: str
    place: float  # of its length

    def do(self, folder: Path) -> None:
        path = folder / self.file
        content = bytearray(path.read_bytes())
        start = int(self.place * len(content))
        match self.kind:
            case "lost":
                path.unlink()
                return
            case "cut":
                content = content[:start]
            case "bit":
                content[start : start + 1] = bytes(byte ^ 4 for byte in content[start : start + 1])
            case _:
                content[start : start + 8] = bytes(byte ^ 255 for byte in content[start : start + 8])
        path.write_bytes(content)


def damages(gallery: Path, count: int, seed: int) -> Iterator[Damage]:
    """Every file is lost once; the others are drawn."""
    files = sorted(str(path.relative_to(gallery)) for path in gallery.glob("v*/**/*") if path.is_file())
    files = [file for file in files if not file.endswith("model.json")]  # nothing is read from it
    random = np.random.default_rng(seed)
    lost = [Damage(file, "lost", 0) for file in files]
    random.shuffle(lost)  # type: ignore[arg-type]
    yield from lost[: count // 3]
    for _ in range(count - min(len(lost), count // 3)):
        kind = str(random.choice(["cut", "bytes", "bytes", "bit"]))
        yield Damage(str(random.choice(files)), kind, float(random.random()))


def answers(gallery: Path, asked: Path) -> dict[str, Callable[[], Any]]:
    """What is asked of a gallery, each with a plain answer."""
    paths = [str(path) for path in (gallery.parent / "more").glob("*")]

    def info() -> Any:
        opened = GalleryFolder(gallery)
        opened.check()
        return (opened.labels, len(opened), [item.thumbnail for item in opened.items_at(torch.arange(len(opened)))])

    def changed(change: Callable[[], object]) -> Callable[[], Any]:
        def act() -> Any:
            kept = gallery.with_name("kept")
            shutil.copytree(gallery, kept)
            try:
                change()
                GalleryFolder(gallery).check()
                return rows_of(gallery)
            finally:
                shutil.rmtree(gallery)
                kept.rename(gallery)

        return act

    return {
        "search": lambda: search(gallery, asked, k=4).plain(),
        "nearest": lambda: identify(gallery, asked).answers,
        "vote": lambda: identify(gallery, asked, rule=LabelRule(method="vote", k=3)).answers,
        "info": info,
        "history": lambda: [(version.number, version.images) for version in GallerySummary.of(gallery).versions],
        "remove": changed(lambda: remove_images(gallery, labels=["dove"])),
        "restore": changed(lambda: restore_version(gallery, 3)),
        "compact": changed(lambda: compact_gallery(gallery)),
        **({"add": changed(lambda: add_images(gallery, Path(paths[0]), model=ON_CPU))} if paths else {}),
    }


def outcome(ask: Callable[[], Any]) -> Any:
    """An answer, or the one line of the error."""
    try:
        return ask()
    except UserError as error:
        line = str(error)
        assert "\n" not in line and "gallery" in line, line
        return None


def hold(whole: Path, folder: Path, count: int, seed: int) -> int:
    """Damage a gallery many times; after how many of them something was refused."""
    gallery = folder / "gallery"
    shutil.copytree(whole / "gallery", gallery)
    asks = answers(gallery, whole / "asked_points")
    expected = {name: ask() for name, ask in asks.items()}
    refusals = 0
    for damage in damages(whole / "gallery", count, seed):
        shutil.rmtree(gallery)
        shutil.copytree(whole / "gallery", gallery)
        damage.do(gallery)
        found = {name: outcome(ask) for name, ask in asks.items()}
        for name, answer in found.items():
            if name == "history" and answer is not None:  # a version that is lost cannot be restored, and is not listed
                assert set(answer) <= set(expected[name]), damage
            else:
                assert answer is None or answer == expected[name], (damage, name)
        refusals += None in found.values()
    return refusals


def test_a_damaged_gallery_answers_as_before_or_is_refused(whole: Path, tmp_path: Path):
    assert hold(whole, tmp_path, 12, 0) > 3


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(1, 11 if FULL else 2))
def test_many_damaged_galleries(seed: int, whole: Path, tmp_path: Path):
    shutil.copytree(whole / "asked", tmp_path / "more")  # for add
    hold(whole, tmp_path, 120 if FULL else 24, seed)


def test_a_damaged_index_is_refused_or_its_answers_are_true(whole: Path, place: Path, tmp_path: Path):
    """What an index leaves out cannot be noticed; what is found has its own label and similarity."""
    before = stocked(place, tmp_path / "before", rows=400, dim=4)
    index_gallery(before, "ivf_hnsw_sq", 0.9)
    exact = {
        (query["path"], neighbor["id"]): (neighbor["label"], neighbor["similarity"])
        for query in search(before, whole / "asked_points", k=400).plain()["queries"]
        for neighbor in query["neighbors"]
    }
    random, gallery = np.random.default_rng(0), tmp_path / "gallery"
    files = sorted(path.relative_to(before) for path in before.glob("index-*.faiss"))
    assert len(files) == 1
    for kind in ("lost", "cut", *["bytes"] * 10):
        shutil.copytree(before, gallery)
        Damage(str(files[random.integers(len(files))]), kind, float(random.random())).do(gallery)
        try:
            found = search(gallery, whole / "asked_points", k=5).plain()
        except UserError as error:
            assert "gallery" in str(error) and "\n" not in str(error)
        else:
            for query in found["queries"]:
                assert len(query["neighbors"]) == 5
                for neighbor in query["neighbors"]:
                    assert exact[query["path"], neighbor["id"]] == (
                        neighbor["label"],
                        pytest.approx(neighbor["similarity"], abs=1e-6),
                    )
        shutil.rmtree(gallery)


def test_the_way_back_from_a_damaged_part_is_an_earlier_version(whole: Path, tmp_path: Path, dmlkit: Cli):
    gallery = tmp_path / "gallery"
    shutil.copytree(whole / "gallery", gallery)
    damaged = gallery / "vectors" / GalleryFolder(gallery).parts[-1]
    content = damaged.read_bytes()
    cause = (
        "is not what was written: its checksum differs from its name; restore this file from a backup, or an earlier"
    )
    for place in (*range(0, len(content), len(content) // 16), len(content) // 4):
        altered = bytes(byte ^ 255 for byte in content[place : place + 8])
        damaged.write_bytes(content[:place] + altered + content[place + 8 :])
        result = dmlkit("search", gallery, whole / "asked_points")
        result.refused(f"{damaged.relative_to(gallery)} ", "restore this file from a backup, or an earlier version")
    damaged.unlink()
    dmlkit("search", gallery, whole / "asked_points").refused(f"{damaged.relative_to(gallery)} is missing; restore")
    damaged.write_bytes(content[:-8] + bytes(8))
    dmlkit("gallery", "info", gallery, "--verify").refused(cause)
    assert dmlkit("gallery", "restore", gallery, "3").code == 0
    assert dmlkit("search", gallery, whole / "asked_points").code == 0  # its points are in other parts
    damaged.write_bytes(content)
    assert dmlkit("gallery", "restore", gallery, "5").code == 0
    assert rows_of(gallery) == rows_of(whole / "gallery")


def test_info_verifies(whole: Path, dmlkit: Cli):
    result = dmlkit("gallery", "info", whole / "gallery", "--verify")
    assert result.code == 0 and "verified: all files match their checksums" in result.out
    assert dmlkit("gallery", "info", whole / "gallery", "--verify", "--json").json()["verified"] is True
    assert "verified" not in dmlkit("gallery", "info", whole / "gallery").ok().out


def test_embeddings_that_changed_are_refused(whole: Path, tmp_path: Path, dmlkit: Cli):
    """That every command checks them is in tests/vectors/test_folder.py."""
    folder = Path(shutil.copytree(whole / "asked_points", tmp_path / "points"))
    items, points = parquet.read_table(folder / "items.parquet"), np.load(folder / "embeddings.npy")
    points[2, 1] += 1e-3
    np.save(folder / "embeddings.npy", points)
    message = "this file was changed: its checksum differs from manifest.json"
    dmlkit("search", folder, whole / "asked_points").refused(f"{folder / 'embeddings.npy'}: {message}")
    swapped = items.set_column(1, "path", pa.array(items["path"].to_pylist()[::-1]))
    parquet.write_table(swapped, folder / "items.parquet")
    dmlkit("search", whole / "gallery", folder).refused(f"{folder / 'items.parquet'}: {message}")
