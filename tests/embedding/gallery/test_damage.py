"""Galleries and embeddings whose files are lost, cut or altered: one error, or the answers of before."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dmlkit.embedding.gallery.change import (
    GallerySettings,
    add_images,
    compact_gallery,
    create_gallery,
    remove_images,
    restore_version,
)
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.gallery.index import index_gallery
from dmlkit.embedding.gallery.manifest import GalleryManifest
from dmlkit.embedding.gallery.table import history
from dmlkit.embedding.questions.identify import LabelRule, identify
from dmlkit.embedding.questions.search import search
from dmlkit.errors import UserError
from tests.conftest import Result
from tests.datasets import trees
from tests.embedding.gallery.conftest import BIRDS
from tests.embedding.gallery.test_gallery import refused, rows_of
from tests.embedding.gallery.test_index import stocked
from tests.embedding.stored import ON_CPU
from tests.fuzz.conftest import FULL

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory, dmlkit_once: Cli) -> Path:
    """A gallery of two data files and a deletion file, of 4 versions, and embeddings to ask with."""
    folder = tmp_path_factory.mktemp("whole")
    gallery = folder / "gallery"
    first, settings = place / "photos" / "crow", GallerySettings(thumbnails=True)
    create_gallery(place / "run", first, gallery, label="crow", settings=settings, model=ON_CPU)
    for name in BIRDS[1:]:
        add_images(gallery, place / "photos" / name, label=name, model=ON_CPU)
    remove_images(gallery, paths=[str(place / "photos" / name / "1.jpg") for name in ("crow", "dove")])
    for index in range(6):
        trees.photo(folder / "asked" / f"{index}.jpg", 300 + index, (40, 30))
    result = dmlkit_once("embed", place / "run", folder / "asked", "-o", folder / "asked_points", "--device", "cpu")
    assert result.code == 0
    return folder


@pytest.fixture(scope="module")
def dmlkit_once() -> Cli:
    from dmlkit.cli.app import main

    def run(*words: object) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["dmlkit", *map(str, words)])
            with pytest.raises(SystemExit) as ended:
                main()
        return Result(int(ended.value.code or 0), "", "")

    return run


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
    files = sorted(str(path.relative_to(gallery)) for path in gallery.glob("images.lance/**/*") if path.is_file())
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
        found = GalleryFolder(gallery)
        found.check()
        return found.label_counts(), len(found), [item.thumbnail for item in found.items_at(torch.arange(len(found)))]

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
        "mean": lambda: identify(gallery, asked, rule=LabelRule(by="mean")).answers,
        "vote": lambda: identify(gallery, asked, rule=LabelRule(by="vote", k=3)).answers,
        "info": info,
        "history": lambda: [(one.number, one.images) for one in history(gallery)],
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


def hold(whole: Path, folder: Path, count: int, seed: int, without: tuple[str, ...] = ()) -> tuple[int, int]:
    """Damage a gallery many times; how often something was refused, and how often something was changed silently."""
    gallery = folder / "gallery"
    shutil.copytree(whole / "gallery", gallery)
    asks = {name: ask for name, ask in answers(gallery, whole / "asked_points").items() if name not in without}
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
    return refusals, count


def test_a_damaged_gallery_answers_as_before_or_is_refused(whole: Path, tmp_path: Path, place: Path):
    refusals, count = hold(whole, tmp_path, 12, 0)
    assert count / 4 < refusals < count


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11 if FULL else 2))
def test_many_damaged_galleries(seed: int, whole: Path, tmp_path: Path):
    shutil.copytree(whole / "asked", tmp_path / "more")  # for add
    hold(whole, tmp_path, 120 if FULL else 24, seed)


def test_a_damaged_index_is_refused_or_its_answers_are_true(whole: Path, place: Path, tmp_path: Path):
    """What an index leaves out cannot be noticed; what is found has its own label and similarity."""
    before = stocked(place, tmp_path / "before", rows=400, dim=4)
    index_gallery(before, "ivf_hnsw_sq", 0.9)
    exact = {
        (query["path"], one["id"]): (one["label"], one["similarity"])
        for query in search(before, whole / "asked_points", k=400).plain()["queries"]
        for one in query["neighbors"]
    }
    random, gallery = np.random.default_rng(0), tmp_path / "gallery"
    files = sorted(path.relative_to(before) for path in before.glob("images.lance/_indices/*/*"))
    assert len(files) >= 2
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
                for one in query["neighbors"]:
                    assert exact[query["path"], one["id"]] == (one["label"], pytest.approx(one["similarity"], abs=1e-6))
        shutil.rmtree(gallery)


def test_files_are_compared_before_lancedb_reads_them(whole: Path, tmp_path: Path, dmlkit: Cli):
    """A length in a file of rows that became 8 GB aborted the process: no error to catch."""
    gallery = tmp_path / "gallery"
    shutil.copytree(whole / "gallery", gallery)
    (damaged,) = (file for file in gallery.glob("images.lance/data/*") if is_newest(gallery, file))
    content = damaged.read_bytes()
    times = damaged.stat().st_atime_ns, damaged.stat().st_mtime_ns
    told = f"{damaged.relative_to(gallery)} is not what was written; restore the files of this folder"
    for place in (*range(0, len(content), len(content) // 16), len(content) // 4):
        altered = bytes(byte ^ 255 for byte in content[place : place + 8])
        damaged.write_bytes(content[:place] + altered + content[place + 8 :])
        refused(dmlkit("search", gallery, whole / "asked_points"), told)
    damaged.unlink()
    refused(dmlkit("search", gallery, whole / "asked_points"), f"{damaged.relative_to(gallery)} is missing; restore")
    damaged.write_bytes(content[:place] + altered + content[place + 8 :])
    os.utime(damaged, ns=times)  # as a disk does that forgets: only a whole comparison finds it
    refused(dmlkit("gallery", "info", gallery, "--verify"), told)
    earlier = max(one.number for one in history(gallery)) - 2
    assert dmlkit("gallery", "restore", gallery, str(earlier)).code == 0
    assert dmlkit("search", gallery, whole / "asked_points").code == 0  # its rows are in other files
    damaged.write_bytes(content)
    assert dmlkit("gallery", "restore", gallery, str(earlier + 2)).code == 0
    assert rows_of(gallery) == rows_of(whole / "gallery")


def is_newest(gallery: Path, file: Path) -> bool:
    """Whether a file was written last of those of its kind."""
    return file.stat().st_mtime_ns == max(other.stat().st_mtime_ns for other in file.parent.iterdir())


def test_each_column_has_a_checksum(whole: Path, tmp_path: Path, dmlkit: Cli):
    """Rows written by LanceDB itself with one value changed: as if its file had been altered."""
    import lancedb

    rows = lancedb.connect(whole / "gallery").open_table("images").to_arrow()
    for column in ("id", "label", "path", "thumbnail", "point", "vector", "time"):
        gallery = tmp_path / column
        shutil.copytree(whole / "gallery", gallery)
        values = rows[column].to_pylist()
        texts = {"label": None, "time": "2026-05-31"}
        values[4] = values[5] if column in ("point", "vector") else texts.get(column, (values[4] or "")[:-1])
        changed = rows.set_column(rows.schema.names.index(column), column, pa.array(values, rows[column].type))
        lancedb.connect(gallery).create_table("images", changed.cast(rows.schema), mode="overwrite")
        message = f"the {column} of 1 row is not what was written, first of row 4; restore the files"
        refused(dmlkit("gallery", "info", gallery, "--verify"), f"{gallery}: this gallery is damaged: {message}")
        if column in ("vector", "time"):
            continue  # an index alone is searched by the one, and --with place by the other
        refused(dmlkit("search", gallery, whole / "asked_points", "-k", 12, "--html", tmp_path / "page.html"), message)


def test_rows_that_come_or_go_are_noticed(whole: Path, tmp_path: Path, dmlkit: Cli):
    """By the sum of their checksums: LanceDB reads such galleries without a word."""
    import lancedb

    gallery = tmp_path / "gallery"
    shutil.copytree(whole / "gallery", gallery)
    manifest = GalleryManifest.read(gallery / "gallery.json")
    assert [manifest.contents[version].images for version in sorted(manifest.contents)] == [3, 6, 9, 12, 10]
    table = lancedb.connect(gallery).open_table("images")
    table.delete("label = 'crow'")
    contents = {**manifest.contents, table.version: manifest.contents[5]}
    manifest.model_copy(update={"contents": contents}).write(gallery / "gallery.json")
    refused(dmlkit("gallery", "info", gallery), "8 rows are there not what version 6 was written with (10 rows)")
    refused(dmlkit("gallery", "remove", gallery, "--label", "dove"), "not what version 6 was written with")
    shown = dmlkit("gallery", "history", gallery)  # which names the versions to go back to
    assert shown.code == 0
    assert dmlkit("gallery", "restore", gallery, "5").code == 0
    assert dmlkit("gallery", "info", gallery, "--verify").code == 0 and len(GalleryFolder(gallery)) == 10

    # the newest version's manifest is lost: LanceDB takes the one before for the newest
    for path in (gallery / "images.lance" / "_versions").glob("*.json"):
        path.unlink()
    newest = min((gallery / "images.lance" / "_versions").glob("*.manifest"))
    newest.unlink()
    refused(dmlkit("gallery", "info", gallery), "its newest version is 7, but the newest in images.lance is 6")


def test_info_verifies(whole: Path, tmp_path: Path, dmlkit: Cli):
    result = dmlkit("gallery", "info", whole / "gallery", "--verify")
    assert result.code == 0 and "verified: all rows match their checksums" in result.out
    assert json.loads(dmlkit("gallery", "info", whole / "gallery", "--verify", "--json").out)["verified"] is True
    assert "verified" not in dmlkit("gallery", "info", whole / "gallery").out


def test_embeddings_that_changed_are_refused(whole: Path, tmp_path: Path, dmlkit: Cli):
    source = whole / "asked_points"
    points = np.load(source / "embeddings.npy")
    told = "this file was changed: its checksum differs from manifest.json"
    for number, change in enumerate(("points", "items")):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        if change == "points":
            points[2, 1] += 1e-3
            np.save(folder / "embeddings.npy", points)
            name = "embeddings.npy"
        else:
            items = parquet.read_table(folder / "items.parquet")
            swapped = items.set_column(1, "path", pa.array(items["path"].to_pylist()[::-1]))
            parquet.write_table(swapped, folder / "items.parquet")
            name = "items.parquet"
        for words in (
            ("search", folder, source),
            ("search", source, folder),
            ("search", whole / "gallery", folder),
            ("duplicates", folder, "--threshold", "0"),
            ("curvature", folder),
            ("cluster", folder, "--clusters", "2"),
            *(("export", folder, "--format", kind, "-o", tmp_path / "out") for kind in ("npz", "parquet", "faiss")),
        ):
            refused(dmlkit(*words), f"{folder / name}: {told}")
