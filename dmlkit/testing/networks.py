"""The contracts of backbones and their tunings, of poolings and of heads."""

from itertools import product

import torch
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.tuning import TuningConfig
from dmlkit.datasets.files.samples import samples_named
from dmlkit.heads import Head, HeadConfig
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.pooling import PoolingConfig
from dmlkit.testing.promise import changed, expect, expect_close, fitting_manifolds, hold, title

SIZE = 64  # side length of the images
NUM_FEATURES = 8  # length of the vectors


def check_backbone(config: BackboneConfig) -> None:
    """Check a backbone against its contract, with images of 64 x 64 pixels, or with vectors of 8 numbers.

    The features of an image do not depend on other images; statistics and affine parameters of batch norms freeze
    independently; frozen epochs have no gradients; every pooling except the class token works.

    Example:
        >>> from dmlkit.backbones import SmallCNN
        >>> check_backbone(SmallCNN.Config(width=4))
    """
    promises = [features_are_of_one_image_each, batch_norms_freeze_as_asked, frozen_epochs_have_no_gradients]
    hold([*promises, every_pooling_fits], title(config), config)


def build(config: BackboneConfig) -> Backbone:
    """Build the backbone for its kind of samples."""
    return config.build(samples_named(config.sample).of(NUM_FEATURES).num_features)


def samples(config: BackboneConfig, count: int) -> Tensor:
    """Return random images (B, 3, S, S), vectors (B, F) or other samples, as the backbone takes."""
    return torch.randn(count, *samples_named(config.sample).of(NUM_FEATURES).blank(SIZE).shape[1:])


def features_are_of_one_image_each(config: BackboneConfig) -> None:
    """Check that the features (B, F) of an image do not depend on the batch and differ between images."""
    backbone, images = build(config).double().eval(), samples(config, 2).double()
    with torch.no_grad():
        together = backbone(images)
        alone = torch.cat([backbone(image[None]) for image in images])
    shape, expected = tuple(together.shape), (2, backbone.num_features)
    expect(shape == expected, f"expected features of shape {expected}, got {shape}")
    expect(together.isfinite().all(), "a feature is nan or inf")
    expect_close(together, alone, "together and alone", atol=1e-9, rtol=1e-9)
    expect(not torch.equal(together[0], together[1]), "two images have the same features")


def batch_norms_freeze_as_asked(config: BackboneConfig) -> None:
    """Check that batch norms freeze their statistics and affine parameters, independently, as configured."""
    if not list(build(config).parameters()):
        return  # there is nothing to freeze
    for statistics, affine in product((False, True), repeat=2):
        expect_frozen(config, statistics, affine)


def expect_frozen(config: BackboneConfig, statistics: bool, affine: bool) -> None:
    """Check what one training step changes."""
    options = {"freeze_batchnorm_statistics": statistics, "freeze_batchnorm_affine": affine}
    backbone = build(changed(config, **options)).train()
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    means = [norm.running_mean for norm in norms if norm.running_mean is not None]
    expect(len(means) == len(norms), "a batch norm keeps no running mean")
    before = [mean.clone() for mean in means]
    backbone(samples(config, 4) + 1).square().sum().backward()
    frozen = [torch.equal(mean, old) for mean, old in zip(means, before, strict=True)]
    message = f"{options}: {sum(frozen)} of {len(frozen)} running means are unchanged"
    expect(frozen == [statistics] * len(norms), message)
    trained = sum(norm.weight.grad is not None and bool(norm.weight.grad.any()) for norm in norms)
    is_right = trained == 0 if affine else trained > 0 or not norms  # some of timm start at 0, where gradients vanish
    expect(is_right, f"{options}: {trained} batch norms have affine gradients")
    without = [name for name, weight in backbone.named_parameters() if weight.requires_grad and weight.grad is None]
    expect(not without, f"{options}: no gradient for {', '.join(without)}")


