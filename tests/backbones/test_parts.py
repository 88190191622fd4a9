"""A backbone in two parts: together they compute what the whole computes, forward and backward."""

from typing import Any

import pytest
import torch

from dmlkit.backbones.parts import FirstBlocks, LastBlocks
from tests.conftest import refuses
from tests.contracts.conftest import shallow  # noqa: F401
from tests.contracts.test_backbones import config

pytest.importorskip("timm", reason="the extra dmlkit[timm] is not installed")
FEW = {"depths": (2, 2), "num_heads": (3, 6)}
NETWORKS: list[tuple[str, dict[str, Any], int, int]] = [
    ("small_cnn", {"width": 4}, 16, 2),
    ("resnet18", {}, 32, 3),
    ("vit", {"image_size": 32, "variant": "b_32"}, 32, 1),
    ("convnext", {}, 32, 2),
    ("timm", {"model": "test_vit", "image_size": 32}, 32, 2),
    ("timm", {"model": "eva02_tiny_patch14_224", "image_size": 28}, 28, 2),  # with rotary position embeddings
    ("timm", {"model": "convnext_atto"}, 32, 1),
    ("timm", {"model": "swin_tiny_patch4_window7_224", "arguments": FEW}, 224, 1),
    ("timm", {"model": "tf_efficientnet_lite0", "pooling": {"name": "gem", "learn": True}}, 32, 2),
    ("timm", {"model": "regnetx_002"}, 32, 4),
]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize(("name", "options", "size", "blocks"), NETWORKS)
def test_the_parts_of_a_backbone_equal_the_whole(name: str, options: dict[str, Any], size: int, blocks: int):
    torch.manual_seed(0)
    tuning = {"name": "last_blocks", "blocks": blocks}
    whole = config(name, tuning=tuning, **options).build().to(memory_format=torch.channels_last)
    first, images = FirstBlocks(whole, blocks, (size,)), torch.rand(4, 3, size, size)
    whole.train()
    first.check()
    assert any(module.training for module in whole.modules())  # as before
    assert not torch.equal(first(images)[0], first(images)[1])
    whole.eval()
    tuned = whole.tuned_parameters()
    gradients: list[tuple[torch.Tensor, ...]] = []
    for features in (whole(images), LastBlocks(first)(first(images).detach())):
        gradients.append((features, *torch.autograd.grad(features.square().sum(), tuned, allow_unused=True)))
    for one, other in zip(*gradients, strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["small_cnn", "resnet18"])
def test_the_parts_take_images_of_two_sizes(name: str):
    whole = config(name, tuning={"name": "last_blocks", "blocks": 2}).build().eval()
    first = FirstBlocks(whole, 2, (48, 32))
    with torch.no_grad():
        for side in (32, 48):
            images = torch.rand(2, 3, side, side)
            rows = first(images)
            assert torch.allclose(LastBlocks(first)(rows), whole(images), rtol=1e-4, atol=1e-6)
            assert (rows.shape[1] == first.num_features) == (side == 48)


@pytest.mark.parametrize("blocks", [1, 4])
def test_blocks_that_read_more_than_one_map_are_refused(blocks: int):
    whole = config("bn_inception", tuning={"name": "last_blocks", "blocks": blocks}).build()
    refuses("read more than one map", FirstBlocks(whole, blocks, (64,)).check)
