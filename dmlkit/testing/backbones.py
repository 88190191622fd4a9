"""The contract of backbones."""

import torch
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.pooling import PoolingConfig
from dmlkit.testing.promise import Promise, changed, expect, expect_close, hold, title

SIZE = 64  # side length of the images
NUM_FEATURES = 8  # length of the vectors


def check_backbone(config: BackboneConfig) -> None:
    """Check a backbone against its contract, with images of 64 x 64 pixels, or with vectors of 8 numbers.

    The features of an image do not depend on other images; statistics and affine parameters of batch norms freeze
    independently; frozen epochs have no gradients; every pooling except the class token works.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.backbones import SmallCNNConfig
        >>> check_backbone(SmallCNNConfig(width=4))
    """
    hold(BACKBONE, title(config), config)


def build(config: BackboneConfig) -> Backbone:
    """Build the backbone for its kind of samples."""
    return config.build(None if config.sample == "image" else NUM_FEATURES)


def samples(config: BackboneConfig, count: int) -> Tensor:
    """Return random images (B, 3, S, S), or vectors (B, F), as the backbone takes."""
    return torch.randn(count, *((3, SIZE, SIZE) if config.sample == "image" else (NUM_FEATURES,)))


def features_are_of_one_image_each(config: BackboneConfig) -> None:
    """Check that the features (B, F) of an image do not depend on the batch and differ between images."""
    backbone, images = build(config).double().eval(), samples(config, 2).double()
    with torch.no_grad():
        together = backbone(images)
        alone = torch.cat([backbone(image[None]) for image in images])
    expect(
        together.shape == (2, backbone.num_features),
        f"expected features of shape (2, {backbone.num_features}), got {tuple(together.shape)}",
    )
    expect(together.isfinite().all(), "a feature is nan or inf")
    expect_close(together, alone, "together and alone", atol=1e-9, rtol=1e-9)
    expect(not torch.equal(together[0], together[1]), "two images have the same features")


def batch_norms_freeze_as_asked(config: BackboneConfig) -> None:
    """Check that batch norms freeze their statistics and affine parameters, independently, as configured."""
    if not list(build(config).parameters()):
        return  # there is nothing to freeze
    for statistics in (False, True):
        for affine in (False, True):
            expect_frozen(config, statistics, affine)


def expect_frozen(config: BackboneConfig, statistics: bool, affine: bool) -> None:
    """Check what one training step changes."""
    options = {"freeze_batchnorm_statistics": statistics, "freeze_batchnorm_affine": affine}
    backbone = build(changed(config, **options)).train()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [_mean(norm).clone() for norm in norms]
    backbone(samples(config, 4) + 1).square().sum().backward()
    kept = [torch.equal(_mean(norm), mean) for norm, mean in zip(norms, before, strict=True)]
    expect(kept == [statistics] * len(norms), f"{options}: {sum(kept)} of {len(kept)} running means are unchanged")
    trained = [norm.weight.grad is not None and bool(norm.weight.grad.any()) for norm in norms]
    # some batch norms of timm start at 0, where gradients vanish
    expect(
        not any(trained) if affine else any(trained) or not norms,
        f"{options}: {sum(trained)} batch norms have affine gradients",
    )
    without = [name for name, one in backbone.named_parameters() if one.requires_grad and one.grad is None]
    expect(not without, f"{options}: no gradient for {', '.join(without)}")


def _mean(norm: nn.BatchNorm2d) -> Tensor:
    expect(norm.running_mean is not None, "a batch norm keeps no running mean")
    return norm.running_mean  # pyright: ignore[reportReturnType] - checked above


def frozen_epochs_have_no_gradients(config: BackboneConfig) -> None:
    """Check that nothing has a gradient in the first freeze_epochs epochs, and all trained weights have one later."""
    backbone = build(changed(config, freeze_epochs=2))
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    for epoch, is_frozen in ((0, True), (1, True), (2, False), (3, False)):
        switched = backbone.set_epoch(epoch)
        expect(switched == (bool(trained) and epoch in (0, 2)), f"epoch {epoch}: set_epoch returned {switched}")
        needing = sum(parameter.requires_grad for parameter in trained)
        expect(
            needing == (0 if is_frozen else len(trained)),
            f"epoch {epoch}: {needing} of {len(trained)} parameters are trained",
        )
        features = backbone(samples(config, 2))
        expect(
            features.requires_grad == (needing > 0),
            f"epoch {epoch}: features.requires_grad is {features.requires_grad}",
        )


def every_pooling_fits(config: BackboneConfig) -> None:
    """Check that every pooling except cls gives F features, if the backbone has the option."""
    for name, variant in PoolingConfig.variants.items():
        if "pooling" in type(config).model_fields and name != "cls":
            expect_pooled(config, variant())


def expect_pooled(config: BackboneConfig, pooling: PoolingConfig) -> None:
    """Check that a pooling gives F features."""
    backbone = build(changed(config, pooling=pooling)).eval()
    with torch.no_grad():
        shape = tuple(backbone(samples(config, 1)).shape)
    expect(
        shape == (1, backbone.num_features), f"{pooling.name}: expected shape (1, {backbone.num_features}), got {shape}"
    )


BACKBONE: tuple[Promise, ...] = (
    features_are_of_one_image_each,
    batch_norms_freeze_as_asked,
    frozen_epochs_have_no_gradients,
    every_pooling_fits,
)
