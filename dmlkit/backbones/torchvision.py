"""Networks of torchvision: ConvNeXt, GoogLeNet, ResNet and vision transformers, with its weights or those of a file."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig, blocks_in
from dmlkit.backbones.weights import IMAGENET, PublishedInput, input_requirements, is_file, load_weights
from dmlkit.component import Requirement, one_of
from dmlkit.errors import OptionError
from dmlkit.pooling import Avg, Cls, Pooling, PoolingConfig


class TorchvisionConfig(BackboneConfig, frozen=True, abstract=True):
    """Base of the configurations of torchvision's networks."""

    weights: str | None = None
    """``imagenet``, a name of torchvision weights, or the path of a file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] = Avg.Config()
    """Pooling of the last feature map to one vector."""

    @property
    def network(self) -> str:
        """Name of the network in ``torchvision.models``."""
        return self.name

    def requirements(self) -> Iterable[Requirement]:
        """Return requirements on the transform: ImageNet's statistics for named weights, channels for a file."""
        if self.weights is None:
            return []
        if is_file(self.weights):
            reason = "weights of this network were trained on RGB pixels in 0..1"
            return input_requirements(IMAGENET, reason, keys=("channels", "pixel_max"))
        reason = "these weights were trained with ImageNet's statistics (transform: imagenet)"
        return input_requirements(IMAGENET, reason)

    def check_weights(self) -> None:
        if self.weights is not None and not is_file(self.weights):
            named_weights(self.network, self.weights)

    def published_input(self) -> PublishedInput:
        if self.weights is None or is_file(self.weights):
            found = "null" if self.weights is None else "a file, whose preprocessing is unknown"
            raise OptionError(
                "transform.name",
                "pretrained uses the preprocessing published with the weights, but backbone.weights is "
                f"{found}; use another transform, e.g. imagenet",
            )
        preset: Any = named_weights(self.network, self.weights).transforms()
        (crop,), (resize,) = preset.crop_size, preset.resize_size
        interpolation = preset.interpolation.value
        return PublishedInput(crop, crop / resize, False, interpolation, tuple(preset.mean), tuple(preset.std))


def build_torchvision(network: str, weights: str | None, head: str, **options: Any) -> tuple[Any, int]:
    """Build a torchvision model without its classifier, with torchvision's weights or those of a file.

    Args:
        network: name of the model in ``torchvision.models``.
        weights: ``"imagenet"`` (torchvision's best), the name of one of them, the path of a file, or None.
        head: name of the linear classifier, which the identity replaces.
        options: further arguments of the model.

    Returns:
        The model and the number of features that enter its head.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """
    from torchvision import models

    build = getattr(models, network)
    named = weights if weights is not None and not is_file(weights) else None
    model = build(weights=None, **options) if named is None else _download(build, network, named, options)
    classifier = model.get_submodule(head)
    assert isinstance(classifier, nn.Linear)
    model.set_submodule(head, nn.Identity())
    if weights is not None and named is None:
        load_weights(model, Path(weights))
    return model, classifier.in_features


def _download(build: Any, network: str, weights: str, options: dict[str, Any]) -> nn.Module:
    chosen = named_weights(network, weights)
    try:
        return build(weights=chosen, **options)
    except (OSError, RuntimeError) as error:  # no network | a download that does not match its hash
        file = Path(torch.hub.get_dir()) / "checkpoints" / chosen.url.rsplit("/", 1)[1]
        raise OptionError(
            "backbone.weights",
            f"cannot download {weights} ({error}); download {chosen.url} to {file}, "
            "or set backbone.weights to the path of the file, or to null",
        ) from error


def named_weights(network: str, weights: str) -> Any:
    """Return the member of torchvision's weights that a recipe names; ``imagenet`` is the best one.

    Raises:
        UserError: the name is unknown.
    """
    from torchvision.models import get_model_weights

    enum: Any = get_model_weights(network)
    known = list(enum.__members__)
    if weights not in ("imagenet", "DEFAULT", *known):
        near = get_close_matches(weights, ["imagenet", *known], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected imagenet, one of {', '.join(known)}, or a file"
        raise OptionError("backbone.weights", f"unknown weights {weights!r}; {hint}")
    return enum.DEFAULT if weights in ("imagenet", "DEFAULT") else enum[weights]


Size = Literal["tiny", "small", "base", "large"]


class ConvNeXtConfig(TorchvisionConfig, frozen=True):
    """ConvNeXt (Liu et al. 2022), 768 features (tiny, small), 1 024 (base) or 1 536 (large)."""

    name: Literal["convnext"] = "convnext"
    size: Size = "tiny"
    """Width and depth of the network."""

    @property
    def network(self) -> str:
        return f"convnext_{self.size}"

    def create(self) -> "ConvNeXt":
        return ConvNeXt(size=self.size, weights=self.weights, pooling=self.pooling.build())


class ConvNeXt(Backbone):
    """torchvision's ConvNeXt up to the layer norm that follows its pooling.

    Args:
        size: width and depth of the network.
        weights: see `TorchvisionConfig`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(self, *, size: Size = "tiny", weights: str | None = None, pooling: Pooling | None = None) -> None:
        super().__init__()
        self.network, self.num_features = build_torchvision(f"convnext_{size}", weights, "classifier.2")
        self.pooling = pooling or Avg()

    def blocks(self) -> list[nn.Module]:
        _, first, *stages = self.network.features  # after the stem, stages alternate with layers that halve the map
        found: list[nn.Module] = list(first)
        for halving, (start, *others) in zip(stages[::2], stages[1::2], strict=True):
            found += [nn.ModuleList([halving, start]), *others]
        return [*found[:-1], nn.ModuleList([found[-1], self.network.classifier])]

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.pooling(self.network.features(images))
        return self.network.classifier(pooled[:, :, None, None])


class GoogLeNetConfig(TorchvisionConfig, frozen=True):
    """GoogLeNet with batch norm (Szegedy et al. 2015, as in torchvision), 1 024 features."""

    name: Literal["googlenet"] = "googlenet"

    def create(self) -> "GoogLeNet":
        return GoogLeNet(weights=self.weights, pooling=self.pooling.build())


class GoogLeNet(Backbone):
    """torchvision's GoogLeNet up to its pooling, without auxiliary classifiers and dropout.

    Args:
        weights: see `TorchvisionConfig`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(self, *, weights: str | None = None, pooling: Pooling | None = None) -> None:
        super().__init__()
        # torchvision's weights need pixels in -1..1; transform_input converts them from ImageNet's statistics. It is
        # always on, so that a trained model does not depend on where its first weights came from.
        options = {"transform_input": True, "aux_logits": False, "init_weights": False}
        self.network, self.num_features = build_torchvision("googlenet", weights, "fc", **options)
        self.network.avgpool = pooling or Avg()
        self.network.dropout = nn.Identity()

    def blocks(self) -> list[nn.Module]:
        return [child for name, child in self.network.named_children() if name.startswith("inception")]

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)


