import pytest
import torch

from dmlkit.samplers import Paired


def test_halves_hold_the_same_classes_in_the_same_order():
    labels = torch.arange(600) % 20
    sampler = Paired(labels, seed=1, classes_per_batch=5, images_per_class=4)
    for batch in sampler.batches(epoch=0):
        first, second = labels[batch].chunk(2)
        assert len(batch) == sampler.batch_size == 40
        assert torch.equal(first, second)
        assert torch.equal(first, first[::4].repeat_interleave(4))
        assert first.unique().numel() == 5
        assert len(set(batch)) == 40


def test_small_classes_repeat_images_but_stay_aligned():
    labels = torch.tensor([0, 0, 0, 1, 1, 1])
    (batch,) = Paired(labels, seed=0, classes_per_batch=2, images_per_class=2).batches(epoch=0)
    first, second = labels[batch].chunk(2)
    assert torch.equal(first, second)
    assert set(batch) == set(range(6))


@pytest.mark.parametrize("images", [2, 5, 13, 19])
def test_no_image_stands_beside_itself(images: int):
    labels = torch.arange(6 * images) // images
    for batch in Paired(labels, seed=0, classes_per_batch=6, images_per_class=10).batches(epoch=0):
        first, second = batch[: len(batch) // 2], batch[len(batch) // 2 :]
        assert all(one != other for one, other in zip(first, second, strict=True))
        for start in range(0, len(first), 10):
            assert len({*first[start : start + 10]} & {*second[start : start + 10]}) <= 1


def test_defaults_are_those_of_cgml():
    assert Paired.Config().build(torch.arange(520) // 40, seed=0).batch_size == 2 * 13 * 10
