"""The bound on what becomes of an image when it is resized."""

from itertools import product
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from dmlkit.loading.inputs import TransformedImages, check_resized
from dmlkit.transforms.base import Resizing, TransformConfig
from dmlkit.vectors.images import ImageList

IMAGENET = TransformConfig.variants["imagenet"]


@pytest.mark.parametrize("resizing", [Resizing(31), Resizing(31, square=True)])
def test_sizes_are_torchvisions(resizing: Resizing):
    resize = v2.Resize((resizing.side,) * 2 if resizing.square else resizing.side)
    for height, width in product((1, 7, 30, 31, 32, 100), repeat=2):
        assert resizing.size_of(height, width) == resize(torch.zeros(3, height, width, dtype=torch.uint8)).shape[1:]


@pytest.mark.parametrize("shape", [(60_000, 2), (1, 65_000)])
@pytest.mark.parametrize("training", [False, True])
def test_a_long_thin_image_is_a_bad_one_before_it_is_resized_s3(shape: tuple[int, int], training: bool, tmp_path: Path):
    """196 bytes that would take 6 GB, and one of 65 000 pixels that would ask for 12 GB."""
    path = tmp_path / "thin.png"
    Image.new("1", shape).save(path)
    images = ImageList([str(path)])
    long = 256 * max(shape) // min(shape)
    told = f"{path}: the image of {shape[0]} x {shape[1]} pixels would have {max(256, long * (shape[0] > 9))} x "
    item = TransformedImages(images, IMAGENET(), training=training)[0, 0]
    assert item.input is None and item.fault.startswith(told), item.fault
    assert "resized to a shorter side of 256 pixels, bilinear; expected at most 80,000,000" in item.fault


def test_a_square_takes_any_shape():
    check_resized(torch.zeros(3, 1, 9).expand(3, 60_000, 9), Resizing(256, square=True), "thin.png")
    check_resized(torch.zeros(3, 1, 9).expand(3, 2_700, 9), Resizing(256), "thin.png")
