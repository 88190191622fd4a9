"""Resizing and crop inside an exported model: the pixels of the transform, for images of any size."""

from typing import Any

import numpy as np
import pytest
import torch

from dmlkit.export.preparation import OPSET, _program, images_program  # pyright: ignore[reportPrivateUsage]
from dmlkit.transforms.base import TransformConfig
from dmlkit.transforms.presets import CgmlCarsConfig, ImageNetConfig, PlainConfig, PretrainedConfig

SIZES = ((301, 517), (90, 60), (333, 100), (48, 48), (1, 1), (2, 70), (31, 29), (257, 1001))


TRANSFORMS = (
    ImageNetConfig(size=32, resize=37),
    PretrainedConfig(size=33, resize=48),
    PretrainedConfig(size=32, resize=32, square=True),
    *(PretrainedConfig(size=size, resize=size) for size in (47, 48, 56)),  # no crop of the shorter side
    CgmlCarsConfig(size=29, resize=36),
    PlainConfig(size=16),
)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.resizing.text)
def test_a_program_of_torch_gives_the_pixels_of_the_transform(transform: TransformConfig):
    prepare, random = transform.evaluation(), torch.Generator().manual_seed(0)
    program = images_program(torch.nn.Identity(), transform).module()
    for height, width in SIZES:
        images = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=random)
        expected = torch.stack([prepare(image.permute(2, 0, 1)) for image in images])
        assert torch.equal(program(images), expected), (height, width)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.resizing.text)
def test_the_pixels_equal_those_of_the_transform(transform: TransformConfig):
    onnx: Any = pytest.importorskip("onnx")
    onnxruntime: Any = pytest.importorskip("onnxruntime")
    model = onnx.parser.parse_model(_program(transform.size, transform.resizing))
    assert model.opset_import[0].version == OPSET
    session, random = onnxruntime.InferenceSession(model.SerializeToString()), np.random.default_rng(0)
    prepare = transform.evaluation()
    for height, width in SIZES:
        images = random.integers(0, 256, (2, height, width, 3), dtype=np.uint8)
        images[1] = 255 * (images[1] > 127)  # extremes, at which a cubic overshoots
        expected = [prepare(torch.from_numpy(image).permute(2, 0, 1)).numpy() for image in images]
        np.testing.assert_array_equal(session.run(None, {"images": images})[0], expected)
