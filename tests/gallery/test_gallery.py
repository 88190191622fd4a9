"""`dmlkit gallery`: what is put in is there, once; what goes is gone; tests/fuzz has any order of changes."""

import json
import os
import shutil
from collections import Counter
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from safetensors.numpy import load_file

from dmlkit.files.image_file import Box
from dmlkit.gallery.change import (
    GallerySettings,
    add_images,
    compact_gallery,
    create_gallery,
    remove_images,
    rename_label,
    restore_version,
)
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import Incoming, LabelledImage
from dmlkit.gallery.manifest import GalleryManifest
from dmlkit.model import EmbeddingModel
from dmlkit.nearest.search import Gallery
from dmlkit.vectors.fill import PartEmbedder
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.fusion import ModelChoice
from tests.cli.test_early import without_torch
from tests.conftest import ONE_EPOCH, Cli, refuses
from tests.datasets import trees
from tests.gallery.conftest import BIRDS
from tests.vectors.stored import ON_CPU


def rows_of(path: Path) -> dict[str, tuple[Any, ...]]:
    """What a gallery holds, by id, without the times."""
    opened = GalleryFolder(path)
    items, points = (read(torch.arange(len(opened))) for read in (opened.items_at, opened.points_at))
    held = {str(item.id): (item.label, item.path, item.thumbnail) for item in items}
    assert len(held) == len(opened)
    return {
        name: (label, path, point, picture)
        for (name, (label, path, picture)), point in zip(held.items(), points.tolist(), strict=True)
    }


def test_what_is_put_in_is_there(place: Path, tmp_path: Path, dmlkit: Cli):
    gallery = tmp_path / "birds"
    result = dmlkit("gallery", "create", place / "run", place / "photos", "-o", gallery, "--device", "cpu")
    assert result.code == 0 and f"12 images added to {gallery}" in result.out, result.err
    assert dmlkit("embed", place / "run", place / "photos", "-o", tmp_path / "e", "--device", "cpu").code == 0
    folder, opened = EmbeddingFolder(tmp_path / "e"), GalleryFolder(gallery)
    assert [item.path for item in opened.items_at(torch.arange(12))] == folder.items["path"].to_pylist()
    assert [item.label for item in opened.items_at(torch.arange(12))] == [name for name in BIRDS for _ in range(3)]
    points = torch.from_numpy(np.array(folder.points))
    assert torch.equal(torch.cat(list(opened.blocks(5))), points)
    assert torch.equal(opened.points_at(torch.tensor([7, 0, 7])), points[[7, 0, 7]])
    (part,) = (gallery / "vectors").glob("*/*.safetensors")
    np.testing.assert_array_equal(load_file(part)["points"], points)  # any program reads them
    listed = parquet.read_table(gallery / "versions" / "1.parquet")
    assert listed["path"].to_pylist() == folder.items["path"].to_pylist()
    assert listed["row"].to_pylist() == list(range(12))
    assert set(listed["part"].to_pylist()) == {f"{part.parent.name}/{part.name}"}
    manifest = json.loads((gallery / "gallery.json").read_text())
    assert manifest["model"]["fingerprint"] == folder.manifest.model.fingerprint

    searched = dmlkit("search", gallery, tmp_path / "e", "-k", 4, "--json")
    expected = Gallery(opened.manifold, points).search(points, k=4)
    report = json.loads(searched.out)["queries"]
    paths = folder.items["path"].to_pylist()
    assert [[neighbor["path"] for neighbor in query["neighbors"]] for query in report] == [
        [paths[row] for row in rows] for rows in expected.indices.tolist()
    ]
    by_image = dmlkit("search", gallery, place / "photos", "-k", 4, "--json", "--device", "cpu").json()
    assert by_image["queries"] == report  # the gallery knows its run


