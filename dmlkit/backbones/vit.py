"""Vision transformers of torchvision."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, blocks_in
from dmlkit.backbones.pretrained.weights import PublishedInput
from dmlkit.backbones.torchvision import TorchvisionConfig, build_torchvision
from dmlkit.component import Requirement, one_of
from dmlkit.pooling import Cls, Pooling, PoolingConfig

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
