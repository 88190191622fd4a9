"""The literature's transforms against the PIL pipelines of the peers' code."""

import pytest
import torch
from PIL import Image
from torchvision import transforms

from dmlkit.transforms.base import TransformConfig
from tests.datasets import trees

BILINEAR, BICUBIC = transforms.InterpolationMode.BILINEAR, transforms.InterpolationMode.BICUBIC
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


def test_every_transform_has_its_peer():
    assert set(PEERS) == set(TRAINING) == set(TransformConfig.variants)


@pytest.mark.parametrize("name", sorted(TransformConfig.variants))
def test_pixels_are_those_of_the_peers(name: str, tmp_path):
    with Image.open(trees.photo(tmp_path / "photo.jpg", 3, side=(500, 375))) as image:
        image.load()
    pixels = transforms.functional.pil_to_tensor(image)
    config = TransformConfig.variants[name]()
    pairs = [(config.evaluation()(pixels), PEERS[name](image))]
    torch.manual_seed(5)
    ours = config.training()(pixels)
    torch.manual_seed(5)  # the same crop: both draw it first
    theirs = transforms.functional.pil_to_tensor(TRAINING[name](image))
    flipped = theirs.flip(2)
    difference = min((ours.int() - other.int()).abs().max() for other in (theirs, flipped))
    assert difference <= 2  # rounding of Pillow's and torch's resampling
    for found, expected in pairs:
        assert (found.int() - transforms.functional.pil_to_tensor(expected).int()).abs().max() <= 2