def test_a_picture_is_in_a_gallery_once(place: Path, tmp_path: Path, dmlkit: Cli):
    gallery, more = tmp_path / "birds", tmp_path / "more"
    create_gallery(place / "run", place / "photos" / "crow", gallery, label="crow", model=ON_CPU)
    before = GalleryFolder(gallery).version
    result = dmlkit("gallery", "add", gallery, place / "photos" / "crow", "--device", "cpu", "--label", "raven")
    assert "0 images added" in result.out and "3 images skipped: already in the gallery" in result.out
    assert "with the label 'crow', which it keeps; here it has 'raven'" in result.out
    assert GalleryFolder(gallery).version == before
    trees.photo(more / "new.jpg", 99)
    shutil.copy(more / "new.jpg", more / "twin.jpg")
    (more / "broken.jpg").write_bytes(b"none")
    (more / "half.jpg").write_bytes((more / "new.jpg").read_bytes()[:300])
    result = dmlkit("gallery", "add", gallery, more, "--device", "cpu").ok()
    assert "1 image added" in result.out and f"twin.jpg: the same picture as {more}/new.jpg" in result.out
    assert "2 images skipped: could not be read" in result.out and "broken.jpg: cannot read" in result.out
    known = dmlkit("gallery", "add", gallery, place / "photos" / "crow", "--device", "cpu").ok()
    assert "with the label 'crow', which it keeps; here it has no label" in known.out
    assert "note: 1 without a label, which identify leaves out" in " ".join(result.out.split())
    assert Counter(GalleryFolder(gallery).labels) == {"crow": 3, None: 1}
    result = dmlkit("gallery", "add", gallery, more / "new.jpg", "--device", "cpu", "--label", " dove")
    assert "1 image added" in result.out and "1 of them were there without a label" in result.out
    assert Counter(GalleryFolder(gallery).labels) == {"crow": 3, "dove": 1}


def test_labels_come_from_folders_tables_and_the_option(place: Path, tmp_path: Path):
    photos = place / "photos"
    table = tmp_path / "birds.csv"
    lines = [
        f"{photos}/crow/0.jpg,raven,0,0,20,20",
        f"{photos}/crow/0.jpg,rook,5,5,30,30",
        f"{photos}/dove/0.jpg,dove,,,,",
    ]
    table.write_text("\n".join(["path,label,x1,y1,x2,y2", *lines]))

    gallery = tmp_path / "birds"
    refuses("leads out of the root", create_gallery, place / "run", table, gallery, model=ON_CPU)
    table = photos.parent / "birds.csv"
    table.write_text("\n".join(["path,label,x1,y1,x2,y2", *(line.replace(f"{photos}", "photos") for line in lines)]))
    create_gallery(place / "run", table, gallery, settings=GallerySettings(thumbnails=True), model=ON_CPU)
    table.unlink()
    assert Counter(GalleryFolder(gallery).labels) == {"raven": 1, "rook": 1, "dove": 1}
    assert all(row[3].startswith(b"\xff\xd8") for row in rows_of(gallery).values())
    add_images(gallery, photos / "gull" / "1.jpg", model=ON_CPU)
    add_images(gallery, photos / "gull" / "2.jpg", label="gull's", model=ON_CPU)
    assert Counter(GalleryFolder(gallery).labels) == {"raven": 1, "rook": 1, "dove": 1, None: 1, "gull's": 1}
    assert remove_images(gallery, labels=["gull's"]) == 1
    for split in ("train", "test"):
        shutil.copytree(photos, tmp_path / "halves" / split)
    create_gallery(place / "run", tmp_path / "halves", tmp_path / "split", model=ON_CPU)
    assert Counter(GalleryFolder(tmp_path / "split").labels) == dict.fromkeys(BIRDS, 3)


def test_an_id_is_of_what_a_file_holds_and_the_box(tmp_path: Path):
    first = trees.photo(tmp_path / "1.jpg", 1)
    second = shutil.copy(first, tmp_path / "2.jpg")
    other = trees.photo(tmp_path / "3.jpg", 3)
    ids = [LabelledImage(str(path), None).id() for path in (first, second, other)]
    assert ids[0] == ids[1] != ids[2] and len(ids[0]) == 32
    assert ids[0] == sha256(first.read_bytes()).hexdigest()[:32]
    boxes = Box(0, 0, 5, 5), Box(0.0, 0.0, 5.0, 5.0), Box(0, 0, 5, 6)
    boxed = [LabelledImage(str(first), None, box).id() for box in boxes]
    assert boxed[0] == boxed[1] != boxed[2] and ids[0] not in boxed


