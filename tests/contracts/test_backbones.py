"""Every backbone: features of one image do not depend on the others, frozen parts stay as they are, files load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmlkit.backbones.base import BackboneConfig
from dmlkit.pooling import PoolingConfig
from dmlkit.testing.networks import (
    check_backbone,
    expect_frozen,
    expect_pooled,
    features_are_of_one_image_each,
    frozen_epochs_have_no_gradients,
)
from dmlkit.testing.promise import hold

pytestmark = pytest.mark.usefixtures("shallow")
OPTIONS: dict[str, dict[str, Any]] = {"vit": {"image_size": 64, "variant": "b_32"}, "timm": {"model": "resnet18"}}
"""What members need beside their defaults."""
OF_IMAGES = {name for name, variant in BackboneConfig.variants.items() if variant.sample == "image"}
WITH_POOLING = sorted(OF_IMAGES - {"small_cnn", "resnet50", "resnet101"})
BATCH_NORM = ("small_cnn", "resnet18", "bn_inception", "googlenet", "timm")


def config(name: str, **options: Any) -> BackboneConfig:
    return BackboneConfig.variants[name](**OPTIONS.get(name, {}) | options)


@pytest.mark.parametrize("name", sorted(set(BackboneConfig.variants) - {"resnet101"}))
def test_features_are_of_one_image_each(name: str):
    hold([features_are_of_one_image_each], name, config(name))


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 8), ("resnet50", 16), ("resnet101", 33)])
def test_resnets_have_the_blocks_of_the_paper(name: str, blocks: int):
    """He et al., CVPR 2016, table 1; on a device without memory, as to draw the weights of the largest takes 1 s."""
    with torch.device("meta"):
        backbone = config(name).build()
    assert len(backbone.blocks()) == blocks
    assert backbone(torch.empty(2, 3, 64, 64, device="meta")).shape == (2, 512 if name == "resnet18" else 2048)


# One code for all, tested on the smallest; of the others one alone shows that their batch norms are found.
FROZEN = {("small_cnn", statistics, affine) for statistics in (False, True) for affine in (False, True)}
FROZEN |= {(name, number % 2 == 0, number % 2 == 1) for number, name in enumerate(BATCH_NORM[1:])}


@pytest.mark.parametrize(("name", "statistics", "affine"), sorted(FROZEN))
def test_batch_norm_statistics_and_affine_freeze_apart(name: str, statistics: bool, affine: bool):
    assert any(isinstance(module, nn.BatchNorm2d) for module in config(name).build().modules())
    hold([expect_frozen], name, config(name), statistics, affine)


def test_a_backbone_is_frozen_for_its_first_epochs():
    hold([frozen_epochs_have_no_gradients], "small_cnn", config("small_cnn", width=4))


def test_a_backbone_of_vectors_keeps_the_whole_contract():
    check_backbone(config("identity"))


@pytest.mark.parametrize("name", WITH_POOLING)
def test_weights_load_from_files_in_their_usual_wrappings(name: str, tmp_path: Path):
    torch.manual_seed(0)
    source = config(name).build().eval()
    inner = source.layers if name == "bn_inception" else source.network
    tensors = dict(inner.state_dict())
    wrapped = {"state_dict": {f"module.model.{key}": value for key, value in tensors.items()}, "epoch": 3}
    wrapped["state_dict"] |= {"module.criterion.weight": torch.zeros(2), "module.model.fc.weight": torch.zeros(5, 2)}
    torch.save(wrapped, tmp_path / "weights.pth.tar")
    torch.manual_seed(1)
    loaded = config(name, weights=str(tmp_path / "weights.pth.tar")).build().eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(images), source(images))


@pytest.mark.parametrize("name", WITH_POOLING)
def test_a_pooling_fits_and_its_weights_come_after_those_of_the_network(name: str):
    """Their order is that of the optimizer's state in checkpoints."""
    backbone = config(name, pooling=PoolingConfig.variants["gem"](learn=True)).build().eval()
    *others, last = (key for key, _ in backbone.named_parameters())
    assert "pool" in last and not any("pool.p" in key or "pooling" in key for key in others)
    with torch.no_grad():
        assert backbone(torch.randn(1, 3, 64, 64)).shape == (1, backbone.num_features)


@pytest.mark.parametrize("pooling", sorted(set(PoolingConfig.variants) - {"cls"}))
def test_every_pooling_fits(pooling: str):
    hold([expect_pooled], "resnet18", config("resnet18"), PoolingConfig.variants[pooling]())
