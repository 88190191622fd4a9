"""Every backbone: features of one image do not depend on the others, frozen parts stay as they are, files load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dmlkit.backbones.base import BackboneConfig
from dmlkit.errors import UserError
from dmlkit.pooling.base import PoolingConfig

OPTIONS: dict[str, dict[str, Any]] = {"vit": {"image_size": 64, "variant": "b_32"}, "timm": {"model": "resnet18"}}
"""What members need beside their defaults."""
OF_IMAGES = {name for name, variant in BackboneConfig.variants.items() if variant.sample == "image"}
BATCH_NORM = ("small_cnn", "resnet18", "bn_inception", "googlenet", "timm")


def config(name: str, **options: Any) -> BackboneConfig:
    return BackboneConfig.variants[name](**OPTIONS.get(name, {}) | options)


@pytest.mark.parametrize("name", sorted(OF_IMAGES))
def test_features_are_of_one_image_each(name: str):
    torch.manual_seed(0)
    backbone = config(name).build().double().eval()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        together = backbone(images)
        alone = torch.cat([backbone(image[None]) for image in images])
    assert together.shape == (2, backbone.num_features) and together.isfinite().all()
    torch.testing.assert_close(together, alone, atol=1e-9, rtol=1e-9)
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("name", BATCH_NORM)
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_statistics_and_affine_freeze_apart(name: str, statistics: bool, affine: bool):
    torch.manual_seed(0)
    backbone = config(name, freeze_batchnorm_statistics=statistics, freeze_batchnorm_affine=affine).build().train()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.running_mean.clone() for norm in norms]
    backbone(torch.randn(4, 3, 64, 64) + 1).square().sum().backward()
    means = [torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True)]
    assert norms and means == [statistics] * len(norms)
    trained = [norm.weight.grad is not None and bool(norm.weight.grad.any()) for norm in norms]
    assert not any(trained) if affine else any(trained)  # some of timm's start at 0, where gradients vanish
    assert all(parameter.grad is not None for parameter in backbone.parameters() if parameter.requires_grad)


def test_a_backbone_is_frozen_for_its_first_epochs():
    backbone = config("small_cnn", width=4, freeze_epochs=2).build()
    for epoch, is_frozen in ((0, True), (1, True), (2, False), (3, False)):
        assert backbone.set_epoch(epoch) == (epoch in (0, 2))
        features = backbone(torch.randn(2, 3, 16, 16))
        assert features.requires_grad != is_frozen
        assert all(parameter.requires_grad != is_frozen for parameter in backbone.parameters())


@pytest.mark.parametrize("name", sorted(OF_IMAGES - {"small_cnn", "resnet101"}))
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
    first = next(iter(tensors))
    torch.save({key: value for key, value in tensors.items() if key != first}, tmp_path / "less.pth")
    with pytest.raises(UserError, match=f"lacks 1 of .* tensors of this backbone, first {first}"):
        config(name, weights=str(tmp_path / "less.pth")).build()


CONVOLUTIONAL = sorted(OF_IMAGES - {"small_cnn", "resnet50", "resnet101"})


@pytest.mark.parametrize("name", CONVOLUTIONAL)
@pytest.mark.parametrize("pooling", sorted(set(PoolingConfig.variants) - {"cls"}))
def test_every_pooling_goes_with_every_backbone(name: str, pooling: str):
    torch.manual_seed(0)
    backbone = config(name, pooling=PoolingConfig.variants[pooling]()).build().eval()
    with torch.no_grad():
        assert backbone(torch.randn(1, 3, 64, 64)).shape == (1, backbone.num_features)
