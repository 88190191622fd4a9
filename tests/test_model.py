"""Normalization: the published arithmetic for each named transform, also when exported."""

import numpy as np
import pytest
import torch

from dmlkit.model import Normalization
from dmlkit.transforms.base import TransformConfig

IMAGES = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def published(name: str) -> np.ndarray:
    """As the peers' code does it: float pixels, channel order, range, mean and standard deviation one after another."""
    pixels = IMAGES.numpy().astype(np.float64)
    if name == "bn_inception":
        return pixels[:, ::-1] - np.array([104, 117, 128]).reshape(3, 1, 1)
    mean, std = {
        "imagenet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        "cgml_cars": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        "pretrained": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        "hyp_vit": ([0.5] * 3, [0.5] * 3),
        "plain": ([0.5] * 3, [0.5] * 3),
    }[name]
    return (pixels / 255 - np.array(mean).reshape(3, 1, 1)) / np.array(std).reshape(3, 1, 1)


@pytest.mark.parametrize("name", sorted(TransformConfig.variants))
def test_inputs_are_normalized_as_published(name: str):
    config = TransformConfig.variants[name]()
    layer = Normalization(config.mean, config.std, config.channels, config.pixel_max)
    torch.testing.assert_close(layer(IMAGES).double(), torch.from_numpy(published(name).copy()), rtol=1e-5, atol=1e-5)


def test_bgr_input_survives_export():
    config = TransformConfig.variants["bn_inception"]()
    layer = Normalization(config.mean, config.std, config.channels, config.pixel_max)
    program = torch.export.export(layer, (IMAGES,), dynamic_shapes={"images": {0: torch.export.Dim("batch", min=1)}})
    assert torch.equal(program.module()(IMAGES[:1]), layer(IMAGES[:1]))
