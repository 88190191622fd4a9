"""Test-time augmentation against points computed image by image."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.in_memory import embed_dataset
from dmlkit.embedding.trained import TrainedModel
from dmlkit.evaluation.evaluate import SecondScoring, score_split
from dmlkit.evaluation.run import with_mirror_images
from dmlkit.loading.cache import images_of_split
from dmlkit.metrics.base import Points
from dmlkit.metrics.scoring import score_retrieval
from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from tests.conftest import TINY_RECIPE, Result


@pytest.mark.parametrize("manifold", ["sphere", "poincare"])
def test_the_mean_of_an_image_and_its_mirror_image(manifold: str):
    recipe = parse_recipe(TINY_RECIPE + f"manifold: {{name: {manifold}}}\n", "recipe.yaml")
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"workers": 0})})
    torch.manual_seed(0)
    model, dataset = build_model(recipe).eval(), images_of_split(recipe.dataset, "test")
    ranks = start_ranks("cpu")
    own = embed_dataset(ranks, model, dataset, recipe.transform, workers=0)
    other = with_mirror_images(ranks, model, dataset, recipe, own)
    points = Points(other.points, other.labels, model.manifold)
    trained = TrainedModel.of(recipe, model)
    found = score_split(ranks, trained, own, dataset, split="test", second=SecondScoring(points=points))
    pixels = torch.stack([dataset.sample(row) for row in range(len(dataset))])
    with torch.no_grad():
        both = [model.manifold.to_features(model(images)) for images in (pixels, pixels.flip(3))]
        points = model.manifold.from_features((both[0] + both[1]) / 2)
    expected = score_retrieval(points, dataset.labels, manifold=model.manifold, metrics=recipe.metrics)
    assert found.alternative is not None
    assert found.alternative.values == pytest.approx(
        expected.values, abs=0.01
    )  # batches of other sizes round otherwise
    assert found.alternative.values != found.scores.values


def test_where_it_does_not_apply(tmp_path: Path, dmlkit: Callable[..., Result]):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY_RECIPE)
    wrong = dmlkit("eval", recipe, "--untrained", "--tta", "flip")
    assert wrong.code == 2 and "--tta does not apply to --untrained" in wrong.err
