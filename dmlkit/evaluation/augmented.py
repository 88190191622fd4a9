"""Test-time augmentation: the mean of the embeddings of an image and of changed copies of it."""

import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset, PickedSamples
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, first_line
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.recipe.schema import Copies, Recipe
from dmlkit.transforms.base import TransformConfig
from dmlkit.vectors.in_memory import Embeddings, embed_dataset
from dmlkit.vectors.progress_bar import EMBEDDING, Bar, no_bar
from dmlkit.vectors.trained import TrainedModel

SCALES = (0.5**0.5, 2**0.5)
"""Sides of the copies of ``scales``, in units of the image's, as in DELG (Cao et al. 2020, arXiv:2001.05027)."""
WORDS: dict[Copies, str] = {
    "flip": "mean of each image and its mirror image",
    "scales": "mean of each image in 3 sizes: 0.71, 1 and 1.41 times its side",
}


class MirroredImages(PickedSamples):
    """Mirror images of some samples of a dataset: left and right are exchanged."""

    def sample(self, index: int) -> Tensor:
        return super().sample(index).flip(-1)


def check_copies(dataset: Dataset, recipe: Recipe, copies: Copies | None) -> None:
    """Check that copies of the images of a dataset can be embedded, if any are wanted."""
    if copies is not None and not dataset.kind.has_pixels:
        raise UserError(
            f"--with {copies}: applies to images, but the samples of this run have no pixels; remove this option"
        )
    for scale in SCALES if copies == "scales" else ():
        scaled_transform(recipe, scale)


@torch.no_grad()  # the curvature of a manifold may be learned
def embed_with_copies(
    ranks: Ranks, trained: TrainedModel, dataset: Dataset, own: Embeddings, copies: Copies, bar: Bar = no_bar
) -> Embeddings:
    """Embed changed copies of each image as well, and return the means.

    ``flip`` adds the mirror image, ``scales`` the image resized and cropped to `SCALES` times as many pixels a side.
    Copies are made of the full image, so that larger ones have more detail. The mean is taken of features, see
    `Manifold.to_features`; on the sphere it has the direction of the sum.
    """
    model, recipe = trained.model, trained.recipe
    manifold, device, transform = model.manifold, ranks.device, recipe.transform
    if copies == "flip":
        changed = [(MirroredImages(dataset, own.indices, own.labels), transform)]
    else:
        images = PickedSamples(dataset, own.indices, own.labels)
        changed = [(images, scaled_transform(recipe, scale)) for scale in SCALES]
    total = manifold.to_features(own.points.to(device))
    for images, transform in changed:
        with bar(EMBEDDING, len(images)) as advance:
            embedded = embed_dataset(ranks, model, images, transform, workers=recipe.training.workers, advance=advance)
        if embedded.faults:
            raise UserError(f"--with {copies}: an image can no longer be read: {embedded.faults[0]}")
        total = total + manifold.to_features(embedded.points.to(device))
    return own._replace(points=manifold.from_features(total / (1 + len(changed))).cpu())


def scaled_transform(recipe: Recipe, scale: float) -> TransformConfig | None:
    """Return the transform of a recipe whose images have other sides, with the same part of each image."""
    sizes = {key: getattr(recipe.transform, key) for key in ("size", "resize") if hasattr(recipe.transform, key)}
    overrides = [f"transform.{key}={round(scale * side)}" for key, side in sizes.items()]
    alone = recipe.model_copy(update={"regularizers": ()})  # those of training may need runs that are gone
    try:
        return parse_recipe(dump_recipe(alone), "recipe", overrides).transform
    except UserError as error:
        reason = first_line(error).removeprefix(f"--set {overrides[0]}: ")
        side = round(scale * sizes["size"])
        raise UserError(f"--with scales: needs images of {side} x {side} pixels too, but {reason}") from None