class ResNet18Config(TorchvisionConfig, frozen=True):
    """ResNet-18 (He et al. 2016), 512 features."""

    name: Literal["resnet18"] = "resnet18"

    def create(self) -> "ResNet":
        return ResNet(18, weights=self.weights, pooling=self.pooling.build())


class ResNet50Config(TorchvisionConfig, frozen=True):
    """ResNet-50 (He et al. 2016), 2 048 features; accepts files of SwAV's and DINO's self-supervised weights."""

    name: Literal["resnet50"] = "resnet50"

    def create(self) -> "ResNet":
        return ResNet(50, weights=self.weights, pooling=self.pooling.build())


class ResNet101Config(TorchvisionConfig, frozen=True):
    """ResNet-101 (He et al. 2016), 2 048 features."""

    name: Literal["resnet101"] = "resnet101"

    def create(self) -> "ResNet":
        return ResNet(101, weights=self.weights, pooling=self.pooling.build())


class ResNet(Backbone):
    """torchvision's ResNet up to its pooling.

    Args:
        depth: 18, 50 or 101.
        weights: see `TorchvisionConfig`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(
        self, depth: Literal[18, 50, 101], *, weights: str | None = None, pooling: Pooling | None = None
    ) -> None:
        super().__init__()
        self.network, self.num_features = build_torchvision(f"resnet{depth}", weights, "fc")
        self.network.avgpool = pooling or Avg()

    def blocks(self) -> list[nn.Module]:
        return blocks_in(self.network, "layer1", "layer2", "layer3", "layer4")

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)


ViTVariant = Literal["b_16", "b_32", "l_16", "l_32", "h_14"]


class ViTConfig(TorchvisionConfig, frozen=True):
    """Vision transformer (Dosovitskiy et al. 2021), 768 features (b), 1 024 (l) or 1 280 (h); for ViT-S use timm."""

    has_class_token: ClassVar[bool] = True
    name: Literal["vit"] = "vit"
    variant: ViTVariant = "b_16"
    """Size of the network, and the side of a patch in pixels."""
    image_size: Annotated[int, Field(ge=14)] = 224
    """Side of the images in pixels, which sets the position embeddings; must equal the transform's size."""
    pooling: Annotated[PoolingConfig, one_of] = Cls.Config()

    @property
    def network(self) -> str:
        return f"vit_{self.variant}"

    def create(self) -> "ViT":
        return ViT(variant=self.variant, image_size=self.image_size, weights=self.weights, pooling=self.pooling.build())

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement("transform.size", (self.image_size,), "its position embeddings have backbone.image_size")
        yield from super().requirements()

    def published_input(self) -> PublishedInput:
        return super().published_input()._replace(size=self.image_size)


class ViT(Backbone):
    """torchvision's vision transformer up to its final layer norm.

    Args:
        variant: size of the network and side of a patch.
        image_size: side of the images in pixels, a multiple of the patch's side.
        weights: see `TorchvisionConfig`.
        pooling: pooling of the class token and the map of patches; None uses the class token.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
        ValueError: the image size is not a multiple of the patch's side.
    """

    def __init__(
        self,
        *,
        variant: ViTVariant = "b_16",
        image_size: int = 224,
        weights: str | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        super().__init__()
        patch = int(variant.split("_")[1])
        if image_size % patch:
            raise ValueError(f"image_size: got {image_size}, expected a multiple of {patch} (the side of a patch)")
        self.network, self.num_features = build_torchvision(
            f"vit_{variant}", weights, "heads.head", image_size=image_size
        )
        self.pooling = pooling or Cls()
        self.side = image_size // patch  # patches in a row

    def blocks(self) -> list[nn.Module]:
        return blocks_in(self.network.encoder, "layers")

    def forward(self, images: Tensor) -> Tensor:
        patches = self.network._process_input(images)  # (B, N, C)
        start = self.network.class_token.expand(len(patches), -1, -1)
        tokens = self.network.encoder(torch.cat((start, patches), dim=1))  # (B, 1 + N, C)
        maps = tokens[:, 1:].transpose(1, 2).unflatten(2, (self.side, self.side))
        return self.pooling(maps, tokens[:, 0])
