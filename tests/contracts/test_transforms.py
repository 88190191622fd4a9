"""Every transform: uint8 squares of the size it says; chance only in training, and only from the draw's seed."""

import pytest
import torch

from dmlkit.loading.batches import TrainingBatches
from dmlkit.recipe.schema import Recipe
from dmlkit.testing.data import TRANSFORM
from dmlkit.testing.promise import Promise, hold
from dmlkit.transforms.base import TransformConfig


@pytest.mark.parametrize("name", sorted(TransformConfig.variants))
@pytest.mark.parametrize("promise", TRANSFORM, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, name: str):
    hold([promise], name, TransformConfig.variants[name]())


def test_ranks_split_the_batches_of_one_process():
    recipe = Recipe.model_validate_json('{"dataset": {"name": "glyphs"}, "loss": {"name": "triplet"}}')
    sampler = recipe.sampler.build(torch.arange(640), 0)
    whole = TrainingBatches(sampler, seed=3)
    parts = [TrainingBatches(sampler, seed=3, rank=rank, ranks=4) for rank in range(4)]
    for batches in (whole, *parts):
        batches.epoch = 2
    joined = [[draw for piece in pieces for draw in piece] for pieces in zip(*parts, strict=True)]
    assert joined == list(whole)
    whole.start = 5
    assert list(whole) == joined[5:] and len(whole) == len(joined) - 5
