"""Tuning of the last blocks: which they are in each network."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmlkit.errors import UserError
from tests.contracts.test_backbones import config

LAST: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
    ("small_cnn", {}, 6, ("layers.17.", "layers.18.")),
    ("resnet18", {}, 8, ("network.layer4.1.",)),
    ("vit", {}, 12, ("network.encoder.layers.encoder_layer_11.", "network.encoder.ln.")),
    ("convnext", {}, 18, ("network.features.7.2.", "network.classifier.0.")),
    ("googlenet", {}, 9, ("network.inception5b.",)),
    ("bn_inception", {}, 10, ("layers.inception_5b_",)),
    ("timm", {"model": "resnet18"}, 8, ("network.layer4.1.",)),
    ("timm", {"model": "vit_tiny_patch16_224"}, 12, ("network.blocks.11.", "network.norm.")),
    ("timm", {"model": "convnext_atto"}, 4, ("network.stages.3.", "network.head.norm.")),
    ("timm", {"model": "swin_tiny_patch4_window7_224"}, 4, ("network.layers.3.", "network.norm.")),
    ("timm", {"model": "efficientnet_b0"}, 7, ("network.blocks.6.", "network.conv_head.", "network.bn2.")),
    ("timm", {"model": "regnetx_002"}, 13, ("network.s4.b7.",)),
]
"""A network, how many blocks it has, and where the parameters of the last are."""


@pytest.fixture(autouse=True)
def without_memory() -> Iterator[None]:
    """Names and what trains are all that counts here: to draw the weights took 0.4 s for each network."""
    with torch.device("meta"):
        yield


@pytest.mark.parametrize(("name", "options", "count", "last"), LAST)
def test_the_last_block_trains_with_what_follows_it(
    name: str, options: dict[str, Any], count: int, last: tuple[str, ...]
):
    backbone = config(name, tuning={"name": "last_blocks"}, **options).build()
    trained = {key for key, parameter in backbone.named_parameters() if parameter.requires_grad}
    assert trained == {key for key, _ in backbone.named_parameters() if key.startswith(last)}
    assert all(any(key.startswith(start) for key in trained) for start in last)
    with pytest.raises(UserError, match=f"backbone.tuning.blocks: got {count + 1}, expected at most {count}, the"):
        config(name, tuning={"name": "last_blocks", "blocks": count + 1}, **options).build()


def test_a_learned_pooling_trains_with_the_last_block():
    pooling = {"name": "gem", "learn": True}
    backbone = config("vit", tuning={"name": "last_blocks"}, pooling=pooling).build()
    assert "pooling.p" in {key for key, parameter in backbone.named_parameters() if parameter.requires_grad}


def test_a_network_without_known_blocks_is_refused():
    with pytest.raises(UserError, match="cannot determine the blocks of VGG"):
        config("timm", model="vgg11", tuning={"name": "last_blocks"}).build()
