"""Resizing and crop inside an exported model: the pixels of the transform, for images of any size."""

from typing import Any

import numpy as np
import pytest
import torch

from dmlkit.export.preparation import OPSET, _program, images_program, prepend_preparation
from dmlkit.export.wanted import ModelInput
from dmlkit.model import Normalization
from dmlkit.transforms.base import TransformConfig
from dmlkit.transforms.presets import BNInceptionConfig, CgmlCarsConfig, ImageNetConfig, PlainConfig, PretrainedConfig
from dmlkit.vectors.graphs import onnx_program, traced

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


@pytest.mark.parametrize("takes", ["tracker", "normalized"])
@pytest.mark.parametrize("transform", [ImageNetConfig(size=8, resize=8), BNInceptionConfig(size=8, resize=8)])
def test_floats_of_a_tracker_give_what_bytes_give(takes: ModelInput, transform: TransformConfig):
    onnxruntime: Any = pytest.importorskip("onnxruntime")
    ir: Any = pytest.importorskip("onnxscript").ir
    model = Normalization(transform.mean, transform.std, transform.channels, transform.pixel_max)
    squares = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    program = onnx_program(traced(model, squares), "images").model
    prepend_preparation(program, transform, takes)
    session = onnxruntime.InferenceSession(ir.to_proto(program).SerializeToString())
    assert (session.get_inputs()[0].type, session.get_inputs()[0].shape[1:]) == ("tensor(float)", [3, 8, 8])
    pixels = squares.double().numpy() / 255
    if takes == "normalized":  # as BoxMOT does, by ImageNet's red, green and blue
        for channel, (mean, std) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
            pixels[:, channel] = (pixels[:, channel] - mean) / std
    for count in (1, 5):
        computed = session.run(None, {"images": pixels[:count].astype(np.float32)})[0]
        np.testing.assert_allclose(computed, model(squares[:count]).numpy(), rtol=1e-5, atol=1e-4)
