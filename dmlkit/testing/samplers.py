"""The contract of samplers."""

import torch

from dmlkit.errors import UserError
from dmlkit.samplers.base import SamplerConfig
from dmlkit.testing.promise import Promise, expect, expect_refused, hold

SUPER_CLASSES = torch.arange(30) % 3
LABELS = torch.arange(30).repeat_interleave(20)[torch.randperm(600, generator=torch.Generator().manual_seed(0))]


def check_sampler(config: SamplerConfig) -> None:
    """Check a sampler against its contract: pure in (seed, epoch), with the reported length and batch size.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.samplers import Random
        >>> check_sampler(Random.Config())
    """
    hold(SAMPLER, config.name, config)


def batches_depend_on_seed_and_epoch_alone(config: SamplerConfig) -> None:
    """Check that batches depend only on seed and epoch, not on earlier draws, and differ for others."""
    first, again, other = (config.build(LABELS, seed, SUPER_CLASSES) for seed in (1, 1, 2))
    again.batches(epoch=7)  # drawing other epochs changes nothing
    expect(first.batches(epoch=3) == again.batches(epoch=3), "the same seed and epoch give other batches")
    expect(first.batches(epoch=3) != first.batches(epoch=4), "another epoch gives the same batches")
    expect(first.batches(epoch=3) != other.batches(epoch=3), "another seed gives the same batches")


def length_and_batch_size_are_honest(config: SamplerConfig) -> None:
    """Check that an epoch has len(sampler) batches, each of batch_size valid indices."""
    sampler = config.build(LABELS, 1, SUPER_CLASSES)
    batches = sampler.batches(epoch=0)
    expect(len(batches) == len(sampler) > 0, f"got {len(batches)} batches, expected {len(sampler)}")
    sizes = {len(batch) for batch in batches}
    expect(sizes == {sampler.batch_size}, f"got batches of {sorted(sizes)} images, expected {sampler.batch_size}")
    expect(all(0 <= index < len(LABELS) for batch in batches for index in batch), "an index is out of range")


def too_few_images_or_classes_are_refused(config: SamplerConfig) -> None:
    """Check that four images of two classes raise a UserError that names the sampler."""
    few = torch.tensor([0, 0, 1, 1]), 1, torch.tensor([0, 1])
    expect_refused(lambda: config.build(*few), UserError, "sampler", "4 images of 2 classes")


SAMPLER: tuple[Promise, ...] = (
    batches_depend_on_seed_and_epoch_alone,
    length_and_batch_size_are_honest,
    too_few_images_or_classes_are_refused,
)
