"""What a stranger's program does with dmlkit's components; pyright must find no fault in it."""

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

import dmlkit
from dmlkit.backbones import SmallCNN
from dmlkit.datasets import DatasetConfig, GlyphsConfig
from dmlkit.heads import Linear
from dmlkit.losses import Loss, LossConfig, ProxyAnchor, Triplet
from dmlkit.manifolds import Manifold, Poincare, Sphere
from dmlkit.metrics import MapAtRConfig, RecallConfig, retrieval_metrics
from dmlkit.miners import Miner, SemiHard
from dmlkit.optimizers import AdamWConfig
from dmlkit.pooling import GeM
from dmlkit.recipe.schema import Recipe
from dmlkit.regularizers import GraphConsistency
from dmlkit.samplers import ClassBalanced
from dmlkit.schedules import CosineConfig
from dmlkit.transforms import ImageNetConfig
from dmlkit.transport import Sinkhorn

loss = ProxyAnchor(Sphere(8), 10, margin=0.2)
assert_type(loss, ProxyAnchor)
assert_type(loss.margin, float)
assert_type(loss.manifold, Manifold)
assert_type(Poincare(8, curvature=-0.5).curvature, Tensor)
assert_type(Triplet(Sphere(8), miner=SemiHard()).miner, Miner)
assert_type(LossConfig.variants["triplet"]().build(Sphere(8), 10), Any)

recipe = Recipe(
    dataset=GlyphsConfig(classes=20), loss=ProxyAnchor.Config(), metrics=(RecallConfig(k=(1, 2)), MapAtRConfig())
)
assert_type(recipe.loss, LossConfig)
assert_type(recipe.loss.build(Sphere(8), 10), Loss)
assert_type(recipe.dataset, DatasetConfig)
assert_type(retrieval_metrics(torch.randn(8, 4), torch.arange(8) % 2, metrics=["recall@1"]), dict[str, float])

configs = (SmallCNN.Config(width=4), AdamWConfig(lr=0.1), CosineConfig(), ImageNetConfig())
classes = (Linear, GeM, GraphConsistency, ClassBalanced, Sinkhorn)


def through_the_front_door(folder: Path) -> NDArray[np.float32]:
    """The Python face; never called."""
    summary = dmlkit.train("glyphs/proxy_anchor", folder, overrides=["training.epochs=1"])
    assert_type(summary.chosen.test, dict[str, float] | None)
    assert_type(dmlkit.evaluate(folder).report.metrics, dict[str, float])
    model = dmlkit.load(folder)
    assert_type(model, dmlkit.Embedder)
    embeddings = model.embed(["robin.jpg", folder / "wren.jpg", Image.new("RGB", (8, 8))])
    assert_type(embeddings, NDArray[np.float32])
    assert_type(dmlkit.load("timm:vit_small_patch14_dinov2"), dmlkit.Embedder)
    birds = dmlkit.open_gallery("galleries/birds", run=folder)
    assert_type(birds, dmlkit.ImageGallery)
    assert_type(birds.add("photos", label="robin").added, int)
    assert_type(birds.remove(labels=["robin"]) + len(birds), int)
    assert_type({path: answer.label for path, answer in birds.identify("new", method="vote").labeled()}, dict[str, str])
    found = [neighbor.similarity for _, near in birds.search("new", k=3).neighbors() for neighbor in near]
    assert_type(found, list[float])
    return model.similarity(embeddings, model.embed(np.zeros((2, 8, 8, 3), np.uint8)))
