"""`dmlkit gallery index`: what it says of itself is so, and no change of a gallery makes it wrong."""

import shutil
import signal
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.gallery import folder
from dmlkit.gallery import index as building
from dmlkit.gallery.change import compact_gallery, create_gallery, remove_images, restore_version
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import LabelledImage
from dmlkit.gallery.index import ApproximateGallery, index_gallery
from dmlkit.gallery.manifest import GalleryManifest, changing, commit, new_rows
from dmlkit.identify.decisions import FIRST
from dmlkit.identify.search import searcher_of
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.poincare import Poincare
from dmlkit.manifolds.sphere import Sphere
from dmlkit.nearest.search import StoredGallery
from dmlkit.vectors.manifest import index_of
from dmlkit.vectors.store import VectorStore, keys_of, write_part
from tests.conftest import END, Cli, refuses
from tests.gallery.test_faults import FRACTIONS
from tests.gallery.test_gallery import rows_of
from tests.processes import Forked
from tests.vectors.stored import ON_CPU

SPACES: dict[str, ManifoldConfig] = {
    "ball": Poincare.Config(),
    "sphere": Sphere.Config(),
    "flat": Euclidean.Config(),
    "dot": Euclidean.Config(similarity="dot"),
}


def stocked(place: Path, path: Path, space: str = "ball", rows: int = 520, dim: int = 8, classes: int = 40) -> Path:
    """A gallery of clusters of points, whose images nobody has."""
    create_gallery(place / "run", None, path, model=ON_CPU)
    manifold = SPACES[space].build(dim)
    of_space = {"manifold": SPACES[space], "similarity": manifold.similarity_name, "index": index_of(manifold)}
    width = {"dim": manifold.point_dim, "features": dim}
    GalleryManifest.read(path / "gallery.json").model_copy(update={**of_space, **width}).write(path / "gallery.json")
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(40, dim, generator=generator)
    features = centers.repeat_interleave(rows // 40, 0) + 0.3 * torch.randn(rows, dim, generator=generator)
    add_points(path, features, 0, [f"c{row % classes}" for row in range(rows)])
    return path


def add_points(path: Path, features: Tensor, start: int, labels: list[str] | None = None) -> None:
    """Add points whose images nobody has."""
    labels = labels or [f"c{row % 40}" for row in range(len(features))]
    ids = [f"{start + row:032x}" for row in range(len(features))]
    images = {one: LabelledImage(f"/none/{one}.jpg", label) for one, label in zip(ids, labels, strict=True)}
    with changing(path) as manifest:
        gallery = GalleryFolder(path)
        points = gallery.manifold.from_features(features)
        place, keys = path / "vectors" / "made", keys_of([*map(bytes.fromhex, ids)])
        write_part(place, keys, points)
        store = VectorStore(place, points.shape[1])
        rows = [gallery.table, new_rows(images, store, store.find(keys), manifest.numbers)]
        counted = manifest.model_copy(update={"numbers": manifest.numbers + len(ids)})
        commit(path, counted, pa.concat_tables(rows))


def searched(path: Path, queries: Tensor, k: int = 10) -> tuple[Any, Any, GalleryFolder]:
    """The answers through the index, the exact ones, and the gallery."""
    gallery = GalleryFolder(path)
    assert gallery.approximate is not None
    found = ApproximateGallery(gallery, gallery.approximate).search(queries, k)
    return found, StoredGallery(gallery.manifold, gallery).search(queries, k), gallery


OF_KIND = {"ivf_hnsw_sq": SPACES, "ivf_pq": ("ball", "dot"), "int8": ("ball",), "binary": ("sphere",)}
BYTES = {"int8": 1, "binary": 1 / 8}
"""Of a number."""


@pytest.mark.parametrize(("kind", "space"), [(kind, space) for kind, spaces in OF_KIND.items() for space in spaces])
def test_an_index_finds_what_it_says(space: str, kind: Any, place: Path, tmp_path: Path):
    path = stocked(place, tmp_path / "gallery", space)
    built = index_gallery(path, kind, 0.9)
    gallery = GalleryFolder(path)
    if kind in BYTES:  # and the number of each image, and the centers of the lists
        assert 0 <= built.bytes_per_image - built.full_bytes / 4 * BYTES[kind] <= 32
    assert gallery.approximate == built.index and 0.9 <= built.index.recall <= 1 and built.queries == 520
    # every image against all, by hand
    points = torch.cat(list(gallery.blocks(1000)))
    similarity = gallery.manifold.paired_similarity(points[:, None].double(), points.double())
    similarity.fill_diagonal_(-torch.inf)
    nearest = similarity.topk(10).indices.tolist()
    found = ApproximateGallery(gallery, built.index).search(points, 11)
    rows = [[one for one in row if one != number][:10] for number, row in enumerate(found.indices.tolist())]
    shares = np.array([len(set(a) & set(b)) / 10 for a, b in zip(rows, nearest, strict=True)])
    assert built.index.recall == pytest.approx(shares.mean(), abs=1e-3)
    assert shares.mean() - 1.645 * shares.std(ddof=1) / len(shares) ** 0.5 >= 0.9 - 1e-3  # with 95 % confidence
    # what is found is listed with its exact similarity, in its order
    expected = gallery.manifold.paired_similarity(points[:, None].double(), points[found.indices].double())
    assert torch.equal(found.similarities, expected.float())
    assert (found.similarities.diff(dim=1) <= 0).all()


def test_a_gallery_that_changes_keeps_its_answers(place: Path, tmp_path: Path, dmlkit: Cli):
    path = stocked(place, tmp_path / "gallery", "sphere")
    before = GalleryFolder(path).version
    result = dmlkit("gallery", "index", path, "--recall", "1")
    assert result.code == 0 and "recall 1.0000 of the 10 nearest, with 520 images" in result.out, result.err
    points = torch.cat(list(GalleryFolder(path).blocks(1000)))[::7]

    def check(not_indexed: int) -> None:
        found, exact, gallery = searched(path, points)
        assert (found.indices == exact.indices).double().mean() > 0.99
        info = dmlkit("gallery", "info", path, "--json").json()
        assert info["not_indexed"] == not_indexed and info["images"] == len(gallery)

    check(0)
    add_points(path, torch.randn(60, 8, generator=torch.Generator().manual_seed(5)), 5000)
    assert remove_images(path, labels=["c3"]) == 13 + 2
    check(58)
    row = torch.tensor([len(GalleryFolder(path)) - 1])
    assert searched(path, GalleryFolder(path).points_at(row), 1)[0].indices.item() == row.item()
    assert "58 images are not in the index" in dmlkit("gallery", "info", path).out
    compact_gallery(path)
    check(0)
    restore_version(path, before)  # with two images of c3 that the index was built with
    check(0)
    assert dmlkit("gallery", "index", path, "--method", "ivf_hnsw_sq").code == 0
    check(0)
    assert len(list(path.glob("index-*.faiss"))) == 1


def test_search_says_how_it_found(place: Path, tmp_path: Path, dmlkit: Cli):
    path, photo = stocked(place, tmp_path / "gallery", dim=4, classes=5), place / "photos" / "crow" / "0.jpg"
    exact = dmlkit("search", path, photo, "--json").json()
    built = dmlkit("gallery", "index", path, "--method", "ivf_hnsw_sq", "--recall", "0.1").out
    assert "a search reads 1 x (k + 8) images" in built  # a graph has no parts
    built = dmlkit("gallery", "index", path, "--recall", "0.1").out
    assert "a search reads 1 part, and " in built
    assert dmlkit("gallery", "index", path, "--recall", "0.9").code == 0
    assert dmlkit("search", path, photo, "--json", "--exact").json() == exact and exact["recall"] == 1
    report = dmlkit("search", path, photo, "--json").json()
    recall = GalleryManifest.read(path / "gallery.json").approximate
    assert recall is not None and report["recall"] == recall.recall
    note = f"found by ivf_pq, measured recall {recall.recall:.4f}; use --exact for all"
    assert note in dmlkit("search", path, photo).out
    everything = dmlkit("search", path, photo, "--json", "-k", "520").json()
    assert len({neighbor["id"] for neighbor in everything["queries"][0]["neighbors"]}) == 520
    for by in ("nearest", "vote"):
        dmlkit("identify", path, photo, "-o", tmp_path / f"{by}.csv", "--method", by).ok()
    near = (tmp_path / "nearest.csv").read_text().splitlines()[1].split(",")
    first = dmlkit("search", path, photo, "--json", "-k", str(FIRST)).json()  # of as many as identify looks at
    assert near[1] == first["queries"][0]["neighbors"][0]["label"]


def test_an_index_is_built_without_warnings_of_faiss(place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    index_gallery(stocked(place, tmp_path / "gallery"), "ivf_pq", 0.5)
    assert capfd.readouterr() == ("", "")


def test_an_index_that_cannot_be_is_refused(place: Path, tmp_path: Path, dmlkit: Cli, monkeypatch):
    few = stocked(place, tmp_path / "few", rows=240)
    dmlkit("gallery", "index", few).refused("240 images are too few for an index, which needs 256")
    path = stocked(place, tmp_path / "gallery")
    for recall in ("0.0", "1.01", "nan"):
        dmlkit("gallery", "index", path, "--recall", recall).refused(f"--recall {recall}: expected a share")
    index_gallery(path, "ivf_hnsw_sq", 0.5)
    kept = GalleryManifest.read(path / "gallery.json")
    monkeypatch.setattr(building, "_further", lambda *_: iter(()))
    dmlkit("gallery", "index", path, "--recall", "1").refused(
        "ivf_pq finds 0.", "nothing was changed: try another --method"
    )
    assert GalleryManifest.read(path / "gallery.json") == kept
    GalleryFolder(path).check()
    index = GalleryFolder(path).approximate
    assert index is not None and index.kind == "ivf_hnsw_sq"
    with pytest.raises(UserError, match="a change of a gallery"), monkeypatch.context() as patched:
        patched.setattr("dmlkit.gallery.manifest.PATIENCE", 0.1)
        from dmlkit.files.lock import sole_writer

        with sole_writer(path, what="another"):
            index_gallery(path, "ivf_pq", 0.5)


@pytest.mark.heavy
def test_a_kill_leaves_an_index_or_an_exact_search(place: Path, tmp_path: Path):
    """A gallery that had an index: it has that one, or the new one, or none until the same command is given again."""
    some = stocked(place, tmp_path / "before", rows=320)
    index_gallery(some, "ivf_pq", 0.5)
    before, rows = GalleryFolder(some).approximate, rows_of(some)
    queries = torch.cat(list(GalleryFolder(some).blocks(1000)))[::9]
    whole = shutil.copytree(some, tmp_path / "whole")
    begun = perf_counter()
    assert Forked(index_gallery, whole, "ivf_hnsw_sq", 0.5).wait(END) == 0
    seconds, killed = perf_counter() - begun, 0
    for fraction in FRACTIONS:
        path = shutil.copytree(some, tmp_path / f"killed-{fraction}")
        child = Forked(index_gallery, path, "ivf_hnsw_sq", 0.5)
        sleep(fraction * seconds)
        child.kill()
        killed += child.wait(END) == -signal.SIGKILL
        gallery = GalleryFolder(path)
        assert rows_of(path) == rows
        index = gallery.approximate
        assert index is None or index == before or index.kind == "ivf_hnsw_sq"
        found, exact = (searcher_of(gallery, exact=one).search(queries, 5) for one in (False, True))
        assert index is not None or torch.equal(found.indices, exact.indices)
        assert (found.indices[:, 0] == exact.indices[:, 0]).double().mean() > 0.5
        assert index_gallery(path, "ivf_hnsw_sq", 0.5).index.kind == "ivf_hnsw_sq"
    assert killed > 0


def test_rows_that_are_no_points_are_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = stocked(place, tmp_path / "gallery", "sphere")
    with monkeypatch.context() as patched:
        patched.setattr(Sphere, "from_features", lambda _, features: features)
        add_points(path, torch.eye(8).index_fill(0, torch.tensor([3]), 1e20), 5000)
    message = "vectors/made/.* has no point in row 3: its length is .*, where points of the sphere have length 1; re"
    refuses(message, GalleryFolder, path)
    monkeypatch.setattr(folder, "KEPT", 0)  # as a large one
    gallery = GalleryFolder(path)
    refuses(message, list, gallery.blocks(100))
    refuses(message, gallery.points_at, torch.tensor([7, 525]))


@pytest.mark.parametrize(("run", "kept"), [(1, 0), (10**6, 0), (10**6, 2**28)])
def test_points_are_found_where_they_are_in_files(run, kept, place, tmp_path, monkeypatch):
    """Parts of 520 and 60 images, of which 15 are removed: rows in sequence and scattered ones."""
    monkeypatch.setattr(folder, "RUN", run)
    monkeypatch.setattr(folder, "KEPT", kept)
    path = stocked(place, tmp_path / "gallery", "sphere")
    add_points(path, torch.randn(60, 8, generator=torch.Generator().manual_seed(5)), 5000)
    assert remove_images(path, labels=["c3"]) == 15
    gallery = GalleryFolder(path)
    rows = zip(*(gallery.table[name].to_pylist() for name in ("part", "row")), strict=True)
    files = {part: load_file(path / "vectors" / part)["points"] for part in gallery.parts}
    points = torch.stack([files[part][row] for part, row in rows])
    blocks = list(gallery.blocks(50))
    assert torch.equal(torch.cat(blocks), points) and max(map(len, blocks)) <= 50
    assert torch.equal(gallery.points_at(torch.tensor([564, 0, 519, 0])), points[[564, 0, 519, 0]])
    queries = points[::9]
    exact = gallery.manifold.paired_similarity(queries[:, None].double(), points.double())
    found = StoredGallery(gallery.manifold, gallery).search(queries, 5).indices
    assert torch.equal(found, exact.argsort(dim=1, descending=True, stable=True)[:, :5])
