"""A plug-in's manifold with a distance of its own is stored, searched and exported by its own index vectors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from dmlkit import testing
from dmlkit.export.databases import rows_of, store_manifest
from dmlkit.export.formats import export_embeddings
from dmlkit.manifolds import ManifoldConfig
from dmlkit.nearest.search import Gallery
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.index_vectors import index_vectors
from tests.vectors.stored import embeddings_at

STRETCHED = """
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from dmlkit.component import option
from dmlkit.manifolds.base import Manifold, Side
from dmlkit.manifolds.base import load_geoopt
from dmlkit.manifolds.products import safe_sqrt, squared_distances


class Stretched(Manifold, name="stretched"):
    '''Flat space in which the first coordinate counts three times.'''

    similarity_name: Literal["negative_distance"] = option(default="negative_distance", alias="similarity")

    @cached_property
    def geometry(self) -> Any:
        return load_geoopt().Euclidean(ndim=1)

    def stretch(self, points: Tensor) -> Tensor:
        return torch.cat([3 * points[..., :1], points[..., 1:]], dim=-1)

    def from_features(self, features: Tensor) -> Tensor:
        return features

    def distance_off(self, points: Tensor) -> Tensor:
        return points.abs().amax(-1) * 0

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_sqrt(squared_distances(self.stretch(x), self.stretch(y)))

    def paired_distance(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_sqrt(self.stretch(x - y).square().sum(-1))

    def product_vectors(self, points: Tensor) -> Tensor:
        raise NotImplementedError

    def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
        points = self.stretch(points)
        if side == "query":
            return torch.cat([2 * points, -torch.ones_like(points[:, :1])], dim=-1)
        return torch.cat([points, points.square().sum(-1, keepdim=True)], dim=-1)
"""


def test_a_manifold_without_a_form_in_numpy_is_searched_and_exported(plugin: Callable[[str], None], tmp_path: Path):
    plugin(STRETCHED)
    config = ManifoldConfig.variants["stretched"]()
    testing.check_manifold(config)

    generator = np.random.default_rng(0)
    points = generator.normal(size=(60, 5)).astype(np.float32)
    queries = generator.normal(size=(7, 5)).astype(np.float32)
    differences = (queries[:, None] - points).astype(np.float64) * [3, 1, 1, 1, 1]
    expected = (differences**2).sum(2).argsort(1)[:, :4].tolist()

    described: dict[str, Any] = {"manifold": config.model_dump(), "similarity": "negative_distance"}
    folder = EmbeddingFolder(embeddings_at(tmp_path / "out", points, dim=5, features=5, **described))
    space = folder.manifold
    assert folder.manifest.index.form == "own"
    assert Gallery(space, torch.from_numpy(points)).search(torch.from_numpy(queries), k=4).indices.tolist() == expected

    vectors = space.index_vectors(torch.from_numpy(queries), "query").numpy()
    output, _, _ = export_embeddings(folder, "faiss", tmp_path / "index.faiss")
    assert faiss.read_index(str(output)).search(vectors, 4)[1].tolist() == expected

    index = store_manifest(folder).index
    assert (index.form, index.distance, index.dim, index.suits_graph()) == ("own", "dot", 6, False)
    stored = np.concatenate([vectors for _, vectors in rows_of(folder, index)])
    assert (-vectors @ stored.T).argsort(1)[:, :4].tolist() == expected

    points[3] = 1e30  # whose products overflow, although the plug-in calls each row a point
    with pytest.raises(ValueError, match=r"row 3: its largest coordinate is 1e\+30, and inner products overflow"):
        Gallery(space, torch.from_numpy(points))

    with pytest.raises(ValueError, match=r"unknown form 'own'; only its manifold .* use Manifold\.index_vectors"):
        index_vectors(queries, index.model_dump(), "query")
