"""Every recipe of Cars196: one budget for all losses, its photos, and that it trains in miniature."""

from pathlib import Path

import pytest

from dmlkit.datasets import GlyphsConfig
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.transforms import ImageNetConfig
from tests.conftest import ROOT, refuses
from tests.datasets import trees
from tests.recipe.test_recipes import miniature

RECIPES = sorted((ROOT / "recipes" / "cars").glob("[!_]*.yaml"))


def name(path: Path) -> str:
    return path.stem


MINIATURE = {
    "dataset": GlyphsConfig(classes=24, images_per_class=6, size=16, validation_fraction=0.2),
    "transform": ImageNetConfig(size=16, resize=18),
    "embedding_dim": 16,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_each_takes_steps(path: Path, tmp_path: Path):
    """Proxy-ISA opens its memory in the second epoch, and its filter in the third."""
    epochs = 3 if path.stem == "proxy_isa" else 1
    train(miniature(read_recipe(path), epochs, **MINIATURE), tmp_path / "run", device="cpu")
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert len(rows) == epochs and all(abs(row.loss) < float("inf") for row in rows)
    assert rows[-1].validation is not None and 0 < rows[-1].validation["map@r"] <= 1


def test_all_have_one_budget_but_for_the_epochs_that_the_weights_of_proxy_isa_need():
    recipes = {path.stem: read_recipe(path) for path in RECIPES}
    first = recipes["proxy_anchor"]
    for loss, recipe in recipes.items():
        same = {"loss": first.loss, "sampler": first.sampler, "regularizers": first.regularizers}
        if loss == "proxy_isa":
            same["training"] = first.training
        assert recipe.model_copy(update=same) == first, loss
        sampler = recipe.sampler.model_dump()
        draws = 2 if sampler["name"] == "paired" else 1
        of_classes = draws * sampler.get("classes_per_batch", 0) * sampler.get("images_per_class", 0)
        assert sampler.get("batch_size", of_classes) == 112, loss
    volume = recipes["proxy_isa"].loss.model_dump()["volume"]
    photos_per_class = 3194 / 78  # of half of Cars196
    assert volume == 100 and 4 * volume < recipes["proxy_isa"].training.epochs * photos_per_class / 5


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_headers_say_what_was_published_and_how_to_run(path: Path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[1] == f"# Run:       dmlkit train recipes/cars/{path.stem}.yaml --set dataset.root=PATH"
    assert lines[2].startswith(("# Published: R@1 ", "# Published: no figure"))
    assert any(line.startswith("# Result:    ") for line in lines) and max(map(len, lines)) <= 120


def test_without_the_photos_one_line_says_where_they_are_and_how_they_must_lie(dmlkit, tmp_path: Path):
    refused = dmlkit(
        "train", "cars/proxy_anchor", "-o", tmp_path / "run", "--set", f"dataset.root={tmp_path / 'cars'}"
    ).refused()
    for words in ("no such folder", "196 folders of classes", "cars_annos.mat", "car_ims.tgz (md5 ", " from http://"):
        assert words in refused.err
    assert not (tmp_path / "run").exists()


def test_half_of_the_photos_and_all_of_them_are_read_by_the_same_key(tmp_path: Path):
    for number in range(1, 197):
        trees.photo(tmp_path / "half" / f"{number:03}" / "a.jpg", number)
    half, whole = (
        read_recipe(RECIPES[0], [f"dataset.root={root}"]).dataset
        for root in (tmp_path / "half", trees.cars_kaggle(tmp_path / "whole"))
    )
    classes = {split: half.build(split).class_names for split in ("train", "validation", "test")}
    assert [(len(names), names[0]) for names in classes.values()] == [(78, "001"), (20, "079"), (98, "099")]
    assert whole.build("test").class_names == (trees.CARS[99], trees.CARS[100])
    (tmp_path / "half" / "197").mkdir()
    refuses(r"no Cars196 in this folder; expected .*196 folders of classes", half.build, "test")