def test_versions_come_back(place: Path, tmp_path: Path, dmlkit: Cli):
    gallery = tmp_path / "birds"
    assert dmlkit("gallery", "create", place / "run", "-o", gallery, "--threshold", "-0.5").code == 0
    for name in BIRDS[:3]:
        add_images(gallery, place / "photos" / name, label=name, model=ON_CPU)
    whole = rows_of(gallery)
    assert remove_images(gallery, labels=["crow"], images=[str(place / "photos" / "dove" / "1.jpg")]) == 4
    versions = dmlkit("gallery", "history", gallery, "--json").json()
    assert [version["images"] for version in versions] == [0, 3, 6, 9, 5]
    shown = dmlkit("gallery", "history", gallery).out
    assert "+3" in shown and "-4" in shown
    result = dmlkit("gallery", "restore", gallery, versions[-2]["version"])
    assert result.code == 0 and "9 images" in result.out and rows_of(gallery) == whole
    files = len(list((gallery / "vectors").glob("*/*.safetensors")))
    assert dmlkit("gallery", "compact", gallery).code == 0
    opened = GalleryFolder(gallery)
    assert rows_of(gallery) == whole and files == 3 and len(opened.parts) == 1
    restore_version(gallery, versions[1]["version"])
    assert Counter(GalleryFolder(gallery).labels) == {"crow": 3}
    info = dmlkit("gallery", "info", gallery, "--json").json()
    assert (info["images"], info["labels"], info["threshold"]) == (3, {"crow": 3}, -0.5)
    shown = dmlkit("gallery", "info", gallery).out
    assert "3 images with 1 label, 0 without a label" in shown
    assert "similarity threshold: -0.5; probabilities of identify: not calibrated" in shown
    manifest = GalleryManifest.of(gallery)
    versions = (*manifest.versions[:-1], manifest.versions[-1].model_copy(update={"images": 12_345}))
    manifest.model_copy(update={"versions": versions}).write(gallery / "gallery.json")
    assert "12,345 │ +12,336" in dmlkit("gallery", "history", gallery).out  # as info prints it


def test_two_labels_become_one_and_come_back(place: Path, tmp_path: Path, dmlkit: Cli):
    gallery = tmp_path / "birds"
    create_gallery(place / "run", place / "photos", gallery, model=ON_CPU)
    before = rows_of(gallery)
    result = dmlkit("gallery", "rename", gallery, "crow ", " raven")
    assert result.code == 0 and f"3 images of {gallery} renamed from crow to raven\n" in result.out
    merged = dmlkit("gallery", "rename", gallery, "raven", "dove")
    assert "renamed from raven to dove, which 3 images had before: 6 now" in " ".join(merged.out.split())
    assert Counter(GalleryFolder(gallery).labels) == {"dove": 6, "finch": 3, "gull": 3}
    after = {name: (row[1], row[2]) for name, row in rows_of(gallery).items()}
    assert after == {name: (row[1], row[2]) for name, row in before.items()}
    dmlkit("gallery", "rename", gallery, "crow", "x").refused("no image has the label 'crow'; nothing was renamed")
    dmlkit("gallery", "rename", gallery, "dove", "unknown").refused("is no label")
    assert "renamed from gull to 3\n" in dmlkit("gallery", "rename", gallery, "gull", "3.0").ok().out
    assert GalleryFolder(gallery).labels.count("3") == 3
    assert rename_label(gallery, " 3.0", "4") == (3, 0) and remove_images(gallery, labels=["4.0 "]) == 3
    assert Counter(GalleryFolder(gallery).labels) == {"dove": 6, "finch": 3}
    restore_version(gallery, 1)
    for name in ("dove", " dove "):
        refuses("NEW: .*dove.* is the label that they have already", rename_label, gallery, "dove", name)
    assert rows_of(gallery) == before and GalleryFolder(gallery).version == 7


@pytest.mark.slow
def test_info_needs_no_torch(place: Path, tmp_path: Path, dmlkit: Cli):
    gallery = tmp_path / "birds"
    create_gallery(place / "run", place / "photos", gallery, model=ON_CPU)
    (tmp_path / "out").mkdir()
    results = without_torch(tmp_path / "out", [f"gallery info {gallery}", f"gallery info {gallery} --json"])
    assert [result.code for result in results] == [0, 0], results
    assert "12 images with 4 labels, 0 without a label; version 1" in results[0].out
    version = gallery / "versions" / "1.parquet"
    version.write_bytes(version.read_bytes()[:-9])
    dmlkit("gallery", "info", gallery).refused(f"{gallery}: this gallery is damaged: versions/1.parquet is not what")


