"""A folder of embeddings: what 0.1.0 wrote is read; damaged files and those that do not belong together are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dmlkit.errors import UserError
from dmlkit.export.formats import FaissIndex, FaissManifest
from dmlkit.export.model import ModelManifest, Parity
from dmlkit.files.regular import file_checksum
from dmlkit.recipe.reference import meanings_of
from dmlkit.vectors import folder as folder_module
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.manifest import Manifest, ModelSource, Preprocessing, SearchIndex
from dmlkit.vectors.points import in_memory
from tests.conftest import ROOT, refuses
from tests.vectors.stored import INDEX, MANIFEST, POINCARE, POINTS, embeddings_at, items, manifest

NOT_UTF8 = pa.array([b"ant\x80"] * 5).view(pa.string())


def test_a_folder_made_by_hand_is_read(tmp_path: Path):
    folder = EmbeddingFolder(embeddings_at(tmp_path / "photos"))
    assert (folder.manifest.count, folder.manifest.dim, folder.manifest.features) == (5, 8, 8)
    assert folder.manifest.model.checkpoint == "best" and folder.manifest.model.backbone["width"] == 4
    assert folder.manifest.preprocessing.mean == (0.5, 0.5, 0.5) and folder.manifest.preprocessing.size == 16
    assert folder.manifest.skipped == ("photos/broken.jpg: cannot read this image",)
    assert torch.equal(torch.cat(list(folder.blocks())), torch.from_numpy(POINTS))
    assert folder.items["path"].to_pylist() == items()["path"]
    assert folder.manifold.similarity(*torch.from_numpy(POINTS[:2])[:, None]).tolist() == [[0.0]]
    disk = EmbeddingFolder(embeddings_at(tmp_path / "disk", manifold=POINCARE)).manifold
    assert disk.dim == 8 and disk.curvature.item() == pytest.approx(-0.49700847268104553)


def test_what_is_written_is_that_and_a_format(tmp_path: Path):
    (tmp_path / "old.json").write_text(MANIFEST)
    Manifest.read(tmp_path / "old.json").write(tmp_path / "new.json")
    text = (tmp_path / "new.json").read_text()
    assert json.loads(text) == {
        **json.loads(MANIFEST),
        **dict.fromkeys(("fusion", "computation", "aligned_to", "threshold", "run", "checksums", "table")),
        "limits": [],
    }
    names = list(json.loads(MANIFEST))
    after = names.index("preprocessing") + 1
    names[after:after] = ["fusion", "computation", "aligned_to"]
    assert list(json.loads(text)) == [*names, "threshold", "run", "checksums", "table", "limits"]
    assert Manifest.read(tmp_path / "new.json") == Manifest.read(tmp_path / "old.json")


def refused(path: Path) -> str:
    """The line with which a folder is refused; it names the file."""
    with pytest.raises(UserError) as error:
        EmbeddingFolder(path)
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"{path}/")
    return line.removeprefix(f"{path}/")


def test_an_unknown_key_is_told(tmp_path: Path):
    embeddings_at(tmp_path / "out")
    for part in ("", "index", "model", "manifold"):
        data = {**manifest(), "index": {**INDEX}}
        (data[part] if part else data)["colour"] = "red"
        (tmp_path / "out" / "manifest.json").write_text(json.dumps(data))
        line = refused(tmp_path / "out")
        assert line.startswith("manifest.json: a manifest of embeddings") and part in line
        assert "colour: extra inputs" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "of format 99, written by dmlkit 0.1.0; this is"),
        ({"format": "onnx"}, "of format onnx"),
        ({"dim": "8"}, "dim: input should be a valid integer"),
        ({"manifold": {"name": "torus"}}, "manifold.name: 'torus' is unknown; install the plug-in"),
        ({"manifold": POINCARE, "similarity": "cosine"}, "expected (8, 'negative_distance') for manifold poincare and"),
        ({"manifold": {"name": "lorentz"}, "similarity": "negative_distance"}, "expected (9, 'negative_distance')"),
        ({"features": 99}, "got dim and similarity (8, 'cosine'), expected (99, 'cosine') for manifold sphere and 99"),
    ],
)
def test_another_format_and_wrong_values_are_told(changes: dict[str, Any], message: str, tmp_path: Path):
    line = refused(embeddings_at(tmp_path / "out", **changes))
    assert line.startswith("manifest.json: ") and message in line


def test_a_manifest_that_is_none_is_told(tmp_path: Path):
    embeddings_at(tmp_path / "out")
    for content, message in ((b"", "cannot read this manifest"), (b"\xff", "cannot read this"), (b"[]", "got list")):
        (tmp_path / "out" / "manifest.json").write_bytes(content)
        assert message in refused(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    assert refused(tmp_path / "out").startswith("manifest.json: missing")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, "cannot read this NumPy array"),
        *(
            (lambda path, points=points: np.save(path, points), f"got {points.dtype} {points.shape}, expected float32 ")
            for points in (*map(POINTS.astype, ("f8", ">f4", "U8")), POINTS[0], POINTS[None], POINTS[:4], POINTS[:, :7])
        ),
    ],
)
def test_points_that_are_none_are_told(damage: Callable[[Path], object], message: str, tmp_path: Path):
    damage(embeddings_at(tmp_path / "out") / "embeddings.npy")
    line = refused(tmp_path / "out")
    assert line.startswith("embeddings.npy: ") and message in line


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot read these items"),
        (cut_short, "cannot read these items"),
        (lambda path: path.unlink(), "missing"),
        *(
            (lambda path, table=table: parquet.write_table(pa.table(table), path), message)
            for table, message in (
                (items(4), "has 4 rows, expected 5"),
                ({"id": range(5), "path": ["x"] * 5}, "has the columns id, path; expected id, path, label"),
                ({**items(), "label": [b"\xff"] * 5}, "cannot read these items: Invalid UTF8"),
                ({**items(), "path": NOT_UTF8}, "Invalid UTF8 sequence"),
                ({**items(), "id": ["one"] * 5}, "cannot read these items: Failed to parse string"),
                ({**items(), "path": [None] * 5}, "an item has no id or no path"),
            )
        ),
        (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
    ],
)
def test_items_that_are_none_are_told(damage: Callable[[Path], object], message: str, tmp_path: Path):
    damage(embeddings_at(tmp_path / "out") / "items.parquet")
    line = refused(tmp_path / "out")
    assert line.startswith("items.parquet: ") and message in line


def test_a_folder_without_rows_is_read(tmp_path: Path):
    folder = EmbeddingFolder(embeddings_at(tmp_path / "out", POINTS[:0]))
    assert folder.points.shape == (0, 8) and list(folder.blocks()) == []
    folder.check_points()
    assert in_memory(folder).points.shape == (0, 8)


def test_every_key_says_what_it_is():
    documents = (Manifest, FaissManifest, ModelManifest, SearchIndex, FaissIndex, ModelSource, Preprocessing, Parity)
    for kind in documents:
        assert meanings_of(kind).keys() == kind.model_fields.keys(), kind


def test_rows_are_checked_once_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    monkeypatch.setattr(folder_module, "find_invalid_point", lambda _, block: looked.append(len(block)))
    folder = EmbeddingFolder(embeddings_at(tmp_path / "out"))
    assert looked == [] and len(next(folder.blocks(2))) == 2 and looked == [5]
    assert [len(block) for block in folder.blocks(3)] == [3, 2] and len(folder.points_at(torch.tensor([4]))) == 1
    folder.check_points()
    assert np.array_equal(in_memory(folder).points.numpy(), folder.points) and looked == [5]


def test_no_row_is_read_of_points_that_changed(tmp_path: Path):
    path = embeddings_at(tmp_path / "out")
    sums = {"points": crc32(POINTS.tobytes()), "items": file_checksum(path / "items.parquet")}
    (path / "manifest.json").write_text(json.dumps(manifest(checksums=sums)))
    assert torch.equal(EmbeddingFolder(path).points_at(torch.tensor([1])), torch.from_numpy(POINTS[[1]]))
    np.save(path / "embeddings.npy", POINTS[[0, 1, 2, 4, 3]])
    folder = EmbeddingFolder(path)
    for read in (lambda: next(folder.blocks(2)), lambda: folder.points_at(torch.tensor([1]))):
        refuses("this file was changed: its checksum differs", read)


def test_every_command_refuses_what_is_no_point(dmlkit, tmp_path: Path):
    points, whole = 0.5 * POINTS, embeddings_at(tmp_path / "whole", 0.5 * POINTS, manifold=POINCARE)
    points[3, 3] = 1e4
    faulty = embeddings_at(tmp_path / "faulty", points, manifold=POINCARE)
    message = "its length is 10000, where points of the ball are shorter than its radius of 1.4184633"
    for words in (
        ["curvature", faulty],
        ["search", faulty, whole],
        ["search", whole, faulty],
        ["eval", faulty],
        ["cluster", faulty, "-k", "2"],
        ["duplicates", whole, faulty, "--threshold", "-1"],
        ["inspect", faulty, "-o", tmp_path / "inspection.html"],
        *(["export", faulty, "--format", kind, "-o", tmp_path / kind] for kind in ("npz", "faiss", "lancedb")),
    ):
        dmlkit(*words).refused(f"{faulty}: row 3 (photos/3.jpg): {message}; restore emb")
    assert {path.name for path in tmp_path.iterdir()} <= {"whole", "faulty", "lancedb"}


def test_a_run_that_has_moved_is_found_where_another_folder_has_its_old_place(tmp_path: Path):
    old, new = tmp_path / "old" / "runs" / "one", tmp_path / "new" / "runs" / "one"
    shutil.copytree(ROOT / "tests/fixtures/0.1.0/run", new)
    old.mkdir(parents=True)
    assert EmbeddingFolder(embeddings_at(tmp_path / "new" / "photos", run=str(old))).run == new
