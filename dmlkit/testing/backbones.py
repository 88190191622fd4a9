"""The contract of backbones."""

import torch
from torch import nn

from dmlkit.backbones.base import BackboneConfig
from dmlkit.pooling.base import PoolingConfig
from dmlkit.testing.promise import Promise, changed, expect, expect_close, hold, title

SIZE = 64  # side of the images


def check_backbone(config: BackboneConfig) -> None:
    """Hold a backbone to its contract, with images of 64 x 64 pixels.

    Features of one image depend on no other; statistics and affine parameters of batch norms freeze apart; frozen
    epochs have no gradients; every pooling fits, but for the class token's.

    Raises:
        AssertionError: names what is broken.

    Example:
        >>> from dmlkit.backbones import SmallCNNConfig
        >>> check_backbone(SmallCNNConfig(width=4))
    """
    hold(BACKBONE, title(config), config)


def features_are_of_one_image_each(config: BackboneConfig) -> None:
    """The features (B, F) of an image are the same whatever else is in the batch, and tell images apart."""
    backbone = config.build().double().eval()
    images = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64)
    with torch.no_grad():
        together = backbone(images)
        alone = torch.cat([backbone(image[None]) for image in images])
    expect(together.shape == (2, backbone.num_features), f"got {tuple(together.shape)}, F is {backbone.num_features}")
    expect(together.isfinite().all(), "a feature is nan or inf")
    expect_close(together, alone, "together and alone", atol=1e-9, rtol=1e-9)
    expect(not torch.equal(together[0], together[1]), "two images have the same features")


def batch_norms_freeze_as_asked(config: BackboneConfig) -> None:
    """Frozen batch norms keep their statistics, and their affine parameters; each alone where it alone is asked."""
    for statistics in (False, True):
        for affine in (False, True):
            expect_frozen(config, statistics, affine)


def expect_frozen(config: BackboneConfig, statistics: bool, affine: bool) -> None:
    """Make one step of training, and look at what it changed."""
    options = {"freeze_batchnorm_statistics": statistics, "freeze_batchnorm_affine": affine}
    backbone = changed(config, **options).build().train()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [_mean(norm).clone() for norm in norms]
    backbone(torch.randn(4, 3, SIZE, SIZE) + 1).square().sum().backward()
    kept = [torch.equal(_mean(norm), mean) for norm, mean in zip(norms, before, strict=True)]
    expect(kept == [statistics] * len(norms), f"{options}: {sum(kept)} of {len(kept)} running means are kept")
    trained = [norm.weight.grad is not None and bool(norm.weight.grad.any()) for norm in norms]
    # some of timm's start at 0, where gradients vanish
    expect(not any(trained) if affine else any(trained) or not norms, f"{options}: {sum(trained)} affine are trained")
    without = [name for name, one in backbone.named_parameters() if one.requires_grad and one.grad is None]
    expect(not without, f"{options}: no gradient for {', '.join(without)}")


def _mean(norm: nn.BatchNorm2d) -> torch.Tensor:
    expect(norm.running_mean is not None, "a batch norm keeps no running mean")
    return norm.running_mean  # pyright: ignore[reportReturnType] - looked at before


def frozen_epochs_have_no_gradients(config: BackboneConfig) -> None:
    """All gradients are dropped in the first freeze_epochs epochs, and none after."""
    backbone = changed(config, freeze_epochs=2).build()
    for epoch, is_frozen in ((0, True), (1, True), (2, False), (3, False)):
        backbone(torch.randn(2, 3, SIZE, SIZE)).sum().backward()
        backbone.discard_frozen_gradients(epoch)
        dropped = [one.grad is None for one in backbone.parameters() if one.requires_grad]
        expect(set(dropped) == {is_frozen}, f"epoch {epoch}: {sum(dropped)} of {len(dropped)} gradients are dropped")


def every_pooling_fits(config: BackboneConfig) -> None:
    """Where there is a pooling to choose, every one but cls gives F features."""
    for name, variant in PoolingConfig.variants.items():
        if "pooling" in type(config).model_fields and name != "cls":
            expect_pooled(config, variant())


def expect_pooled(config: BackboneConfig, pooling: PoolingConfig) -> None:
    """Make sure that a pooling gives F features."""
    backbone = changed(config, pooling=pooling).build().eval()
    with torch.no_grad():
        shape = tuple(backbone(torch.randn(1, 3, SIZE, SIZE)).shape)
    expect(shape == (1, backbone.num_features), f"{pooling.name}: got {shape}, F is {backbone.num_features}")


BACKBONE: tuple[Promise, ...] = (
    features_are_of_one_image_each,
    batch_norms_freeze_as_asked,
    frozen_epochs_have_no_gradients,
    every_pooling_fits,
)
