"""Test-time augmentation against points computed image by image."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import interpolate

from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation.augmented import Copies, embed_with_copies, scaled_transform
from dmlkit.evaluation.evaluate import SecondScoring, score_split
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.base import Points
from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.vectors.in_memory import embed_dataset
from dmlkit.vectors.trained import TrainedModel
from tests.conftest import ONE_EPOCH, TINY_RECIPE, refuses


def resized(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """Resize images (N, 3, H, W) uint8 in float, rounded to whole numbers."""
    found = interpolate(pixels.float(), (side, side), mode="bilinear", antialias=True, align_corners=False)
    return found.round().clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize(("copies", "manifold"), [("flip", "poincare"), ("scales", "sphere")])
def test_the_mean_of_an_image_and_its_copies(copies: Copies, manifold: str):
    recipe = parse_recipe(ONE_EPOCH + f"manifold: {{name: {manifold}}}\n", "recipe.yaml")
    torch.manual_seed(0)
    model, dataset = build_model(recipe).eval(), recipe.dataset.build("test")
    ranks, trained = start_ranks("cpu"), TrainedModel.of(recipe, model)
    own = embed_dataset(ranks, model, dataset, recipe.transform, workers=0)
    means = embed_with_copies(ranks, trained, dataset, own, copies)
    changed = SecondScoring(points=Points(means.points, means.labels, model.manifold))
    scored = score_split(ranks, trained, own, dataset, split="test", second=changed)
    pixels = torch.stack([dataset.sample(row) for row in range(len(dataset))])
    side = pixels.shape[-1]
    assert recipe.transform is not None and recipe.transform.size == side
    others = (
        [pixels.flip(3)] if copies == "flip" else [resized(pixels, round(side * s)) for s in (0.7071068, 1.4142136)]
    )
    with torch.no_grad():
        features = [model.manifold.to_features(model(images)) for images in (pixels, *others)]
        points = model.manifold.from_features(torch.stack(features).mean(0))
    assert (means.points - points).abs().max() < (1e-4 if copies == "flip" else 0.02)  # resized in whole numbers
    expected = score_retrieval(Labeled(means.points, dataset.labels), manifold=model.manifold, metrics=recipe.metrics)
    assert scored.alternative.values == pytest.approx(expected.values)
    assert scored.alternative.values != scored.scores.values


@pytest.mark.parametrize("transform", ["{name: imagenet}", "{name: hyp_vit, size: 160, resize: 182}"])
def test_a_scaled_transform_shows_the_same_part_of_an_image(transform: str):
    """A white square in the middle of an image takes the same share of all sizes."""
    text = "dataset: {name: folder, root: x}\nbackbone: {name: small_cnn}\nloss: {name: triplet}\n"
    recipe = parse_recipe(f"{text}transform: {transform}\n", "recipe.yaml")
    image = torch.zeros(3, 400, 500, dtype=torch.uint8)
    image[:, 100:300, 150:350] = 255
    shares = []
    for changed in (recipe.transform, scaled_transform(recipe, 0.5**0.5), scaled_transform(recipe, 2**0.5)):
        assert changed is not None and changed.mean == recipe.transform.mean
        found = changed.evaluation()(image)
        assert found.shape == (3, changed.size, changed.size)
        shares.append(float(found.float().mean()) / 255)
    assert shares[0] == pytest.approx(
        (200 / (400 * recipe.transform.size / recipe.transform.resizing.side)) ** 2, abs=0.01
    )
    assert shares == pytest.approx([shares[0]] * 3, abs=0.01)


def test_what_takes_no_other_sizes_and_no_teacher_of_the_training(tmp_path: Path):
    text = "dataset: {name: folder, root: x}\nloss: {name: triplet}\ntransform: {name: imagenet}\n"
    vit = parse_recipe(f"{text}backbone: {{name: vit}}\n", "recipe.yaml")
    message = "^--with scales: needs images of 158 x 158 pixels too, but backbone: vit needs transform.size 224, got"
    refuses(message, scaled_transform, vit, 0.5**0.5)
    small = parse_recipe(TINY_RECIPE, "recipe.yaml", ["transform.size=9"])
    message = "^--with scales: needs images of 6 x 6 pixels too, but transform.size: got 6"
    refuses(message, scaled_transform, small, 0.5**0.5)
    text = TINY_RECIPE + f"regularizers: [{{name: distill, teacher: {tmp_path / 'gone'}}}]\n"
    recipe = parse_recipe(text, "recipe.yaml", is_trained=True)
    assert recipe.regularizers and scaled_transform(recipe, 0.5).size == recipe.transform.size // 2
