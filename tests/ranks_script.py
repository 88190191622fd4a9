"""Trains a tiny recipe with every loss, on as many ranks as torchrun starts. Run by test_ranks."""

import sys
from pathlib import Path
from typing import Any

import torch

from dmlkit.devices import start_fabric
from dmlkit.losses.base import LossConfig
from dmlkit.recipe_file import parse_recipe
from dmlkit.train import train

RECIPE = """\
dataset: {{name: glyphs, classes: 24, images_per_class: 6, size: 16, validation_fraction: 0.17}}
transform: {{name: plain, size: 16}}
backbone: {{name: small_cnn, width: 4, freeze_batchnorm_statistics: true}}  # they would be of a rank's own images
embedding_dim: 8
loss: {{name: {loss}}}
sampler: {{name: class_balanced, classes_per_batch: 4, images_per_class: 2}}
optimizer: {{name: riemannian_sgd, lr: 0.00001}}
training: {{epochs: 3, workers: 0}}
metrics: [{{name: map_at_r}}]
"""


OPTIONS = {"proxy_gml": "proxy_gml, ratio: 0.5, scale: 20.0"}  # its own keep few of 9 classes, and little gradient


class Silent:
    """Progress that nobody watches."""

    def step(self, **_: Any) -> None: ...

    def epoch(self, row: dict[str, Any]) -> None: ...


if __name__ == "__main__":
    torch.set_num_threads(1)
    fabric = start_fabric("cpu")
    for name in sorted(LossConfig.variants):
        recipe = parse_recipe(RECIPE.format(loss=OPTIONS.get(name, name)), name)
        train(recipe, Path(sys.argv[1]) / name, fabric, Silent())
