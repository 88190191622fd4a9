"""Every sampler: pure in (seed, epoch), honest about its length and its batch size."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dmlkit.samplers.base import Sampler, SamplerConfig
from dmlkit.testing import check_sampler
from dmlkit.testing.steps import LABELS, SUPER_CLASSES
from tests.conftest import refuses


@pytest.mark.parametrize("name", sorted(SamplerConfig.variants))
def test_contract(name: str):
    check_sampler(SamplerConfig.variants[name]())


def test_four_images_are_enough_for_a_batch_of_four():
    check_sampler(SamplerConfig.variants["random"](batch_size=2))
    check_sampler(SamplerConfig.variants["class_balanced"](classes_per_batch=2, images_per_class=2))


def epochs(sampler: Sampler, count: int) -> list[int]:
    return [index for epoch in range(count) for batch in sampler.batches(epoch) for index in batch]


def test_random_shows_every_image_once_an_epoch():
    sampler = SamplerConfig.variants["random"](batch_size=60).build(LABELS, 1)
    assert sorted(epochs(sampler, 1)) == list(range(600))


@example(sizes=[2, 3, 9, 9, 8, 9], classes=4, images=5, seed=1)  # a card left over, then a round, then a third of it
@given(st.lists(st.integers(1, 9), min_size=6, max_size=12), st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_class_balanced_promises_hold_for_any_class_sizes(sizes: list[int], classes: int, images: int, seed: int):
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    config = SamplerConfig.variants["class_balanced"](classes_per_batch=classes, images_per_class=images)
    sampler = config.build(labels, seed)
    batches = sampler.batches(epoch=1)
    assert len(batches) == len(sampler) == max(1, len(labels) // (classes * images))
    hands = Counter(label for batch in batches for label in labels[batch][::images].tolist())
    assert max(hands.values()) - min(hands[label] for label in range(len(sizes))) <= 1
    drawn = Counter(index for batch in batches for index in batch)
    for label in range(len(sizes)):
        counts = [drawn[index] for index in (labels == label).nonzero()[:, 0].tolist()]
        assert max(counts) - min(counts) <= 1
    for batch in batches:
        assert len(batch) == classes * images and len(labels[batch].unique()) == classes
        for start in range(0, len(batch), images):
            hand = Counter(batch[start : start + images])
            assert len(set(labels[list(hand)].tolist())) == 1
            assert max(hand.values()) <= -(-images // sizes[int(labels[batch[start]])])


def test_hierarchical_batches_hold_classes_of_few_super_classes():
    config = SamplerConfig.variants["hierarchical"](
        super_classes_per_batch=2, classes_per_super_class=3, images_per_class=4
    )
    sampler = config.build(LABELS, 1, SUPER_CLASSES)
    batches = sampler.batches(epoch=0)
    assert len(batches) == len(sampler) == 600 // 24
    for batch in batches:
        classes = Counter(LABELS[batch].tolist())
        assert len(classes) == 6 and set(classes.values()) == {4} and len(set(batch)) == 24
        assert sorted(Counter(label % 3 for label in classes).values()) == [3, 3]
    kinds = Counter(label % 3 for batch in batches for label in LABELS[batch].tolist())
    assert max(kinds.values()) - min(kinds.values()) <= 12  # one hand of one super-class


@pytest.mark.parametrize("name", ["random", "weighted"])
def test_all_images_may_fill_one_batch(name: str):
    labels = torch.arange(4) // 2
    assert len(SamplerConfig.variants[name](batch_size=4).build(labels, 1)) == 1
    refuses("at most the 4 training images, got 5", SamplerConfig.variants[name](batch_size=5).build, labels, 1)


def test_weighted_draws_the_last_image_where_the_sum_of_weights_rounds_below_1(monkeypatch: pytest.MonkeyPatch):
    largest = np.nextafter(1.0, 0.0)  # of what a generator draws
    count = next(n for n in range(1, 999) if np.cumsum(np.full(n, 1 / n))[-1] < largest)
    sampler = SamplerConfig.variants["weighted"](batch_size=1).build(torch.zeros(count, dtype=torch.long), 1)
    draws = SimpleNamespace(random=lambda shape: np.full(shape, largest))
    monkeypatch.setattr(sampler, "generator", lambda epoch: draws)
    assert sampler.batches(0) == [[count - 1]] * count


def test_hierarchical_takes_super_classes_that_are_just_large_enough():
    options = {"super_classes_per_batch": 3, "classes_per_super_class": 2, "images_per_class": 4}
    config = SamplerConfig.variants["hierarchical"](**options)
    labels, super_classes = torch.arange(14) // 2, torch.tensor([0, 0, 0, 1, 1, 2, 2])
    (batch,) = config.build(labels, 1, super_classes).batches(0)  # 24 images of the 14 that there are
    assert len(batch) == 24 and Counter(super_classes[labels[batch].unique()].tolist()) == {0: 2, 1: 2, 2: 2}
    fewer = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    refuses("at most the 1 classes of the smallest super-class, got 2", config.build, labels, 1, fewer)
    refuses("needs a dataset with super-classes", config.build, labels, 1, None)
    refuses("at most the 2 super-classes of the dataset, got 3", config.build, labels, 1, fewer.clamp(max=1))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_weighted_draws_follow_the_class_sizes(power: float):
    sizes = torch.tensor([400, 100, 25])
    labels = torch.arange(3).repeat_interleave(sizes)
    sampler = SamplerConfig.variants["weighted"](batch_size=105, power=power).build(labels, 1)
    drawn = torch.bincount(labels[epochs(sampler, 40)], minlength=3).double()
    expected = sizes.double() ** (1 - power)
    expected *= drawn.sum() / expected.sum()
    # 21 000 draws: five standard deviations of a binomial count
    assert ((drawn - expected).abs() < 5 * expected.sqrt()).all()


@settings(max_examples=30)
@given(images=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_images_of_a_class_are_of_groups_apart(images: int, seed: int):
    """20 images of each class, of 3 to 6 groups; all groups are shown equally often, and all images of one."""
    groups = torch.arange(600) * 7919 % (3 + LABELS % 4)
    config = SamplerConfig.variants["class_balanced"](classes_per_batch=10, images_per_class=images, apart="group")
    sampler = config.build(LABELS, seed, None, groups)
    shown = Counter[tuple[int, int]]()
    for batch in sampler.batches(epoch=0):
        pairs = list(zip(LABELS[batch].tolist(), groups[batch].tolist(), strict=True))
        assert len(set(pairs)) == len(batch)
        shown.update(pairs)
    for label in range(30):
        counts = [shown[label, group] for group in groups[label == LABELS].unique().tolist()]
        assert max(counts) - min(counts) <= 1
    assert sampler.batches(epoch=2) == config.build(LABELS, seed, None, groups).batches(epoch=2)
    ignored = config.model_copy(update={"apart": None})
    assert ignored.build(LABELS, seed, None, groups).batches(0) == ignored.build(LABELS, seed).batches(0)


def test_too_few_groups_are_told():
    config = SamplerConfig.variants["class_balanced"](classes_per_batch=2, images_per_class=2, apart="group")
    refuses(r"sampler\.apart: the dataset has no groups; use a table", config.build, LABELS, 1)
    groups = torch.where(LABELS < 3, LABELS, torch.arange(600))
    message = r"sampler\.apart: 3 of 30 training classes have images from fewer than 2 groups"
    refuses(message, config.build, LABELS, 1, None, groups)
