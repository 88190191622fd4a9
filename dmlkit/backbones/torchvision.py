"""Networks of torchvision: ConvNeXt, GoogLeNet, ResNet and vision transformers, with its weights or those of a file."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, blocks_in
from dmlkit.backbones.weights import (
    IMAGENET,
    PublishedInput,
    file_requirements,
    input_requirements,
    is_file,
    load_weights,
    one_size,
)
from dmlkit.component import Requirement, from_weights
from dmlkit.errors import OptionError
from dmlkit.pooling import Avg, Cls, Pooling


class Torchvision(Backbone):
    """Base of torchvision's networks."""

    is_of_library: ClassVar[bool] = True
    weights: str | None = None
    """``imagenet``, a name of torchvision weights, or the path of a file; null trains from scratch."""
    pooling: Pooling = Avg.Config()
    """Pooling of the last feature map to one vector."""

    @property
    def architecture(self) -> str:
        """Name of the network in ``torchvision.models``."""
        return self.Config.model_fields["name"].default

    def requirements(self) -> Iterable[Requirement]:
        """Return requirements on the transform: ImageNet's statistics for named weights, channels for a file."""
        if self.weights is None:
            return []
        if is_file(self.weights):
            return file_requirements()
        reason = "these weights were trained with ImageNet's statistics (transform: imagenet)"
        return input_requirements(IMAGENET, reason)

    def check_weights(self) -> None:
        self.published_weights()

    def published_weights(self) -> Any:
        """Return torchvision's weights that the recipe names; None if it names none or a file."""
        if self.weights is None or is_file(self.weights):
            return None
        from torchvision.models import get_model_weights

        enum: Any = get_model_weights(self.architecture)
        known = {"imagenet": enum.DEFAULT, **enum.__members__}
        if self.weights not in known:
            similar = get_close_matches(self.weights, known, n=1)
            names = ", ".join(enum.__members__)
            hint = f"did you mean {similar[0]!r}?" if similar else f"expected imagenet, one of {names}, or a file"
            raise OptionError("backbone.weights", f"unknown weights {self.weights!r}; {hint}")
        return known[self.weights]

    def published_input(self) -> PublishedInput:
        published = self.published_weights()
        if published is None:
            weights = "null" if self.weights is None else "a file, whose preprocessing is unknown"
            raise OptionError(
                "transform.name",
                "pretrained uses the preprocessing published with the weights, but backbone.weights is "
                f"{weights}; use another transform, e.g. imagenet",
            )
        preset: Any = published.transforms()
        (crop,), (resize,), interpolation = preset.crop_size, preset.resize_size, preset.interpolation.value
        return PublishedInput(crop, crop / resize, False, interpolation, tuple(preset.mean), tuple(preset.std))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def build_network(self, head: str, **options: Any) -> None:
        """Set the network, with its weights and the identity in place of its classifier ``head``, and num_features."""
        from torchvision import models

        published = self.published_weights()
        try:
            network: Any = getattr(models, self.architecture)(weights=published, **options)
        except (OSError, RuntimeError) as error:  # no network | a download that does not match its hash
            if published is None:
                raise
            file = Path(torch.hub.get_dir()) / "checkpoints" / published.url.rsplit("/", 1)[1]
            raise OptionError(
                "backbone.weights",
                f"cannot download {self.weights} ({error}); download {published.url} to {file}, "
                "or set backbone.weights to the path of the file, or to null",
            ) from error
        self.num_features = network.get_submodule(head).in_features
        network.set_submodule(head, nn.Identity())
        if self.weights is not None and published is None:
            load_weights(network, Path(self.weights))
        self.network = network


class ConvNeXt(Torchvision, name="convnext"):
    """ConvNeXt (Liu et al. 2022), 768 features (tiny, small), 1 024 (base) or 1 536 (large).

    It ends with the layer norm that follows its pooling.
    """

    size: Literal["tiny", "small", "base", "large"] = "tiny"
    """Width and depth of the network."""

    @property
    def architecture(self) -> str:
        return f"convnext_{self.size}"

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling = self.take_pooling()
        self.build_network("classifier.2")
        self.pooling = pooling

    def blocks(self) -> list[nn.Module]:
        _, first, *stages = self.network.features  # after the stem, stages alternate with layers that halve the map
        blocks: list[nn.Module] = list(first)
        for halving, (start, *others) in zip(stages[::2], stages[1::2], strict=True):
            blocks += [nn.ModuleList([halving, start]), *others]
        return [*blocks[:-1], nn.ModuleList([blocks[-1], self.network.classifier])]

    def forward(self, images: Tensor) -> Tensor:
        pooled = self.pooling(self.network.features(images))
        return self.network.classifier(pooled[:, :, None, None])


