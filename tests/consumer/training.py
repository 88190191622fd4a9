"""What a stranger's program does with dmlkit's components; pyright must find no fault in it."""

from typing import assert_type

import torch

from dmlkit.backbones import SmallCNNConfig
from dmlkit.datasets import DatasetConfig, GlyphsConfig
from dmlkit.heads import Linear
from dmlkit.losses import Loss, LossConfig, ProxyAnchor, ProxyAnchorConfig, Triplet, TripletConfig
from dmlkit.manifolds import Manifold, Poincare, Sphere
from dmlkit.metrics import MapAtRConfig, RecallConfig, retrieval_metrics
from dmlkit.miners import SemiHard, SemiHardConfig
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
assert_type(ProxyAnchorConfig(margin=0.2).build(Poincare(8), 10), ProxyAnchor)
assert_type(TripletConfig(miner=SemiHardConfig()).build(Sphere(8), 10), Triplet)
assert_type(SemiHardConfig().build(Sphere(8)), SemiHard)

recipe = Recipe(
    dataset=GlyphsConfig(classes=20), loss=ProxyAnchorConfig(), metrics=(RecallConfig(k=(1, 2)), MapAtRConfig())
)
assert_type(recipe.loss, LossConfig)
assert_type(recipe.loss.build(Sphere(8), 10), Loss)
assert_type(recipe.dataset, DatasetConfig)
assert_type(retrieval_metrics(torch.randn(8, 4), torch.arange(8) % 2, metrics=["recall@1"]), dict[str, float])

configs = (SmallCNNConfig(width=4), AdamWConfig(lr=0.1), CosineConfig(), ImageNetConfig())
classes = (Linear, GeM, GraphConsistency, ClassBalanced, Sinkhorn)
