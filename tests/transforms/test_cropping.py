"""Crops and the literature's transforms: torchvision's with the same random numbers, and the PIL pipelines of peers."""

import sys
from collections.abc import Callable

import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.transforms.base import TransformConfig
from dmlkit.transforms.cropping import RandomResizedCrop, SquareCrop
from dmlkit.transforms.presets import HypViTConfig, ImageNetConfig, PlainConfig, PretrainedConfig
from tests.datasets import trees


class Pictures(Dataset):
    """Noise of several shapes."""

    shapes = ((120, 90), (300, 340), (256, 384), (600, 1500), (20, 900), (900, 20))  # no crop fits into the last two

    def __init__(self) -> None:
        super().__init__(torch.tensor([0, 1] * 3), ["one", "two"], [f"{number}.png" for number in range(6)])

    def sample(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, *self.shapes[index]), dtype=torch.uint8, generator=generator)


BICUBIC = v2.InterpolationMode.BICUBIC
CROPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[v2.Transform]]] = {
    "bilinear": (RandomResizedCrop(24, 0.2, flip=True), [v2.RandomResizedCrop(24, (0.2, 1.0))]),
    "bicubic": (
        RandomResizedCrop(24, 0.08, flip=True, interpolation="bicubic"),
        [v2.RandomResizedCrop(24, (0.08, 1.0), interpolation=BICUBIC)],
    ),
    "square": (SquareCrop(24, 32, flip=True), [v2.Resize((32, 32)), v2.RandomCrop(24)]),
}


@pytest.mark.parametrize("name", CROPS)
def test_crops_are_torchvisions(name: str):
    ours, theirs = CROPS[name]
    images, expected = Pictures(), v2.Compose([*theirs, v2.RandomHorizontalFlip()])
    mirrored = 0
    for index in range(6):
        for seed in range(4):
            torch.manual_seed(seed)
            found = ours(images.sample(index))
            torch.manual_seed(seed)
            assert torch.equal(found, expected(images.sample(index)))
            torch.manual_seed(seed)
            mirrored += not torch.equal(found, v2.Compose(theirs)(images.sample(index)))
    assert 0 < mirrored < 24


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("transform", "theirs"),
    [
        (PlainConfig(size=32), [v2.Resize((32, 32))]),
        (ImageNetConfig(size=23, resize=32), [v2.Resize(32), v2.CenterCrop(23)]),
        (
            PretrainedConfig(size=32, resize=37, square=True),
            [v2.Resize((37, 37), interpolation=BICUBIC), v2.CenterCrop(32)],
        ),
        (HypViTConfig(size=24, resize=33), [v2.Resize(33, interpolation=BICUBIC), v2.CenterCrop(24)]),
    ],
)
def test_evaluation_is_torchvisions(transform: TransformConfig, theirs: list[v2.Transform], is_interleaved: bool):
    expected = v2.Compose(theirs)
    for index in range(6):
        image = Pictures().sample(index)
        if is_interleaved:
            image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        assert torch.equal(transform.evaluation()(image), expected(image))


def test_a_model_reads_images_without_torchvision(monkeypatch: pytest.MonkeyPatch):
    """Importing it takes 2 s, of an answer to one photo: tests/vectors/test_operators.py has such a process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.setitem(sys.modules, name, None)
    for transform in (ImageNetConfig(size=8, resize=9).evaluation(), ImageNetConfig(size=8).training()):
        assert transform(torch.ones(3, 12, 12, dtype=torch.uint8)).shape == (3, 8, 8)


PEERS = {
    "bn_inception": transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)]),
    "imagenet": transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)]),
    "cgml_cars": transforms.Compose([transforms.Resize((256, 256)), transforms.CenterCrop(227)]),
    "hyp_vit": transforms.Compose([transforms.Resize(224, BICUBIC), transforms.CenterCrop(224)]),
    "pretrained": transforms.Compose([transforms.Resize(256, BICUBIC), transforms.CenterCrop(224)]),
    "plain": transforms.Compose([transforms.Resize((32, 32))]),
}
TRAINING = {
    "bn_inception": transforms.RandomResizedCrop(224),
    "imagenet": transforms.RandomResizedCrop(224),
    "cgml_cars": transforms.Compose([transforms.Resize((256, 256)), transforms.RandomCrop(227)]),
    "hyp_vit": transforms.RandomResizedCrop(224, scale=(0.2, 1.0), interpolation=BICUBIC),
    "pretrained": transforms.RandomResizedCrop(224, interpolation=BICUBIC),
    "plain": PEERS["plain"],
}


@pytest.mark.parametrize("name", sorted(TransformConfig.variants))
def test_pixels_are_those_of_the_peers(name: str, tmp_path):
    with Image.open(trees.photo(tmp_path / "photo.jpg", 3, side=(500, 375))) as image:
        image.load()
    pixels = transforms.functional.pil_to_tensor(image)
    config = TransformConfig.variants[name]()
    expected = transforms.functional.pil_to_tensor(PEERS[name](image))
    assert (config.evaluation()(pixels).int() - expected.int()).abs().max() <= 2
    torch.manual_seed(5)
    ours = config.training()(pixels)
    torch.manual_seed(5)  # the same crop: both draw it first
    theirs = transforms.functional.pil_to_tensor(TRAINING[name](image))
    flipped = theirs.flip(2)
    difference = min((ours.int() - other.int()).abs().max() for other in (theirs, flipped))
    assert difference <= 2  # rounding of Pillow's and torch's resampling


def test_training_may_have_smaller_crops_than_evaluation():
    pixels = torch.randint(0, 256, (3, 90, 120), dtype=torch.uint8)
    for name in ("imagenet", "pretrained", "bn_inception", "hyp_vit"):
        variant, found = TransformConfig.variants[name], list[torch.Tensor]()
        both, small = variant(size=64, resize=72, training_size=40), variant(size=40, resize=72)
        assert torch.equal(both.evaluation()(pixels), variant(size=64, resize=72).evaluation()(pixels))
        for config in (both, small):
            torch.manual_seed(2)
            found.append(config.training()(pixels))
        assert found[0].shape == (3, 40, 40) and torch.equal(*found)
