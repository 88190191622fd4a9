"""The embedding model: plain pixels in, points on a manifold out."""

import hashlib

import torch
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone
from dmlkit.heads.base import Head
from dmlkit.manifolds.base import Manifold
from dmlkit.recipe import Recipe
from dmlkit.transforms.base import Channels


class Normalization(nn.Module):
    """uint8 pixels to floats of mean 0 and standard deviation 1, on the device: a quarter of the bytes to copy.

    Args:
        mean: per channel, of pixels in 0..1.
        std: per channel, of pixels in 0..1.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, mean: Channels, std: Channels) -> None:
        super().__init__()
        self.register_buffer("shift", 255 * torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("scale", 255 * torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) uint8 -> float32."""
        return (images - self.shift) / self.scale


class EmbeddingModel(nn.Module):
    """Normalization, backbone and head.

    Args:
        normalization: of the recipe's transform.
        backbone: images to features (B, F).
        head: features to points (B, D); it holds the manifold.
    """

    def __init__(self, normalization: Normalization, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.normalization = normalization
        self.backbone = backbone
        self.head = head

    @property
    def manifold(self) -> Manifold:
        """The geometry of the points."""
        return self.head.manifold

    def forward(self, images: Tensor) -> Tensor:
        """Points (B, D) float32 of RGB images (B, 3, H, W) uint8."""
        return self.head(self.backbone(self.normalization(images)))

    def fingerprint(self) -> str:
        """A hash of all weights: equal embeddings come from equal fingerprints."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()


def build_model(recipe: Recipe) -> EmbeddingModel:
    """The model that a recipe describes, with fresh weights."""
    backbone = recipe.backbone.build()
    head = recipe.head.build(backbone.num_features, recipe.manifold.build(recipe.embedding_dim))
    return EmbeddingModel(Normalization(recipe.transform.mean, recipe.transform.std), backbone, head)
