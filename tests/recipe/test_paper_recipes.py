"""Every recipe of a paper, and every variant that its header spells out, is valid and trains in miniature."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dmlkit.backbones import SmallCNN
from dmlkit.backbones.base import BackboneConfig
from dmlkit.component import ComponentConfig
from dmlkit.datasets import GlyphsConfig
from dmlkit.distributed.launch import start_fabric
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.overrides import find_recipes
from dmlkit.recipe.schema import Recipe
from dmlkit.samplers import Random
from dmlkit.training.train import train
from tests.conftest import ROOT

PAPERS = ("proxy_gml", "proxy_isa", "cgml", "grouplet", "mpa")
RECIPES = [path for paper in PAPERS for path in sorted((ROOT / "recipes" / paper).glob("[!_]*.yaml"))]
# Recipes of one method that differ in their dataset, which is replaced by glyphs, and in its epochs train alike.
ON_DATASETS = re.compile("_?(cub200|cars196|sop|inshop)")
METHODS = list({(path.parent, ON_DATASETS.sub("", path.stem)): path for path in RECIPES}.values())
ROW = re.compile(r"--set .*")
RESULT = "# Result:    not run here: data and weights are not on this machine."


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def header(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return text[: text.index("extends:")].splitlines()


def rows(path: Path) -> list[list[str]]:
    """The overrides of each line of the header, as a shell would read them."""
    found = [shlex.split(match[0]) for line in header(path) if (match := ROW.search(line))]
    return [[word for word in words if word != "--set"] for words in found]


def shrunk_sampler(sampler: Any) -> Any:
    if isinstance(sampler, Random.Config):
        return sampler.model_copy(update={"batch_size": 12})
    return sampler.model_copy(update={"classes_per_batch": 3, "images_per_class": 2})


def miniature(recipe: Recipe) -> Recipe:
    """The recipe on 48 glyphs of 16 pixels with a tiny network; all else stays, and is checked again.

    But ProxyGML's ratio: 0.05 of the proxies of 6 classes is less than one.
    """
    freezing = {field: getattr(recipe.backbone, field) for field in BackboneConfig.model_fields if field != "name"}
    changes = {
        "dataset": GlyphsConfig(
            classes=12, images_per_class=4, size=16, validation_fraction=recipe.dataset.validation_fraction
        ),
        "transform": recipe.transform.model_copy(update={"size": 16, "resize": 18}),
        "backbone": SmallCNN.Config(width=4, **freezing),
        "embedding_dim": 8,
        "loss": recipe.loss.model_copy(update={"ratio": 0.5}) if recipe.loss.name == "proxy_gml" else recipe.loss,
        "sampler": shrunk_sampler(recipe.sampler),
        "schedule": recipe.schedule.model_copy(update={"warmup_epochs": min(recipe.schedule.warmup_epochs, 3)}),
        "training": recipe.training.model_copy(update={"epochs": 3, "workers": 0}),
    }
    return Recipe(**(dict(recipe) | changes))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_every_row_of_a_recipe_is_valid(path: Path):
    as_written = read_recipe(path)
    for overrides in rows(path):
        assert "dataset.root=PATH" in overrides or read_recipe(path, overrides) != as_written, overrides


@pytest.mark.slow
@pytest.mark.parametrize("path", METHODS, ids=name)
def test_every_method_takes_steps(path: Path, tmp_path: Path):
    """Three epochs of two steps: Proxy-ISA's memory and filter, warm-ups and the end of freezing included."""
    train(miniature(read_recipe(path)), tmp_path / "run", device=start_fabric("cpu"))
    epochs = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(epochs) == 3 and all(abs(epoch["loss"]) < float("inf") for epoch in epochs)


def backbones() -> dict[str, Recipe]:
    """One recipe for each backbone that differs in more than what is frozen."""
    found: dict[str, Recipe] = {}
    for path in RECIPES:
        recipe = read_recipe(path)
        found.setdefault(f"{recipe.backbone.name}-{pooling(recipe).name}", recipe)
    return found


def pooling(recipe: Recipe) -> ComponentConfig:
    return recipe.backbone.pooling  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_headers_say_what_was_published_and_what_was_run(path: Path):
    lines = header(path)
    assert all(line.startswith("# ") for line in lines)
    assert re.search(r"Tables? \d", lines[0])
    assert any(re.match(r"# Published: R@1 \d\d\.\d", line) for line in lines)
    assert any(f"{path.relative_to(ROOT)} --set dataset.root=PATH" in line for line in lines)
    assert RESULT in lines
    screen = path.read_text(encoding="utf-8").splitlines()
    assert len(screen) <= 40 and max(map(len, screen)) <= 120


def test_every_paper_is_listed(dmlkit):
    result = dmlkit("list", "recipes", "--root", ROOT / "recipes")
    assert result.code == 0, result.err
    papers = {folder.name: headers for folder, headers in find_recipes(ROOT / "recipes").items()}
    assert {*PAPERS, "glyphs"} <= set(papers)
    assert [header.path for paper in PAPERS for header in papers[paper]] == RECIPES
    for paper in PAPERS:
        assert str(ROOT / "recipes" / paper)[:40] in result.out.replace("\n", "")
    published = {name(header.path): header.published for paper in PAPERS for header in papers[paper]}
    assert published["proxy_isa/inshop"] == "R@1 92.3"
    assert published["cgml/n_pair_cub200"] == "R@1 52.1, R@2 64.2, R@4 75.4, R@8 84.5, NMI 60.4, F1 28.5"


def test_a_listing_shows_headers_and_skips_what_is_no_recipe(dmlkit, tmp_path):
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "_base.yaml").write_text("# hidden part\nloss: {name: triplet}\n")
    (folder / "study.yaml").write_text("# hidden study\nrecipe: one.yaml\n")
    (folder / "one.yaml").write_text("# One [bold].\n# Published: R@1 1.0\nloss: {name: triplet}\n# Published: 9.9\n")
    (folder / "two.yaml").write_text("# yaml-language-server: $schema=x\n# Two.\nextends: _base.yaml\n")
    (folder / "three.yaml").write_text("loss: {name: triplet}\n")
    found = find_recipes(tmp_path)
    assert [(header.path.name, header.summary, header.published) for header in found[folder]] == [
        ("one.yaml", "One [bold].", "R@1 1.0"),
        ("three.yaml", "", ""),
        ("two.yaml", "Two.", ""),
    ]
    result = dmlkit("list", "recipes", "--root", tmp_path)
    assert result.code == 0 and "One [bold]." in result.out and "R@1 1.0" in result.out
    assert "hidden" not in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recipes", "--root", "nowhere"), "nowhere: no such folder"),
        (("recipes", "--root", "."), "contains no recipes"),
        (("losses", "--root", "."), "--root . applies only to recipes"),
        (("recipe",), "unknown family 'recipe'; did you mean 'recipes'?"),
    ],
)
def test_listings_that_cannot_be(dmlkit, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = dmlkit("list", *arguments)
    assert result.code == 2 and message in result.err.replace("\n", " ")
