"""Backbones: features of one image do not depend on the others, and frozen batch norms stay as they are."""

import pytest
import torch
from torch import nn

from dmlkit.backbones.base import BackboneConfig

QUICK = ("small_cnn", "resnet18")


@pytest.mark.parametrize("name", QUICK)
def test_features_are_of_one_image_each(name: str):
    torch.manual_seed(0)
    backbone = BackboneConfig.variants[name]().build().eval()
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        together = backbone(images)
        alone = torch.cat([backbone(image[None]) for image in images])
    assert together.shape == (3, backbone.num_features)
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("freeze", [False, True])
def test_frozen_batch_norms_keep_their_statistics(name: str, freeze: bool):
    torch.manual_seed(0)
    backbone = BackboneConfig.variants[name](freeze_batchnorm=freeze).build().train()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.running_mean.clone() for norm in norms]
    backbone(torch.randn(4, 3, 32, 32) + 1)
    changed = [not torch.equal(old, norm.running_mean) for old, norm in zip(before, norms, strict=True)]
    assert norms and changed == [not freeze] * len(norms)
