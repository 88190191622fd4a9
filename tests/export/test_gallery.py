"""Exported galleries: ONNX Runtime answers in them as torch does in the gallery, without torch and LanceDB."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dmlkit.embedding.gallery.change import create_gallery
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.questions.exported import ExportedGallery
from dmlkit.export.export import export
from tests.conftest import ON_THE_BALL, ONE_EPOCH, Result
from tests.datasets import trees
from tests.embedding.stored import ON_CPU

pytest.importorskip("onnxscript", reason="it comes with the extra dmlkit[onnx]")
pytest.importorskip("lancedb", reason="it comes with the extra dmlkit[gallery]")
Cli = Callable[..., Result]
HEAVY = ("torch", "torchvision", "timm", "lancedb", "faiss", "scipy", "sklearn", "matplotlib")


@pytest.fixture(scope="module", params=[ONE_EPOCH, ON_THE_BALL], ids=["cosine", "distance"])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]
) -> Path:
    """A run, its gallery of labeled photos and boxes, that gallery in one file, and photos to ask about."""
    folder = tmp_path_factory.mktemp("exported")
    trained_once(folder, request.param)
    rows = [f"photos/a/0.jpg,a,{x},0,{x + 20},30" for x in (0, 20)]
    for label in range(4):
        for index in range(4):
            photo = f"photos/{'abcd'[label]}/{index}.jpg"
            trees.photo(folder / photo, 10 * label + index, (40 + index, 30))
            rows.append(f"{photo},{'abcd'[label]},,,,")
    (folder / "photos.csv").write_text("\n".join(["path,label,x1,y1,x2,y2", *rows]) + "\n")
    for index in range(8):
        trees.photo(folder / "asked" / f"{index}.jpg", 200 + index, (50 + index, 31))
    trees.photo(folder / "asked" / "b" / "known.jpg", 11, (41, 30))
    (folder / "asked" / "broken.jpg").write_bytes(b"no image")
    create_gallery(folder / "run", folder / "photos.csv", folder / "gallery", model=ON_CPU)
    assert export(folder / "gallery", "onnx").written == [folder / "gallery" / "exports" / "gallery.onnx"]
    return folder


def answers(dmlkit: Cli, *arguments: object, output: Path) -> dict[str, Any]:
    result = dmlkit("identify", *arguments, "-o", output)
    assert result.code == 0, result.err
    return json.loads(output.read_text())


@pytest.mark.parametrize("threshold", [None, "middle"])
def test_identify_answers_as_in_the_gallery(threshold: str | None, place: Path, tmp_path: Path, dmlkit: Cli):
    options: list[object] = []
    exported = place / "gallery" / "exports" / "gallery.onnx"
    if threshold:
        scores = [
            one["score"] for one in answers(dmlkit, exported, place / "asked", output=tmp_path / "a.json")["images"]
        ]
        options = ["--threshold", float(np.median(scores)) + 1e-4]
    expected = answers(dmlkit, place / "gallery", place / "asked", *options, output=tmp_path / "torch.json")
    found = answers(dmlkit, exported, place / "asked", *options, output=tmp_path / "onnx.json")
    assert len(found["images"]) == 9 and "broken.jpg" in found["skipped"][0]
    for key in ("similarity", "threshold", "least_probability", "accuracy", "skipped"):
        assert found[key] == expected[key]
    for one, other in zip(found["images"], expected["images"], strict=True):
        for key in ("path", "label", "guess", "known", "images"):
            assert one[key] == other[key]
        assert one["probability"] == pytest.approx(other["probability"], abs=5e-5)  # a steep sigmoid of the score
        for key in ("score", "margin"):
            assert one[key] == pytest.approx(other[key], abs=2e-5)
        assert [near["path"] for near in one["nearest"]] == [near["path"] for near in other["nearest"]]
    unknown = sum(one["label"] == "unknown" for one in found["images"])
    assert (unknown > 2) == bool(threshold)


def test_search_finds_the_same_images(place: Path, tmp_path: Path, dmlkit: Cli):
    tables: list[list[dict[str, str]]] = []
    for name, source in (("torch", place / "gallery"), ("onnx", place / "gallery" / "exports" / "gallery.onnx")):
        assert dmlkit("search", source, place / "asked", "-k", "5", "--csv", tmp_path / f"{name}.csv").code == 0
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            tables.append(list(csv.DictReader(file)))
    assert len(tables[0]) == len(tables[1]) == 9 * 5
    for one, other in zip(*tables, strict=True):
        assert float(one.pop("similarity")) == pytest.approx(float(other.pop("similarity")), abs=2e-5)
        assert one == other


def test_an_image_keeps_its_box(place: Path, tmp_path: Path, dmlkit: Cli):
    """So that pages show the box, and not the whole image several times."""
    sources = place / "gallery", place / "gallery" / "exports" / "gallery.onnx"
    gallery, exported = GalleryFolder(sources[0]), ExportedGallery(sources[1])
    found = [item.box for item in exported.items_at(np.arange(18))]
    assert found == gallery.boxes and sum(box is None for box in found) == 16
    pages: list[str] = []
    for source in sources:
        page = tmp_path / "page.html"
        assert dmlkit("search", source, place / "asked" / "0.jpg", "-k", 18, "--html", page).code == 0
        pages.append("\n".join(sorted(re.findall(r"data:image/jpeg;base64,[^\"]+", page.read_text()))))
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_nothing_heavy_is_imported(place: Path):
    gallery, photo = place / "gallery" / "exports" / "gallery.onnx", place / "asked" / "0.jpg"
    code = (
        "import sys\n"
        "from dmlkit.cli.app import main\n"
        "for command in ('identify', 'search'):\n"
        f"    sys.argv = ['dmlkit', command, {str(gallery)!r}, {str(photo)!r}]\n"
        "    try: main()\n"
        "    except SystemExit as end: print('code', command, end.code)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = result.stdout.splitlines()
    assert {"code identify 0", "code search 0"} <= {*lines} and lines[-1] == "[]", result.stdout + result.stderr
    assert result.stdout.count("0.jpg") >= 2


@pytest.mark.parametrize("place", [ONE_EPOCH], ids=["cosine"], indirect=True)
def test_what_does_not_apply_is_refused_in_one_line(place: Path, tmp_path: Path, dmlkit: Cli):
    exported, asked = place / "gallery" / "exports" / "gallery.onnx", place / "asked"

    def refused(*arguments: object) -> str:
        result = dmlkit(*arguments)
        assert result.code == 2 and result.err.count("\n") == 1, result.err
        return result.err

    for option in (("--by", "mean"), ("--by-group", "folder"), ("--rerank", "expansion"), ("--device", "cpu+bf16")):
        assert f"{option[0]}: does not apply to {exported}" in refused("identify", exported, asked, *option)
    assert "--run: does not apply" in refused("search", exported, asked, "--run", place / "run")
    assert "only identify and search read exported galleries" in refused("duplicates", exported)
    assert "expected an image or a folder of images" in refused("identify", exported, place / "gallery")
    assert "cannot read this image" in refused("identify", exported, asked / "broken.jpg")
    (tmp_path / "no.onnx").write_bytes(b"no graph")
    assert "cannot read this ONNX file" in refused("identify", tmp_path / "no.onnx", asked)
    export(place / "run", "onnx", output=tmp_path / "model.onnx")
    assert "has a model, but no gallery" in refused("search", tmp_path / "model.onnx", asked)
    assert "--precision applies only to runs" in refused(
        "export", place / "gallery", "--format", "onnx", "--precision", "int8"
    )
    assert "was not written by this command" in refused(
        "export", place / "gallery", "--format", "onnx", "-o", tmp_path / "no.onnx"
    )
