"""Every recipe of re-identification: its values, the width of its network, and that it trains in miniature."""

from pathlib import Path

import pytest
import timm
import torch

from dmlkit.backbones import SmallCNN
from dmlkit.backbones.base import BackboneConfig
from dmlkit.datasets import GlyphsConfig
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.transforms import ImageNetConfig
from tests.conftest import ROOT
from tests.recipe.test_paper_recipes import RESULT, shrunk_sampler

RECIPES = {path.stem: path for path in sorted((ROOT / "recipes" / "reid").glob("*.yaml"))}
WIDTHS = {"bag_of_tricks": 2048, "megadescriptor": 1536, "miewid": 2152, "products": 512, "tracker": 512}


def miniature(recipe: Recipe) -> Recipe:
    """The recipe on 48 glyphs of 16 pixels with a tiny network of 16 features; all else stays."""
    freezing = {field: getattr(recipe.backbone, field) for field in BackboneConfig.model_fields if field != "name"}
    assert recipe.transform is not None
    changes = {
        "dataset": GlyphsConfig(classes=24, images_per_class=4, size=16),
        "transform": ImageNetConfig(size=16, resize=18, augment=recipe.transform.augment),
        "backbone": SmallCNN.Config(width=4, **freezing),
        "embedding_dim": 16,
        "sampler": shrunk_sampler(recipe.sampler),
        "schedule": recipe.schedule.model_copy(update={"warmup_epochs": min(recipe.schedule.warmup_epochs, 1)}),
        "training": recipe.training.model_copy(
            update={"epochs": 2, "accumulate": min(recipe.training.accumulate, 2), "workers": 0}
        ),
    }
    return Recipe(**(dict(recipe) | changes))


@pytest.mark.parametrize("name", WIDTHS)
def test_each_takes_steps(name: str, tmp_path: Path):
    train(miniature(read_recipe(RECIPES[name])), tmp_path / "run", device="cpu")
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert len(rows) == 2 and all(abs(row.loss) < float("inf") for row in rows)
    assert rows[-1].validation is not None and 0 < rows[-1].validation["map"] <= 1


@pytest.mark.parametrize("name", ["bag_of_tricks", "tracker", "miewid", "megadescriptor"])
def test_a_tall_box_is_seen_from_head_to_foot(name: str):
    transform = read_recipe(RECIPES[name]).transform
    assert transform is not None
    box = torch.zeros(3, 256, 128, dtype=torch.uint8)
    box[0, :16], box[2, -16:] = 255, 255
    seen = transform.evaluation()(box)
    assert seen[0, 0].float().mean() == 255 and seen[2, -1].float().mean() == 255


@pytest.mark.parametrize("name", RECIPES)
def test_headers_say_where_the_values_are_from(name: str):
    text = RECIPES[name].read_text(encoding="utf-8")
    assert RESULT in text and "\n# Published: " in text
    assert f"# Run:       dmlkit train recipes/reid/{name}.yaml --set dataset." in text
    assert max(map(len, text.splitlines())) <= 120, name
    assert WIDTHS[name] == read_recipe(RECIPES[name]).embedding_dim and set(RECIPES) == set(WIDTHS)


@pytest.mark.parametrize("name", ["megadescriptor", "miewid"])
def test_embeddings_are_as_wide_as_the_features_of_the_network(name: str):
    recipe = read_recipe(RECIPES[name])
    with torch.device("meta"):
        network = timm.create_model(recipe.backbone.model.partition(".")[0], num_classes=0)
    assert network.num_features == recipe.embedding_dim


def test_margins_of_miewid_are_those_of_its_code():
    """From 0.5 for the smallest class, of 4 photos, to 0.2 for a very large one, by the fourth root of its size."""
    dynamic = read_recipe(RECIPES["miewid"]).loss.dynamic
    counts = torch.tensor([4, 16, 81, 10**9])
    roots = (1 / counts.double().sqrt()).sqrt()
    scaled = (roots - roots.min()) / (roots.max() - roots.min()) * (0.5 - 0.2) + 0.2
    margins = dynamic.factor * counts.double() ** -dynamic.exponent + dynamic.least
    torch.testing.assert_close(margins, scaled, atol=3e-3, rtol=0)