def frozen_epochs_have_no_gradients(config: BackboneConfig) -> None:
    """Check that nothing has a gradient in the first freeze_epochs epochs, and all trained weights have one later."""
    backbone = build(changed(config, freeze_epochs=2))
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    for epoch, expected in enumerate((0, 0, len(trained), len(trained))):
        switched = backbone.set_epoch(epoch)
        expect(switched == (bool(trained) and epoch in (0, 2)), f"epoch {epoch}: set_epoch returned {switched}")
        needing = sum(parameter.requires_grad for parameter in trained)
        expect(needing == expected, f"epoch {epoch}: {needing} of {len(trained)} parameters are trained")
        has_gradient = backbone(samples(config, 2)).requires_grad
        expect(has_gradient == (needing > 0), f"epoch {epoch}: features.requires_grad is {has_gradient}")


def every_pooling_fits(config: BackboneConfig) -> None:
    """Check that every pooling except cls gives F features, if the backbone has the option."""
    for name, variant in PoolingConfig.variants.items():
        if "pooling" in type(config).model_fields and name != "cls":
            expect_pooled(config, variant())


def expect_pooled(config: BackboneConfig, pooling: PoolingConfig) -> None:
    """Check that a pooling gives F features."""
    backbone = build(changed(config, pooling=pooling)).eval()
    with torch.no_grad():
        shape, expected = tuple(backbone(samples(config, 1)).shape), (1, backbone.num_features)
    expect(shape == expected, f"{pooling.name}: expected shape {expected}, got {shape}")


def check_tuning(config: TuningConfig, backbone: BackboneConfig) -> None:
    """Check a tuning against its contract, on a backbone that it can tune.

    Weights that are not tuned have no gradient and stay bit-identical, including batch norms; tuned weights have a
    gradient and change; features need a gradient if anything is tuned.

    Example:
        >>> from dmlkit.backbones import SmallCNN
        >>> from dmlkit.backbones.tuning import LastBlocksConfig
        >>> check_tuning(LastBlocksConfig(blocks=2), SmallCNN.Config(width=4))
    """
    hold([what_is_tuned_alone_trains], f"{config.name} of {backbone.name}", config, backbone)


def what_is_tuned_alone_trains(config: TuningConfig, backbone: BackboneConfig) -> None:
    """Check that exactly the tuned weights have a gradient, and that a step changes only these and statistics."""
    network: Backbone = changed(backbone, tuning=config).build().train()
    tuned = {id(parameter) for parameter in network.tuned_parameters()}
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    features = network(samples(backbone, 4))
    has_gradient = features.requires_grad
    expect(has_gradient == bool(tuned), f"{len(tuned)} weights are tuned, features.requires_grad is {has_gradient}")
    head = nn.Linear(network.num_features, 2)
    head(features).square().sum().backward()
    for name, parameter in network.named_parameters():
        message = f"{name}: tuned {id(parameter) in tuned}, has a gradient {parameter.grad is not None}"
        expect((parameter.grad is not None) == (id(parameter) in tuned) == parameter.requires_grad, message)

    torch.optim.SGD([*network.tuned_parameters(), *head.parameters()], lr=0.1).step()
    moved = [name for name, tensor in network.state_dict().items() if not torch.equal(tensor, before[name])]
    training = {name for name, module in network.named_modules() if module.training}
    frozen = [name for name in moved if name.rpartition(".")[0] not in training or name in network.frozen_names]
    expect(not frozen, f"{', '.join(frozen[:3])} changed but must be frozen")
    expect(bool(moved) == bool(tuned), f"{len(tuned)} weights are tuned, {len(moved)} tensors changed")


DIM = 6


def check_head(config: HeadConfig) -> None:
    """Check a head against its contract, on every manifold that its requirements allow.

    Outputs are points; gradients are finite, also for features that are 0; half precision ends before the manifold.

    Example:
        >>> from dmlkit.heads import Linear
        >>> check_head(Linear.Config())
    """
    for manifold in {space.name: space for space in fitting_manifolds(config)}.values():
        promises = [outputs_are_points, gradients_are_finite_also_at_zero_features]
        hold(promises, f"{config.name} on {manifold.name}", config, manifold)


def head_of(config: HeadConfig, manifold: Manifold) -> Head:
    """Build a head for more features than dimensions, or for as many if it keeps their number."""
    try:
        return config.build(2 * DIM, manifold)
    except ValueError:
        return config.build(DIM, manifold)


