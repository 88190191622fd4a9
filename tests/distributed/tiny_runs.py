"""Trains a tiny recipe with every loss, on as many ranks as there are. For test_ranks."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dmlkit.distributed.launch import start_ranks
from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.losses.base import LossConfig
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.overrides import parse_override
from dmlkit.recipe.schema import Recipe
from dmlkit.training.progress import Silent
from dmlkit.training.train import train
from tests.conftest import lighten

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


# A sum over classes, a softmax over several proxies of each, one with a memory, and one added to a loss over pairs;
# `test_class_shard` compares value and gradients of all that share classes, and the rest of a run is the same for each.
SHARED_OUT = ("proxy_anchor", "proxy_isa", "soft_triple", "sum")
OPTIONS = {
    "proxy_gml": "proxy_gml, ratio: 0.5, scale: 20.0",  # its own keep few of 9 classes, and little gradient
    "fast_ap": "fast_ap, bins: 100",  # these points are so near that all are in one of 10, where rounding grows
}
SPACES = {"per_factor": ("manifold={name: product, factors: [{name: sphere}, {name: euclidean}]}",)}
SHARDED = ("training.shard_proxies=true",)
ACCUMULATED = ("training.accumulate=4",)
CHUNKED = ("training.gradient_cache=3",)
HARD = ("sampler={name: hard_classes, classes_per_batch: 4, images_per_class: 2}",)
# Everything that a number of ranks could spoil: momentum of shared-out proxies, a norm over all of them, a schedule,
# steps of several batches.
RESUMED = (
    *SHARDED,
    "optimizer.lr=0.0001",
    "training.clip_grad_norm=0.5",
    "training.accumulate=2",
    "schedule={name: cosine}",
)
TUNED = {
    "none": "backbone.tuning={name: none}",
    "last blocks": "backbone.tuning={name: last_blocks, blocks: 2}",
    "lora": "backbone.tuning={name: lora, targets: all, rank: 1}",
    "first epoch frozen": "backbone.freeze_epochs=1",
}


class Stopper(Silent):
    """Asks the run to stop in its second epoch."""

    def step(self, **figures: Any) -> None:
        if figures["epoch"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def recipe_of(loss: str, overrides: tuple[str, ...] = ()) -> Recipe:
    texts = (*SPACES.get(loss, ()), *overrides)
    return parse_recipe(RECIPE.format(loss=OPTIONS.get(loss, loss)), loss, [parse_override(text) for text in texts])


def train_all(output: Path, *continued: Path) -> None:
    """Every loss and tuning into ``output``, where it is not there yet, after the runs that were stopped."""
    torch.set_num_threads(1)
    is_there = output.exists()  # before the ranks meet: afterwards the first one may have created it
    ranks = start_ranks("cpu")
    lighten()
    for path in continued:
        train(recipe_of("mpa", RESUMED), path, device=ranks, resume=True)
    if is_there:
        return
    for name in sorted(LossConfig.variants):
        train(recipe_of(name), output / name, device=ranks)
        if name in SHARED_OUT and ranks.world_size > 1:
            train(recipe_of(name, SHARDED), output / f"{name} sharded", device=ranks)
    for name, override in TUNED.items():
        train(recipe_of("proxy_anchor", (override,)), output / name, device=ranks)
    train(recipe_of("proxy_isa", (*ACCUMULATED, "loss.delay=0.5")), output / "accumulated", device=ranks)
    train(recipe_of("multi_similarity", CHUNKED), output / "chunked", device=ranks)
    train(recipe_of("multi_similarity", HARD), output / "hard classes", device=ranks)
    train(recipe_of("mpa", RESUMED), output / "unbroken", device=ranks)
    with suppress(TrainingStoppedError):
        train(recipe_of("mpa", RESUMED), output / "stopped", device=ranks, progress=Stopper())
