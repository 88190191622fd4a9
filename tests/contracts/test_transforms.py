"""Every transform: uint8 squares of the size it says; chance only in training, and only from the draw's seed."""

import pytest
import torch

from dmlkit.loading.batches import TrainingBatches
from dmlkit.loading.inputs import TransformedImages
from dmlkit.recipe.schema import Recipe
from dmlkit.transforms.base import TransformConfig


@pytest.fixture(params=sorted(TransformConfig.variants))
def config(request: pytest.FixtureRequest) -> TransformConfig:
    return TransformConfig.variants[request.param]()


@pytest.mark.parametrize("shape", [(3, 300, 200), (3, 32, 32), (3, 17, 500)])
def test_images_become_squares(config: TransformConfig, shape: tuple[int, ...]):
    image = torch.randint(0, 256, shape, dtype=torch.uint8)
    for transform in (config.training(), config.evaluation()):
        result = transform(image)
        assert result.shape == (3, config.size, config.size) and result.dtype == torch.uint8


def test_a_flat_image_keeps_its_colour(config: TransformConfig):
    image = torch.tensor([10, 100, 200], dtype=torch.uint8).view(3, 1, 1).expand(3, 60, 80)
    result = config.evaluation()(image)
    assert result[:, config.size // 2, config.size // 2].tolist() == [10, 100, 200]


def test_augmentation_follows_the_draw_alone(config: TransformConfig):
    from dmlkit.datasets.glyphs import Glyphs

    torch.manual_seed(0)
    glyphs = Glyphs(["a", "b"], 4, 32, 0)
    images = TransformedImages(glyphs, config, training=True)
    state = torch.get_rng_state()
    first, same, other = images[1, 5][0], images[1, 5][0], images[1, 6][0]
    assert torch.equal(torch.get_rng_state(), state)  # the model's own random numbers are untouched
    assert torch.equal(first, same)
    assert torch.equal(first, other) != config.augments


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