def outputs_are_points(config: HeadConfig, space: ManifoldConfig) -> None:
    """Check that features become points of the manifold, in float32, also under autocast."""
    manifold = space.build(DIM)
    head = head_of(config, manifold)
    for case, enabled in (("float32", False), ("autocast", True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            points = head(torch.randn(40, head.num_features) * 3)
        expect(points.shape == (40, manifold.point_dim), f"{case}: got shape {tuple(points.shape)}")
        expect(points.dtype == torch.float32, f"{case}: got {points.dtype}")
        expect(manifold.geometry.check_point_on_manifold(points, atol=1e-4), f"{case}: not on the manifold")


def gradients_are_finite_also_at_zero_features(config: HeadConfig, manifold: ManifoldConfig) -> None:
    """Check that gradients of features and parameters are finite, also if all features of an image are 0."""
    head = head_of(config, manifold.build(DIM))
    width = head.num_features
    features = torch.cat([torch.zeros(1, width), torch.randn(3, width)]).requires_grad_()
    head(features).sum().backward()
    is_finite = features.grad is not None and bool(features.grad.isfinite().all())
    expect(is_finite, "gradient of the features: missing, nan or inf")
    for name, parameter in head.named_parameters():
        expect(parameter.grad is None or bool(parameter.grad.isfinite().all()), f"gradient of {name}: nan or inf")


def check_pooling(config: PoolingConfig) -> None:
    """Check a pooling against its contract: maps (B, C, H, W) of any size become vectors (B, C), per image.

    Example:
        >>> from dmlkit.pooling import GeM
        >>> check_pooling(GeM.Config(learn=True))
    """
    promises = [
        maps_become_vectors,
        a_vector_is_of_one_image,
        gradients_are_finite,
        half_precision_does_not_overflow,
        the_state_dict_is_complete,
    ]
    hold(promises, config.name, config)


def inputs(height: int = 4, width: int = 5) -> tuple[Tensor, Tensor]:
    """Return maps (2, 3, H, W) and class tokens (2, 3)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, height, width, generator=generator), torch.randn(2, 3, generator=generator)


def maps_become_vectors(config: PoolingConfig) -> None:
    """Check that a map of any height and width becomes a finite vector of its channels."""
    for height, width in ((1, 1), (4, 5), (7, 7)):
        pooled = config.build()(*inputs(height, width))
        expect(pooled.shape == (2, 3), f"got shape {tuple(pooled.shape)} for maps (2, 3, {height}, {width})")
        expect(pooled.isfinite().all(), f"maps (2, 3, {height}, {width}): nan or inf")


def a_vector_is_of_one_image(config: PoolingConfig) -> None:
    """Check that the vector of an image does not depend on the batch."""
    pooling, (maps, token) = config.build(), inputs()
    alone = torch.cat([pooling(maps[row : row + 1], token[row : row + 1]) for row in range(2)])
    expect_close(pooling(maps, token), alone, "together and alone")


def gradients_are_finite(config: PoolingConfig) -> None:
    """Check that gradients of maps and parameters exist and are finite, also if all features are 0."""
    for scale in (1.0, 0.0):
        pooling = config.build()
        maps, token = (scale * part for part in inputs())
        pooling(maps.requires_grad_(), token.requires_grad_()).sum().backward()
        gradients = [part.grad for part in (maps, token, *pooling.parameters()) if part.grad is not None]
        expect(bool(gradients), "nothing has a gradient")
        expect(all(gradient.isfinite().all() for gradient in gradients), f"features of size {scale}: nan or inf")


def half_precision_does_not_overflow(config: PoolingConfig) -> None:
    """Check that features of 1000 in float16 stay finite under autocast."""
    maps, token = torch.full((1, 1, 2, 2), 1000.0), torch.full((1, 1), 1000.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expect(config.build()(maps.half(), token.half()).isfinite().all(), "nan or inf")


def the_state_dict_is_complete(config: PoolingConfig) -> None:
    """Check that a pooling restored from its state_dict gives identical vectors."""
    pooling, restored = config.build(), config.build()
    for parameter in pooling.parameters():
        parameter.data.add_(0.5)
    restored.load_state_dict(pooling.state_dict())
    expect(torch.equal(restored(*inputs()), pooling(*inputs())), "vectors differ")
