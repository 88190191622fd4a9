"""Exports of embeddings: no NaN is written, and each FAISS index has files of its own."""

import json
from pathlib import Path
from typing import Any, cast, get_args

import faiss
import numpy as np
import pytest
from pyarrow import parquet

from dmlkit.errors import UserError
from dmlkit.export.formats import FORMATS, FaissManifest, Format, export_embeddings
from dmlkit.export.wanted import EmbeddingFormat
from dmlkit.vectors.folder import EmbeddingFolder
from tests.conftest import refuses
from tests.vectors.stored import EUCLIDEAN, INDEX, MANIFEST, POINTS, embeddings_at, items, manifest


@pytest.mark.parametrize("block", [2, 65_536])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", get_args(EmbeddingFormat))
def test_embeddings_that_are_not_finite_are_refused(kind, value, block, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(EmbeddingFolder.blocks, "__defaults__", (block,))
    points = POINTS.copy()
    points[3, 1] = points[4, 0] = value
    folder = EmbeddingFolder(embeddings_at(tmp_path / "out", points))
    with pytest.raises(UserError) as error:
        export_embeddings(folder, kind, tmp_path / "exports" / FORMATS[kind].file_name)
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"{tmp_path / 'out'}: row 3 (photos/3.jpg): ") and "nan or inf" in line
    assert not list(tmp_path.glob("exports/*"))


def test_every_name_of_a_format_has_a_writer():
    assert set(FORMATS) == set(get_args(EmbeddingFormat))


def test_a_new_format_is_written(tmp_path: Path, monkeypatch):
    def write_lines(folder: EmbeddingFolder, output: Path) -> None:
        output.write_text(f"# lines\n{len(folder)}\n")

    monkeypatch.setitem(FORMATS, "lines", Format("embeddings.txt", write_lines))
    folder, name, output = EmbeddingFolder(embeddings_at(tmp_path / "out")), cast(Any, "lines"), tmp_path / "a.txt"
    assert export_embeddings(folder, name, output) == [output]
    assert output.read_text() == f"# lines\n{len(POINTS)}\n"


def test_points_whose_index_vectors_overflow_are_refused(tmp_path: Path):
    points = 1e30 * POINTS  # their squares, which the index holds, are more than float32 can
    points[:2] = 1e16
    folder = EmbeddingFolder(embeddings_at(tmp_path / "out", points, manifold=EUCLIDEAN))
    with pytest.raises(UserError, match=r"out: row 2 \(photos/2\.jpg\): its largest coordinate is .* overflow"):
        export_embeddings(folder, "faiss", tmp_path / "index.faiss")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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
    keys = {"fusion": None, "computation": None, "aligned_to": None, "threshold": None, "run": None, "checksums": None}
    assert report == {**manifest(), "index": index, **keys}
    assert FaissManifest.read(tmp_path / "index.faiss.json").index.dim == 8
    (tmp_path / "index.faiss.json").write_text(MANIFEST)  # as 0.1.0 wrote it
    refuses("a manifest of a FAISS index of format 1", FaissManifest.read, tmp_path / "index.faiss.json")
    (tmp_path / "index.faiss.json").write_text(json.dumps({**report, "index": {**index, "metric": 0}}))
    refuses(r"index\.faiss\.json: .*index\.metric: extra inputs", FaissManifest.read, tmp_path / "index.faiss.json")