class GoogLeNet(Torchvision, name="googlenet"):
    """GoogLeNet with batch norm (Szegedy et al. 2015, as in torchvision), 1 024 features.

    It ends with its pooling; auxiliary classifiers and dropout are left out.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # torchvision's weights need pixels in -1..1; transform_input converts them from ImageNet's statistics. It is
        # always on, so that a trained model does not depend on where its first weights came from.
        # With published weights torchvision refuses aux_logits=False, and removes the auxiliary classifiers by itself.
        without = {} if self.published_weights() else {"aux_logits": False}
        self.build_network("fc", transform_input=True, init_weights=False, **without)
        self.network.avgpool = self.take_pooling()
        self.network.dropout = nn.Identity()

    def blocks(self) -> list[nn.Module]:
        return [child for name, child in self.network.named_children() if name.startswith("inception")]


class ResNet(Torchvision):
    """Base of torchvision's ResNets (He et al. 2016), which end with their pooling."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.build_network("fc")
        self.network.avgpool = self.take_pooling()

    def blocks(self) -> list[nn.Module]:
        return blocks_in(self.network, "layer1", "layer2", "layer3", "layer4")


class ResNet18(ResNet, name="resnet18"):
    """ResNet-18 (He et al. 2016), 512 features."""


class ResNet50(ResNet, name="resnet50"):
    """ResNet-50 (He et al. 2016), 2 048 features; accepts files of SwAV's and DINO's self-supervised weights."""


class ResNet101(ResNet, name="resnet101"):
    """ResNet-101 (He et al. 2016), 2 048 features."""


class ViT(Torchvision, name="vit"):
    """Vision transformer (Dosovitskiy et al. 2021), 768 features (b), 1 024 (l) or 1 280 (h); for ViT-S use timm.

    It ends with its final layer norm.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
        ValueError: the image size is not a multiple of the patch's side.
    """

    has_class_token: ClassVar[bool] = True
    variant: Literal["b_16", "b_32", "l_16", "l_32", "h_14"] = "b_16"
    """Size of the network, and the side of a patch in pixels."""
    image_size: Annotated[int, Field(ge=14), from_weights] = 224
    """Side of the images in pixels, which sets the position embeddings; must equal the transform's size. If not set, it
    is that of the published weights, or 224 without them."""
    pooling: Pooling = Cls.Config()

    def __post_init__(self) -> None:
        super().__post_init__()
        pooling, patch = self.take_pooling(), int(self.variant.split("_")[1])
        if self.image_size % patch:
            raise ValueError(f"image_size: got {self.image_size}, expected a multiple of {patch} (the side of a patch)")
        self.build_network("heads.head", image_size=self.image_size)
        self.pooling = pooling
        self.side = self.image_size // patch  # patches in a row

    @property
    def architecture(self) -> str:
        return f"vit_{self.variant}"

    def requirements(self) -> Iterable[Requirement]:
        yield from one_size(self.image_size, "its position embeddings have backbone.image_size")
        yield from super().requirements()

    def resolved_keys(self) -> dict[str, Any]:
        published = self.published_weights()
        return {} if published is None else {"image_size": published.meta["min_size"][0]}

    def blocks(self) -> list[nn.Module]:
        return blocks_in(self.network.encoder, "layers")

    def forward(self, images: Tensor) -> Tensor:
        patches = self.network._process_input(images)  # (B, N, C)
        start = self.network.class_token.expand(len(patches), -1, -1)
        tokens = self.network.encoder(torch.cat((start, patches), dim=1))  # (B, 1 + N, C)
        maps = tokens[:, 1:].transpose(1, 2).unflatten(2, (self.side, self.side))
        return self.pooling(maps, tokens[:, 0])
