"""The curvature advisor against a naive triple loop, trees, and the disk that its constant comes from."""

import json
import shutil

import numpy as np
import pytest
import torch

from dmlkit.datasets.glyphs import Glyphs
from dmlkit.files.image_file import BadImageError
from dmlkit.look.curvature import Hyperbolicity, hyperbolicity, relative_delta
from dmlkit.manifolds import Euclidean, Poincare
from dmlkit.vectors.index_vectors import index_vectors
from tests.conftest import ONE_EPOCH, ROOT, refuses


def test_delta_equals_the_triple_loop():
    points = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d = Euclidean(3).distance(points, points)
    product = [[(d[i, 0] + d[j, 0] - d[i, j]).item() / 2 for j in range(12)] for i in range(12)]
    delta = max(
        min(product[i][k], product[k][j]) - product[i][j] for i in range(12) for j in range(12) for k in range(12)
    )
    assert relative_delta(d) == pytest.approx(2 * delta / d.max().item())


def test_the_distances_of_a_tree_have_delta_zero():
    depth = torch.arange(31).add(1).log2().floor()
    ancestors = [{0}] + [set() for _ in range(30)]
    for node in range(1, 31):
        ancestors[node] = ancestors[(node - 1) // 2] | {node}
    meets = torch.tensor([[float(len(first & second)) - 1 for second in ancestors] for first in ancestors])
    assert relative_delta(depth[:, None] + depth - 2 * meets) == 0


def test_points_of_the_hyperbolic_plane_are_more_tree_like_than_flat_ones():
    directions = torch.nn.functional.normalize(torch.randn(400, 2, generator=torch.Generator().manual_seed(0)), dim=1)
    lengths = torch.rand(400, 1, generator=torch.Generator().manual_seed(1)).sqrt()
    ball, plane = Poincare(2, clip_distance=None), Euclidean(2)
    flat = hyperbolicity(plane, directions * lengths, sample=200, draws=3)
    bent = hyperbolicity(ball, ball.from_features(3 * directions * lengths), sample=200, draws=3)
    assert bent.mean < 0.6 * flat.mean
    assert flat.deviation > 0 and len(flat.deltas) == 3


def test_the_suggested_curvature_is_the_published_formula():
    assert Hyperbolicity([0.144]).curvature == pytest.approx(-1.0)
    assert Hyperbolicity([0.2, 0.28]).curvature == pytest.approx(-((0.144 / 0.24) ** 2))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (torch.zeros(3, 2), "at least 4 embeddings, got 3"),
        (torch.ones(9, 2), "all embeddings are equal, or their distances are those of a tree"),
    ],
)
def test_what_has_no_delta_is_refused(points: torch.Tensor, message: str):
    refuses(message, hyperbolicity, Euclidean(2), points, sample=10, draws=2)


def test_a_run_and_its_embeddings_are_measured_and_drawn(dmlkit, tmp_path):
    recipe, run = tmp_path / "disk.yaml", tmp_path / "run"
    recipe.write_text(
        ONE_EPOCH.replace("embedding_dim: 8", "embedding_dim: 2")
        + "manifold: {name: poincare, curvature: -0.5, learnable_curvature: true}\nhead: {name: mobius_linear}\n"
    )
    assert dmlkit("train", recipe, "-o", run, "--device", "cpu").code == 0
    result = dmlkit("curvature", run, "--device", "cpu").ok()
    assert "relative delta-hyperbolicity 0." in result.out and "10 samples of 18" in result.out
    assert "suggested curvature: -" in result.out

    assert dmlkit("embed", run, "--split", "test", "--device", "cpu").code == 0
    embeddings = run / "embeddings" / "test"
    result = dmlkit("curvature", embeddings)
    assert result.code == 0 and "36 embeddings" in result.out and "the distance of poincare" in result.out
    check_manifest(embeddings)

    for kind, name in (("disk", "a.png"), ("tsne", "b.svg"), ("pca", "c.png")):
        result = dmlkit("plot", kind, run, "-n", 4, "-o", tmp_path / name, "--device", "cpu")
        assert result.code == 0 and "24 images of 4 classes" in result.out
        start = b"\x89PNG" if name.endswith("png") else b"<?xml"
        assert (tmp_path / name).read_bytes().startswith(start)


def check_manifest(embeddings):
    """The manifest alone is enough to search: its form over the arrays, with the learned curvature."""
    manifest = json.loads((embeddings / "manifest.json").read_text())
    assert manifest["manifold"]["curvature"] not in (-0.5, -1.0)  # learned
    points = np.load(embeddings / "embeddings.npy").astype(np.float64)
    query, gallery = (index_vectors(points, manifest["index"], side) for side in ("query", "gallery"))
    ball = Poincare(2, curvature=manifest["manifold"]["curvature"]).double()
    distance = ball.paired_distance(torch.from_numpy(points)[:, None], torch.from_numpy(points)).numpy()
    np.testing.assert_allclose(
        np.take_along_axis(distance, (query @ gallery.T).argsort(1)[:, ::-1], 1), np.sort(distance, 1), atol=1e-6
    )


def test_images_of_a_run_that_cannot_be_read_are_counted(dmlkit, tmp_path, monkeypatch):
    run, sample = shutil.copytree(ROOT / "tests/fixtures/0.1.0/run", tmp_path / "run"), Glyphs.sample

    def read(dataset, index):
        if not index:
            raise BadImageError("0.png: cannot read this image")
        return sample(dataset, index)

    monkeypatch.setattr(Glyphs, "sample", read)
    monkeypatch.setattr(Glyphs, "in_memory", False)  # as of files, which are not read before they are embedded
    shown = dmlkit("curvature", run, "--device", "cpu").ok().out
    assert "1 image could not be read:" in shown and "41 images of the train split" in shown
