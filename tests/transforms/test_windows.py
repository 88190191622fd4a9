"""Augmentation on the device, beside torch's own resizing and beside the loader's."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import interpolate

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.loading.batches import make_loader
from dmlkit.loading.inputs import TransformedImages
from dmlkit.transforms.base import TransformConfig
from dmlkit.transforms.cropping import (
    Cut,
    Interpolation,
    WindowTransform,
    collate_cuts,
    resizing_matrix,
    show_cuts,
)

SIZE = 24
PLANS = (  # height, width, resized to, from row and column on, mirrored
    (60, 80, SIZE, SIZE, 0, 0, 0),  # smaller
    (13, 9, SIZE, SIZE, 0, 0, 1),  # larger
    (7, 90, SIZE, SIZE, 0, 0, 1),  # one way and the other
    (SIZE, SIZE, SIZE, SIZE, 0, 0, 0),  # as it is
    (70, 50, 32, 40, 8, 3, 0),  # a part of what it becomes
    (1, 1, 32, 40, 0, 16, 1),
)
AUGMENTING = sorted(name for name, config in TransformConfig.variants.items() if config().augments)


class Pictures(Dataset):
    """Noise of several shapes, one of them too large to be sent as it is."""

    shapes = ((120, 90), (300, 340), (256, 384), (600, 1500))

    def __init__(self) -> None:
        super().__init__(torch.tensor([0, 1, 0, 1]), ["one", "two"], [f"{number}.png" for number in range(4)])

    def sample(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, (3, *self.shapes[index]), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_matrix_products_resize_as_torch_does(interpolation: Interpolation):
    torch.manual_seed(0)
    boxes = [torch.randint(0, 256, (3, plan[0], plan[1]), dtype=torch.uint8) for plan in PLANS]
    pixels, plans = collate_cuts([Cut(box, plan) for box, plan in zip(boxes, PLANS, strict=True)])
    found = show_cuts(pixels, plans, SIZE, interpolation)
    for box, plan, image in zip(boxes, PLANS, found, strict=True):
        _, _, height, width, top, left, mirrored = plan
        narrow = interpolate(box[None].double(), (plan[0], width), mode=interpolation, antialias=True)
        narrow = narrow.round().clamp(0, 255)
        whole = interpolate(narrow, (height, width), mode=interpolation, antialias=True)[0].clamp(0, 255)
        square = whole[:, top : top + SIZE, left : left + SIZE]
        expected = square.flip(2) if mirrored else square
        difference = (image.double() - expected).abs()
        assert difference.max() <= 1.5  # a half rounded up in one and down in the other, then rounded again
        assert (difference <= 0.501).double().mean() > 0.95


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("length", "resized", "offset"), [(40, 24, 0), (9, 24, 0), (24, 24, 0), (70, 40, 16), (1, 30, 6)]
)
def test_the_matrix_is_torchs_resizing_of_the_unit_matrix(
    length: int, resized: int, offset: int, interpolation: Interpolation
):
    unit = torch.eye(length, dtype=torch.float64)[None, None]
    expected = interpolate(unit, (resized, length), mode=interpolation, antialias=True)[0, 0, offset : offset + SIZE]
    line = [torch.tensor([number]) for number in (length, resized, offset)]
    found = resizing_matrix(*line, SIZE, length + 3, interpolation)[0]
    assert found[:, length:].eq(0).all()
    torch.testing.assert_close(found[:, :length].double(), expected, rtol=0, atol=2e-6)


def test_the_device_is_asked_for_no_value():
    images = show_cuts(
        torch.empty(2, 3, 30, 40, dtype=torch.uint8, device="meta"),
        torch.empty(2, 7, dtype=torch.int64, device="meta"),
        SIZE,
        "bicubic",
    )
    assert images.shape == (2, 3, SIZE, SIZE) and images.dtype == torch.uint8


@pytest.mark.parametrize("name", AUGMENTING)
def test_the_device_shows_what_the_loader_shows(name: str):
    transform = TransformConfig.variants[name]()
    draws = [[(index, 7 * step + index) for index in range(4)] for step in range(6)]
    squares, cuts = (
        TransformedImages(Pictures(), transform, training=True, on_device=on_device) for on_device in (False, True)
    )
    loaders = [make_loader(images, draws, workers=0, pin_memory=False) for images in (squares, cuts)]
    limit = 2 * transform.size
    shown_by_loader = 0
    for square, cut in zip(*loaders, strict=True):
        shown = cuts.on_device(cut, torch.device("cpu"))
        assert square.plans is None and cut.plans is not None
        assert max(cut.inputs.shape[2:]) <= limit
        assert torch.equal(cut.labels, square.labels) and torch.equal(cut.indices, square.indices)
        difference = (shown.int() - square.inputs.int()).abs().amax((1, 2, 3))
        assert difference.max() <= 2
        whole = (cut.plans == torch.tensor([transform.size] * 4 + [0] * 3)).all(1)
        assert torch.equal(square.inputs[whole], shown[whole])
        shown_by_loader += int(whole.sum())
    assert 0 < shown_by_loader < 12  # boxes too large to be sent


def test_a_run_is_the_same_within_rounding(dmlkit, tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sets = [
        "--set",
        "training.epochs=1",
        "--set",
        "training.augment_on=device",
        "--set",
        "transform={name: imagenet, size: 16, resize: 16}",
    ]
    losses = []
    for on_device in (False, True):
        if on_device:  # a CPU would leave it to the loader
            monkeypatch.setattr(sys.modules["dmlkit.loading.inputs"], "TransformedImages", ForcedOnDevice)
        run = tmp_path / f"run-{on_device}"
        result = dmlkit("train", tiny_recipe, "-o", run, "--device", "cpu", *sets)
        assert result.code == 0, result.err
        losses.append(json.loads((run / "metrics.jsonl").read_text())["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.005)
    assert losses[1] != losses[0]  # it rounds elsewhere


class ForcedOnDevice(TransformedImages):
    def __init__(
        self, dataset: Dataset, transform: TransformConfig, *, training: bool, on_device: bool, draft: bool
    ) -> None:
        assert not on_device and not draft
        super().__init__(dataset, transform, training=training, on_device=training)
        assert isinstance(self.windows, WindowTransform) == training