def test_a_reader_goes_on_at_its_version(place: Path, tmp_path: Path):
    gallery = tmp_path / "birds"
    create_gallery(place / "run", place / "photos", gallery, model=ON_CPU)
    reader = GalleryFolder(gallery)
    before = torch.cat(list(reader.blocks(4)))
    remove_images(gallery, labels=["crow"])
    add_images(gallery, trees.photo(tmp_path / "new.jpg", 98), model=ON_CPU)
    compact_gallery(gallery)
    assert len(reader) == 12 and torch.equal(torch.cat(list(reader.blocks(4))), before)
    assert reader.items_at(torch.tensor([0]))[0].label == "crow" and len(GalleryFolder(gallery)) == 10


def test_what_cannot_be_is_refused(place: Path, tmp_path: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    gallery, photos = tmp_path / "birds", place / "photos"
    for option, value, named in (("--label", "x", "--label x"), ("--column", "label=kind", "--column")):
        refused = dmlkit("gallery", "create", place / "run", "-o", gallery, option, value)
        refused.refused(f"{named}: applies only to IMAGES; give images, or remove it")
    dmlkit("embed", place / "run", "--split", "test", option, value).refused("embed: --column applies only to IMAGES")
    with monkeypatch.context() as patch:  # a file that is no image is refused before its model is loaded
        patch.setattr(ModelChoice, "load", None)
        for name, way in (
            ("bad.jpg", ""),
            ("x.yaml", "; expected an image, a folder"),
            ("x.mp4", "; expected an image"),
        ):
            (tmp_path / name).write_bytes(b"none")
            wrong = dmlkit("gallery", "create", place / "run", tmp_path / name, "-o", gallery)
            wrong.refused(f"{name}: cannot read this image: the file has no known image format", way)
    (tmp_path / "nothing").mkdir()
    for label in ("", " ", "unknown", "\udcff"):
        dmlkit("gallery", "create", place / "run", photos, "-o", gallery, "--label", label).refused("is no label")
    dmlkit("gallery", "create", place / "run", photos, "-o", tmp_path / "bad.jpg").refused("is a file")
    for threshold in ("inf", "60"):
        words = ("gallery", "create", place / "run", "-o", gallery, "--threshold", threshold)
        dmlkit(*words).refused(f"--threshold {threshold}: expected")
    assert not gallery.exists()
    create_gallery(place / "run", None, gallery, model=ON_CPU)
    dmlkit("search", gallery, photos).refused("this gallery is empty; add images to it")
    dmlkit("identify", gallery, photos, "-o", tmp_path / "a.csv").refused("this gallery is empty")
    create_gallery(place / "run", photos / "crow", tmp_path / "crows", label="crow", model=ON_CPU)
    before = rows_of(tmp_path / "crows")
    crows = ("gallery", "remove", tmp_path / "crows")
    dmlkit(*crows).refused("remove: expected ids or files of images, or --label")
    dmlkit(*crows, "--label", "crow", "--label", "dove").refused("--label 'dove': no image of", "nothing was removed")
    dmlkit(*crows, "0' OR '1'='1").refused("no image of")
    dmlkit(*crows, "none.jpg").refused("no image of")
    dmlkit(*crows, "--label", "\udcff").refused("no image of")
    dmlkit(*crows, "--label", "").refused("--label '': no image of", "nothing was removed")
    dmlkit(*crows, "").refused("'': no image of", "nothing was removed")
    assert rows_of(tmp_path / "crows") == before
    dmlkit("gallery", "restore", tmp_path / "crows", 7).refused("has no version 7; dmlkit gallery history")
    for words in (("info",), ("history",), ("compact",), ("restore", 1), ("remove", "--label", "x"), ("add", photos)):
        dmlkit("gallery", words[0], tmp_path / "nothing", *words[1:]).refused("no gallery here")
    assert not list((tmp_path / "nothing").iterdir())
    assert dmlkit("search", tmp_path / "crows", gallery).code == 0  # no query, no answer


def test_points_whose_products_overflow_do_not_come_in(place, tmp_path, dmlkit, trained_once, monkeypatch):
    run = trained_once(tmp_path, ONE_EPOCH + "manifold: {name: euclidean}\n")
    gallery, forward = tmp_path / "birds", EmbeddingModel.forward
    create_gallery(run, place / "photos" / "crow", gallery, label="crow", model=ON_CPU)
    before = rows_of(gallery)
    monkeypatch.setattr(EmbeddingModel, "forward", lambda model, images: 1e25 * forward(model, images))
    added = dmlkit("gallery", "add", gallery, place / "photos", "--device", "cpu")
    added.refused("dove/0.jpg: its largest coordinate is ", "and inner products overflow above 1e+16; the training")
    assert rows_of(gallery) == before


def test_a_gallery_that_is_damaged_or_newer_is_told(place: Path, tmp_path: Path, dmlkit: Cli):
    gallery = tmp_path / "birds"
    create_gallery(place / "run", place / "photos", gallery, model=ON_CPU)
    path = gallery / "gallery.json"
    text = path.read_text()
    path.write_text(text.replace('"format": 1,', '"format": 2,').replace('"dmlkit": "', '"dmlkit": "9.'))
    dmlkit("gallery", "info", gallery).refused("a manifest of a gallery of format 2, written by dmlkit 9.")
    path.write_text(text.replace('"thumbnails": false', '"thumbnails": "no"'))
    dmlkit("search", gallery, gallery).refused("thumbnails: input should be a valid boolean")
    path.write_text(text)
    shutil.rmtree(gallery / "versions")
    dmlkit("gallery", "info", gallery).refused(f"{gallery}: this gallery is damaged: versions/1.parquet is missing")


def test_an_image_that_gets_a_label_is_not_embedded_again(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gallery, photo = tmp_path / "birds", trees.photo(tmp_path / "new.jpg", 97)
    create_gallery(place / "run", photo, gallery, model=ON_CPU)
    before = rows_of(gallery)
    monkeypatch.setattr(PartEmbedder, "__call__", None)
    assert add_images(gallery, photo, label="wren", model=ON_CPU).added == 1
    assert rows_of(gallery) == {name: ("wren", *row[1:]) for name, row in before.items()}


def age(gallery: Path, days: int) -> None:
    """Let the changes of a gallery be some days older, and its parts of long ago."""
    manifest = json.loads((gallery / "gallery.json").read_text())
    for version in manifest["versions"]:
        version["time"] = (datetime.fromisoformat(version["time"]) - timedelta(days)).isoformat()
    (gallery / "gallery.json").write_text(json.dumps(manifest))
    for part in gallery.glob("vectors/*/*.safetensors"):
        os.utime(part, (1, 1))


def test_a_version_stays_for_a_week_after_the_change_that_replaced_it(files: Path):
    whole = rows_of(gallery := files / "gallery")
    age(gallery, 30)
    remove_images(gallery, labels=["A"])
    compact_gallery(gallery)
    restore_version(gallery, 1)
    assert rows_of(gallery) == whole
    age(gallery, 8)
    compact_gallery(gallery)
    refuses("has no version 1", restore_version, gallery, 1)
    assert rows_of(gallery) == whole and len(list((gallery / "versions").iterdir())) == 1


def test_a_reader_of_a_large_gallery_goes_on_after_its_parts_were_joined(files: Path, tmp_path: Path, monkeypatch):
    gallery, model = files / "gallery", ModelChoice(files / "run", device="cpu")
    add_images(gallery, trees.photo(tmp_path / "new.jpg", 98), model=model)
    whole = rows_of(gallery)
    age(gallery, 30)
    monkeypatch.setattr("dmlkit.gallery.folder.KEPT", 0)  # as of a large one: its points are read later
    reader = GalleryFolder(gallery)
    compact_gallery(gallery)
    assert (len(reader.parts), len(GalleryFolder(gallery).parts)) == (2, 1)
    assert reader.points_at(torch.arange(41)).tolist() == [row[2] for row in whole.values()]


def test_of_two_copies_the_one_with_a_label_counts(tmp_path: Path):
    first = trees.photo(tmp_path / "1.jpg", 1)
    for name in ("robin", "wren"):
        (tmp_path / name).mkdir()
        shutil.copy(first, tmp_path / name / "1.jpg")
    labels = {"1.jpg": None, "robin/1.jpg": "robin", "wren/1.jpg": "wren"}
    incoming = Incoming.of([LabelledImage(str(tmp_path / name), label) for name, label in labels.items()])
    assert [(image.path, image.label) for image in incoming.new.values()] == [(f"{tmp_path}/robin/1.jpg", "robin")]
    assert [line.partition(": ")[0] for line in incoming.repeated] == [f"{tmp_path}/1.jpg", f"{tmp_path}/wren/1.jpg"]
