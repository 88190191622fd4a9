"""The contract of samplers."""

import torch

from dmlkit.errors import UserError
from dmlkit.samplers.base import SamplerConfig
from dmlkit.testing.promise import Promise, expect, expect_refused, hold

SUPER_CLASSES = torch.arange(30) % 3
LABELS = torch.arange(30).repeat_interleave(20)[torch.randperm(600, generator=torch.Generator().manual_seed(0))]


def check_sampler(config: SamplerConfig) -> None:
    """Hold a sampler to its contract: pure in (seed, epoch), honest about its length and its batch size.

    Raises:
        AssertionError: names what is broken.

    Example:
        >>> from dmlkit.samplers import RandomConfig
        >>> check_sampler(RandomConfig())
    """
    hold(SAMPLER, config.name, config)


def batches_depend_on_seed_and_epoch_alone(config: SamplerConfig) -> None:
    """Batches are a function of seed and epoch, whatever was drawn before, and differ for others."""
    first, again, other = (config.build(LABELS, seed, SUPER_CLASSES) for seed in (1, 1, 2))
    again.batches(epoch=7)  # drawing other epochs changes nothing
    expect(first.batches(epoch=3) == again.batches(epoch=3), "the same seed and epoch give other batches")
    expect(first.batches(epoch=3) != first.batches(epoch=4), "another epoch gives the same batches")
    expect(first.batches(epoch=3) != other.batches(epoch=3), "another seed gives the same batches")


def length_and_batch_size_are_honest(config: SamplerConfig) -> None:
    """An epoch has as many batches as it says, each of batch_size images that there are."""
    sampler = config.build(LABELS, 1, SUPER_CLASSES)
    batches = sampler.batches(epoch=0)
    expect(len(batches) == len(sampler) > 0, f"{len(batches)} batches, said {len(sampler)}")
    sizes = {len(batch) for batch in batches}
    expect(sizes == {sampler.batch_size}, f"batches of {sorted(sizes)} images, said {sampler.batch_size}")
    expect(all(0 <= index < len(LABELS) for batch in batches for index in batch), "an image that there is not")


def too_few_images_or_classes_are_refused(config: SamplerConfig) -> None:
    """Four images of two classes raise a UserError that names the sampler."""
    few = torch.tensor([0, 0, 1, 1]), 1, torch.tensor([0, 1])
    expect_refused(lambda: config.build(*few), UserError, "sampler", "4 images of 2 classes")


SAMPLER: tuple[Promise, ...] = (
    batches_depend_on_seed_and_epoch_alone,
    length_and_batch_size_are_honest,
    too_few_images_or_classes_are_refused,
)
