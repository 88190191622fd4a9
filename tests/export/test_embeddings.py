"""Exports of embeddings: no NaN is written, and each FAISS index has files of its own."""

import json
from pathlib import Path
from typing import Any, get_args

import faiss
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dmlkit.export.export import export
from dmlkit.export.formats import FaissManifest, export_embeddings
from dmlkit.export.wanted import EmbeddingFormat, WantedModel
from dmlkit.vectors import folder as folder_module
from dmlkit.vectors.folder import EmbeddingFolder
from tests.conftest import Killed, refuses
from tests.vectors.stored import INDEX, MANIFEST, POINTS, embeddings_at, items, manifest


def test_a_point_of_a_later_block_that_is_not_finite_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(folder_module, "BLOCK_ROWS", 2)
    points = POINTS.copy()
    points[3, 1] = points[4, 0] = np.inf
    folder, output = EmbeddingFolder(embeddings_at(tmp_path / "out", points)), tmp_path / "exports"
    refuses(r"out: row 3 \(photos/3\.jpg\): .* nan or inf", export_embeddings, folder, "parquet", output / "file")
    assert not output.exists()


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("npz", {"table": ""}, "--table applies only to stores"),
        ("faiss", {"overwrite": True}, "--overwrite applies only to stores"),
        ("npz", {"model": WantedModel(dims=0)}, "--dims applies only to onnx and torch-export; remove this option"),
        ("onnx", {"model": WantedModel(license="")}, "--license applies only to hub"),
        ("safetensors", {"model": WantedModel(precision="int8")}, "--precision applies only to onnx and faiss"),
        ("onnx", {"model": WantedModel(precision="binary")}, "an onnx model has fp32, fp16 or int8"),
        ("safetensors", {"model": WantedModel(takes="squares")}, "--input applies only to onnx and torch-export"),
        ("torch-export", {"model": WantedModel(takes="tracker")}, "--input tracker applies only to onnx, which"),
    ],
)
def test_an_option_of_another_format_is_refused_whatever_its_value(kind: Any, given: Any, message: str, tmp_path: Path):
    refuses(message, export, embeddings_at(tmp_path / "out"), kind, **given)


def test_indexes_of_similar_names_have_files_of_their_own(tmp_path: Path):
    older = EmbeddingFolder(embeddings_at(tmp_path / "a", POINTS[:2]))
    newer = EmbeddingFolder(embeddings_at(tmp_path / "b", POINTS[:4]))
    indexes = {"birds.2023": older, "birds.2024": newer, "birds.faiss": newer, "birds": older}
    for name, folder in indexes.items():
        files = export_embeddings(folder, "faiss", tmp_path / "out" / name)
        assert [path.name for path in files] == [name, f"{name}.items.parquet", f"{name}.json"]
    for name, rows in (("birds.2023", 2), ("birds.2024", 4), ("birds.faiss", 4), ("birds", 2)):
        assert parquet.read_table(tmp_path / "out" / f"{name}.items.parquet").to_pydict() == items(rows)
        assert FaissManifest.read(tmp_path / "out" / f"{name}.json").count == rows
    assert faiss.read_index(str(tmp_path / "out" / "birds.2023")).ntotal == 2


def test_the_manifest_of_an_index_is_that_of_the_embeddings_and_the_index(tmp_path: Path):
    export_embeddings(EmbeddingFolder(embeddings_at(tmp_path / "out")), "faiss", tmp_path / "index.faiss")
    report = json.loads((tmp_path / "index.faiss.json").read_text())
    index = {**INDEX, "type": "IndexFlatIP", "dim": 8}
    keys = ("fusion", "computation", "aligned_to", "threshold", "run", "checksums", "table")
    assert report == {**manifest(), "index": index, **dict.fromkeys(keys), "limits": []}
    assert FaissManifest.read(tmp_path / "index.faiss.json").index.dim == 8
    (tmp_path / "index.faiss.json").write_text(MANIFEST)  # as 0.1.0 wrote it
    refuses("a manifest of a FAISS index of format 1", FaissManifest.read, tmp_path / "index.faiss.json")
    (tmp_path / "index.faiss.json").write_text(json.dumps({**report, "index": {**index, "metric": 0}}))
    refuses(r"index\.faiss\.json: .*index\.metric: extra inputs", FaissManifest.read, tmp_path / "index.faiss.json")


def test_each_image_is_one_line_for_tensorboard(tmp_path: Path):
    folder = embeddings_at(tmp_path / "out")
    labels = ["a\tb", "a\nb", "a\rb", None, "c"]
    parquet.write_table(pa.table(items() | {"label": labels}), folder / "items.parquet")
    export(folder, "tensorboard", output=tmp_path / "board")
    lines = (tmp_path / "board" / "metadata.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == ["label", "a b", "a b", "a b", "", "c"]


@pytest.mark.parametrize("kind", get_args(EmbeddingFormat))
def test_boxes_are_kept_or_counted(kind: Any, tmp_path: Path):
    folder = embeddings_at(tmp_path / "out")
    sides = {side: [1.0, None, 2.0, None, None] for side in ("x1", "y1", "x2", "y2")}
    parquet.write_table(pa.table(items() | sides), folder / "items.parquet")
    exported = export(folder, kind, output=tmp_path / "exported")
    places = {"faiss": "exported.items.parquet", "parquet": "exported"}
    if kind in places:
        kept = parquet.read_table(tmp_path / places[kind]).select([*sides])
        assert not exported.notes and kept.to_pydict() == sides
    else:
        assert exported.notes == ["2 boxes are left out; --format parquet keeps them"]


@pytest.mark.parametrize("kind", ["faiss", "tensorboard"])
def test_a_kill_while_the_largest_file_goes_to_the_disk_leaves_no_newer_items(kind: Any, tmp_path: Path, monkeypatch):
    output, replaced = tmp_path / "exported", list[str]()
    older = EmbeddingFolder(embeddings_at(tmp_path / "a"))
    newer = EmbeddingFolder(embeddings_at(tmp_path / "b", POINTS[:4]))
    files = export_embeddings(older, kind, output)
    before, replace = [file.read_bytes() for file in files], Path.replace

    def replace_or_die(partial: Path, target: Path) -> Path:
        if Path(target) == files[0]:  # of which the flush to the disk before takes longest
            raise Killed
        replaced.append(Path(target).name)
        return replace(partial, target)

    monkeypatch.setattr(Path, "replace", replace_or_die)
    with pytest.raises(Killed):
        export_embeddings(newer, kind, output)
    assert replaced == ([] if kind == "faiss" else ["projector_config.pbtxt"])
    kept = slice(None) if kind == "faiss" else slice(2)
    assert [file.read_bytes() for file in files][kept] == before[kept]
