"""The contracts of transforms and of augmentations."""

import pickle

import torch
from torch import Tensor

from dmlkit.datasets.glyphs import Glyphs
from dmlkit.loading.inputs import TransformedImages
from dmlkit.testing.promise import Promise, a_line_of_help_says_what_it_is, expect, hold
from dmlkit.transforms.augmentations import AugmentationConfig, ImageTransform
from dmlkit.transforms.base import TransformConfig


def check_transform(config: TransformConfig) -> None:
    """Check a transform against its contract: uint8 squares of the configured size, random only in training.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.transforms import PlainConfig
        >>> check_transform(PlainConfig(size=32))
    """
    hold(TRANSFORM, config.name, config)


def check_augmentation(config: AugmentationConfig) -> None:
    """Check an augmentation against its contract: uint8 images keep their shape, random only by torch's generator.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.transforms.augmentations import RandomErasingConfig
        >>> check_augmentation(RandomErasingConfig(p=1.0))
    """
    hold(AUGMENTATION, config.name, config)


def images_become_squares(config: TransformConfig) -> None:
    """Check that an image of any shape becomes (3, size, size) uint8, in training and in evaluation."""
    for shape in ((3, 300, 200), (3, 32, 32), (3, 17, 500)):
        image = torch.randint(0, 256, shape, dtype=torch.uint8)
        for kind, transform in (("training", config.training()), ("evaluation", config.evaluation())):
            result = transform(image)
            found = f"{kind}: got {tuple(result.shape)} {result.dtype} for shape {shape}"
            expect(result.shape == (3, config.size, config.size) and result.dtype == torch.uint8, found)


def a_flat_image_keeps_its_colour(config: TransformConfig) -> None:
    """Check that in evaluation the center of a single-color image keeps its color."""
    image = torch.tensor([10, 100, 200], dtype=torch.uint8).view(3, 1, 1).expand(3, 60, 80)
    color = config.evaluation()(image)[:, config.size // 2, config.size // 2].tolist()
    expect(color == [10, 100, 200], f"got {color}, expected [10, 100, 200]")


def augmentation_follows_the_draw_alone(config: TransformConfig) -> None:
    """Check that a draw's seed determines its augmentation and that the model's random state is not used."""
    images = TransformedImages(Glyphs(["a", "b"], 4, 32, 0), config, training=True)
    state = torch.get_rng_state()
    first, same, other = (_pixels(images, draw) for draw in ((1, 5), (1, 5), (1, 6)))
    expect(torch.equal(torch.get_rng_state(), state), "it changes the model's random state")
    expect(torch.equal(first, same), "the same draw gives different pixels")
    differs = not torch.equal(first, other)
    expect(differs == config.augments, f"augments is {config.augments}, but another draw differs: {differs}")


def other_processes_can_have_it(config: TransformConfig) -> None:
    """Check that a copy sent to a worker process, as macOS and Windows start them, gives the same pixels."""
    image = torch.arange(3 * 40 * 60).view(3, 40, 60).remainder(256).to(torch.uint8)
    for transform in (config.training(), config.evaluation()):
        _a_copy_gives_the_same_pixels(transform, image)


def _a_copy_gives_the_same_pixels(transform: ImageTransform, image: Tensor) -> None:
    try:
        sent = pickle.loads(pickle.dumps(transform))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise AssertionError(f"cannot be sent to another process: {error}") from error
    pixels: list[Tensor] = []
    for one in (transform, sent):
        torch.manual_seed(0)
        pixels.append(one(image))
    expect(torch.equal(*pixels), "another process gives different pixels")


def images_keep_shape_and_type(config: AugmentationConfig) -> None:
    """Check that an image (3, S, S) uint8 becomes such an image, in memory of its own, and that its input stays."""
    change = config.build()
    for side in (17, 32):
        image = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
        before = image.clone()
        for _ in range(4):
            result = change(image)
            expect(
                result.shape == image.shape and result.dtype == torch.uint8, f"got {tuple(result.shape)} {result.dtype}"
            )
            expect(torch.equal(image, before), "it changes its input")


def random_numbers_come_from_torch(config: AugmentationConfig) -> None:
    """Check that torch's generator determines the result, and that it changes images."""
    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8)
    change, found = config.build(), list[Tensor]()
    for seed in range(20):
        for _ in range(2):
            torch.manual_seed(seed)
            found.append(change(image))
        expect(torch.equal(*found[-2:]), "the same seed gives different pixels")
    expect(not all(torch.equal(one, image) for one in found), "20 seeds leave the image unchanged")


def other_processes_can_have_the_augmentation(config: AugmentationConfig) -> None:
    """Check that a copy sent to a worker process, as macOS and Windows start them, gives the same pixels."""
    _a_copy_gives_the_same_pixels(config.build(), torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8))


def _pixels(images: TransformedImages, draw: tuple[int, int]) -> Tensor:
    image = images[draw][0]
    if not isinstance(image, Tensor):
        raise AssertionError(f"got {type(image).__name__}, not a tensor")
    return image


TRANSFORM: tuple[Promise, ...] = (
    images_become_squares,
    a_flat_image_keeps_its_colour,
    augmentation_follows_the_draw_alone,
    other_processes_can_have_it,
)

AUGMENTATION: tuple[Promise, ...] = (
    images_keep_shape_and_type,
    random_numbers_come_from_torch,
    other_processes_can_have_the_augmentation,
    a_line_of_help_says_what_it_is,
)
"""Each takes an augmentation configuration."""
