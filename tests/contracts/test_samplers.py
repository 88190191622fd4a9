"""Every sampler: pure in (seed, epoch), honest about its length and its batch size."""

from collections import Counter

import pytest
import torch

from dmlkit.errors import UserError
from dmlkit.samplers.base import Sampler, SamplerConfig

LABELS = torch.arange(30).repeat_interleave(20)[torch.randperm(600, generator=torch.Generator().manual_seed(0))]


@pytest.fixture(params=sorted(SamplerConfig.variants))
def config(request: pytest.FixtureRequest) -> SamplerConfig:
    return SamplerConfig.variants[request.param]()


def test_batches_depend_on_seed_and_epoch_alone(config: SamplerConfig):
    first, again, other = config.build(LABELS, 1), config.build(LABELS, 1), config.build(LABELS, 2)
    again.batches(epoch=7)  # drawing other epochs changes nothing
    assert first.batches(epoch=3) == again.batches(epoch=3)
    assert first.batches(epoch=3) != first.batches(epoch=4)
    assert first.batches(epoch=3) != other.batches(epoch=3)


def test_length_and_batch_size_are_honest(config: SamplerConfig):
    sampler = config.build(LABELS, 1)
    batches = sampler.batches(epoch=0)
    assert len(batches) == len(sampler) > 0
    assert {len(batch) for batch in batches} == {sampler.batch_size}
    assert all(0 <= index < len(LABELS) for batch in batches for index in batch)


def test_too_few_images_or_classes_are_refused(config: SamplerConfig):
    with pytest.raises(UserError, match="sampler"):
        config.build(torch.tensor([0, 0, 1, 1]), 1)


def epochs(sampler: Sampler, count: int) -> list[int]:
    return [index for epoch in range(count) for batch in sampler.batches(epoch) for index in batch]


def test_random_shows_every_image_once_an_epoch():
    sampler = SamplerConfig.variants["random"](batch_size=60).build(LABELS, 1)
    assert sorted(epochs(sampler, 1)) == list(range(600))


@pytest.mark.parametrize(("classes", "images"), [(8, 4), (7, 3), (30, 20), (1, 5)])
def test_class_balanced_batches(classes: int, images: int):
    config = SamplerConfig.variants["class_balanced"](classes_per_batch=classes, images_per_class=images)
    sampler = config.build(LABELS, 1)
    for batch in sampler.batches(epoch=0):
        counts = Counter(LABELS[batch].tolist())
        assert len(counts) == classes and set(counts.values()) == {images}
        assert len(set(batch)) == len(batch)


def test_class_balanced_favours_no_class_and_no_image():
    sampler = SamplerConfig.variants["class_balanced"](classes_per_batch=7, images_per_class=3).build(LABELS, 1)
    drawn = epochs(sampler, 1)
    classes = Counter(LABELS[drawn].tolist())
    assert max(classes.values()) - min(classes.values()) <= 3  # one hand of one class
    images = Counter(drawn)
    for label in range(30):
        counts = [images[index] for index in (label == LABELS).nonzero()[:, 0].tolist()]
        assert max(counts) - min(counts) <= 1


def test_a_small_class_repeats_its_images_evenly():
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    sampler = SamplerConfig.variants["class_balanced"](classes_per_batch=2, images_per_class=5).build(labels, 1)
    (batch,) = sampler.batches(epoch=0)
    counts = Counter(index for index in batch if index < 3)
    assert sum(counts.values()) == 5 and set(counts) == {0, 1, 2} and max(counts.values()) == 2
