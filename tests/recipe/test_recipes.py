"""Every recipe that comes with dmlkit is valid, trains in miniature, and says what was published.

Those of Cars196 have one budget for all losses.
"""

import json
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from dmlkit.backbones import SmallCNN
from dmlkit.backbones.base import BackboneConfig
from dmlkit.datasets import GlyphsConfig
from dmlkit.distributed.launch import start_ranks
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.overrides import find_recipes
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.samplers import Random
from dmlkit.training.train import train
from dmlkit.transforms import ImageNetConfig
from tests.conftest import ROOT, refuses
from tests.datasets import trees

PAPERS = ("proxy_gml", "proxy_isa", "cgml", "grouplet", "mpa")
RECIPES = [path for paper in PAPERS for path in sorted((ROOT / "recipes" / paper).glob("[!_]*.yaml"))]
# Recipes of one method that differ in their dataset, which is replaced by glyphs, and in its epochs train alike.
ON_DATASETS = re.compile("_?(cub200|cars196|sop|inshop)")
RECIPES_REALITY_CHECK = sorted((ROOT / "recipes" / "reality_check").glob("[!_]*.yaml"))
METHODS = list({(path.parent, ON_DATASETS.sub("", path.stem)): path for path in RECIPES}.values())
METHODS += RECIPES_REALITY_CHECK
ROW = re.compile(r"--set .*")
RECIPES_CARS = sorted((ROOT / "recipes" / "cars").glob("[!_]*.yaml"))
RECIPES_REID = {path.stem: path for path in sorted((ROOT / "recipes" / "reid").glob("*.yaml"))}
RESULT = "# Result:    not run here: data and weights are not on this machine."


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def header(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return text[: text.index("extends:")].splitlines()


def rows(path: Path) -> list[list[str]]:
    """The overrides of each row of the header, as a shell would read them; rows of one line have a gap between them."""
    lines = [match[0] for line in header(path) if (match := ROW.search(line))]
    found = [shlex.split(row) for line in lines for row in re.split("  +(?=--set)", line)]
    return [[word for word in words if word != "--set"] for words in found]


def shrunk_sampler(sampler: Any) -> Any:
    if isinstance(sampler, Random.Config):
        return sampler.model_copy(update={"batch_size": 12})
    return sampler.model_copy(update={"classes_per_batch": 3, "images_per_class": 2})


def miniature(recipe: Recipe, epochs: int = 3, **others: Any) -> Recipe:
    """The recipe on 48 glyphs of 16 pixels with a tiny network; all else stays, and is checked again.

    But ProxyGML's ratio: 0.05 of the proxies of 6 classes is less than one.
    """
    freezing = {field: getattr(recipe.backbone, field) for field in BackboneConfig.model_fields if field != "name"}
    images = {"classes": 12, "images_per_class": 4, "size": 16}
    training = {"epochs": epochs, "accumulate": min(recipe.training.accumulate, 2), "workers": 0}
    changes = {
        "dataset": GlyphsConfig(**images, validation_fraction=recipe.dataset.validation_fraction),
        "transform": recipe.transform.model_copy(update={"size": 16, "resize": 18}),
        "backbone": SmallCNN.Config(width=4, **freezing),
        "embedding_dim": 8,
        "loss": recipe.loss.model_copy(update={"ratio": 0.5}) if recipe.loss.name == "proxy_gml" else recipe.loss,
        "sampler": shrunk_sampler(recipe.sampler),
        "schedule": recipe.schedule.model_copy(update={"warmup_epochs": min(recipe.schedule.warmup_epochs, epochs)}),
        "training": recipe.training.model_copy(update=training),
    }
    return Recipe(**(dict(recipe) | changes | others))


@pytest.mark.parametrize("path", RECIPES, ids=name)
def test_every_row_of_a_recipe_is_valid(path: Path):
    as_written, changes = read_recipe(path), rows(path)
    assert ["dataset.root=PATH"] in changes
    for overrides in changes:
        assert read_recipe(path, overrides) != as_written, overrides


@pytest.mark.slow
@pytest.mark.parametrize("path", METHODS, ids=name)
def test_every_method_takes_steps(path: Path, tmp_path: Path):
    """Three epochs of two steps: Proxy-ISA's memory and filter, warm-ups and the end of freezing included."""
    train(miniature(read_recipe(path)), tmp_path / "run", device=start_ranks("cpu"))
    epochs = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(epochs) == 3 and all(abs(epoch["loss"]) < float("inf") for epoch in epochs)


@pytest.mark.parametrize("path", [*RECIPES, *RECIPES_CARS, *RECIPES_REALITY_CHECK, *RECIPES_REID.values()], ids=name)
def test_headers_say_what_was_published_and_how_to_run(path: Path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[1].startswith(f"# Run:       dmlkit train {path.relative_to(ROOT)} --set dataset.")
    assert any(line.startswith("# Published: ") for line in lines) and max(map(len, lines)) <= 120
    results = [line for line in lines if line.startswith("# Result:    ")]
    assert results and (path in RECIPES_CARS or results == [RESULT])
    if path in RECIPES:
        assert all(line.startswith("# ") for line in header(path)) and re.search(r"Tables? \d", lines[0])
        assert any(re.match(r"# Published: R@1 \d\d\.\d", line) for line in lines) and len(lines) <= 40


def test_every_paper_is_listed(dmlkit):
    result = dmlkit("list", "recipes", "--root", ROOT / "recipes").ok()
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
    recipes = find_recipes(tmp_path)
    assert [(header.path.name, header.summary, header.published) for header in recipes[folder]] == [
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
        (("losses", "--root", "my own"), "applies only to recipes; use dmlkit list recipes --root 'my own'"),
        (("recipe",), "unknown family 'recipe'; did you mean 'recipes'?"),
    ],
)
def test_listings_that_cannot_be(dmlkit, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = dmlkit("list", *arguments)
    assert result.code == 2 and message in result.err.replace("\n", " ")


SMALL = {  # of the same family as the network of the recipe
    "megadescriptor": ("swin_tiny_patch4_window7_224", {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1]}),
    "miewid": ("test_efficientnet", {}),
    "products": ("test_vit", {}),
}


@pytest.mark.parametrize("name", RECIPES_REID)
def test_each_of_re_identification_takes_steps(name: str, tmp_path: Path):
    recipe = read_recipe(RECIPES_REID[name])
    backbone = {"weights": None}
    if name in SMALL:
        architecture, arguments = SMALL[name]
        arguments |= {} if name == "miewid" else {"img_size": 32}
        (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture, "model_args": arguments}))
        backbone["model"] = f"local-dir:{tmp_path}"
    changes = {
        "dataset": GlyphsConfig(classes=24, images_per_class=4, size=32),
        "transform": ImageNetConfig(size=32, resize=36, augment=recipe.transform.augment),
        "backbone": recipe.backbone.model_copy(update=backbone),
        "embedding_dim": recipe.embedding_dim,
    }
    if name in ("megadescriptor", "miewid"):  # without a layer after the network
        changes["embedding_dim"] = timm.create_model(architecture, num_classes=0, **arguments).num_features
    train(miniature(recipe, epochs=1, **changes), tmp_path / "run", device="cpu")
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert len(rows) == 1 and all(abs(row.loss) < float("inf") for row in rows)
    assert rows[-1].validation is not None and 0 < rows[-1].validation["map"] <= 1


@pytest.mark.parametrize("name", ["bag_of_tricks", "tracker", "miewid", "megadescriptor"])
def test_a_tall_box_is_seen_from_head_to_foot(name: str):
    transform = read_recipe(RECIPES_REID[name]).transform
    box = torch.zeros(3, 256, 128, dtype=torch.uint8)
    box[0, :16], box[2, -16:] = 255, 255
    seen = transform.evaluation()(box)
    assert seen[0, 0].float().mean() == 255 and seen[2, -1].float().mean() == 255


@pytest.mark.parametrize("name", ["megadescriptor", "miewid"])
def test_embeddings_are_as_wide_as_the_features_of_the_network(name: str):
    recipe = read_recipe(RECIPES_REID[name])
    with torch.device("meta"):
        network = timm.create_model(recipe.backbone.model.partition(".")[0], num_classes=0)
    assert network.num_features == recipe.embedding_dim


def test_margins_of_miewid_are_those_of_its_code():
    """From 0.5 for the smallest class, of 4 photos, to 0.2 for a very large one, by the fourth root of its size."""
    dynamic = read_recipe(RECIPES_REID["miewid"]).loss.dynamic
    counts = torch.tensor([4, 16, 81, 10**9])
    roots = (1 / counts.double().sqrt()).sqrt()
    scaled = (roots - roots.min()) / (roots.max() - roots.min()) * (0.5 - 0.2) + 0.2
    margins = dynamic.factor * counts.double() ** -dynamic.exponent + dynamic.least
    torch.testing.assert_close(margins, scaled, atol=3e-3, rtol=0)


RECIPES_START = sorted((ROOT / "recipes" / "start").glob("[!_]*.yaml"))
PUBLISHED = {"dinov2_s": (224, 224), "dinov3_s": (256, 256), "siglip_b": (224, 248), "convnext_t": (224, 256)}
PUBLISHED |= {"megadescriptor_t": (224, 224), "dinov2_b": (224, 224), "siglip2_b": (224, 248), "pe_core_b": (224, 224)}
PUBLISHED |= {"tipsv2_b": (224, 224), "eva02_l": (448, 448)}
PUBLISHED |= {f"{how}_lite0": (224, 256) for how in ("frozen", "head_views", "full")}


def test_every_network_is_there_once_but_lite0_which_needs_no_download():
    assert {path.stem for path in RECIPES_START} == {*PUBLISHED}


@pytest.mark.parametrize("path", RECIPES_START, ids=lambda path: path.stem)
def test_they_read_without_network_and_without_photos(path, monkeypatch: pytest.MonkeyPatch, tmp_path):
    def refuse(*_, **__):
        raise OSError("a test reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(path, ["dataset.root=elsewhere"])
    assert (recipe.transform.size, recipe.transform.resizing.side) == PUBLISHED[path.stem]
    assert timm.is_model(recipe.backbone.architecture or recipe.backbone.model)
    assert recipe.backbone.tuning.name == ("none" if path.stem.startswith(("frozen", "head_views")) else "full")
    assert recipe.dataset.root == "elsewhere"


def test_check_ends_with_the_license_of_the_weights(dmlkit):
    assert dmlkit("check", "start/full_lite0").out.endswith("# pretrained weights: license apache-2.0\n")
    unfree = dmlkit("check", "start/megadescriptor_t").out.splitlines()[-1]
    assert unfree == "# pretrained weights: license unknown"  # without network: it is in the config.json of the Hub
    assert "license" not in dmlkit("check", "glyphs/proxy_anchor").out


RECIPES_GLYPHS = sorted((ROOT / "recipes" / "glyphs").glob("*.yaml"))
MINIATURE = (
    "dataset.classes=80",
    "dataset.images_per_class=20",
    "dataset.size=16",
    "transform.size=16",
    "backbone.width=4",
    "embedding_dim=8",
    "training.epochs=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES_GLYPHS, ids=lambda path: path.stem)
def test_glyph_recipes_train(dmlkit, recipe, tmp_path):
    options = [part for override in MINIATURE for part in ("--set", override)]
    dmlkit("train", recipe, "-o", tmp_path / "run", "--device", "cpu", *options).ok()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    # four validation classes: embeddings that collapse to a point find 1 in 4
    assert rows[0]["loss"] == rows[0]["loss"] and rows[0]["validation"]["recall@1"] > 0.3


OF_CARS = {
    "dataset": GlyphsConfig(classes=24, images_per_class=6, size=16, validation_fraction=0.2),
    "transform": ImageNetConfig(size=16, resize=18),
    "embedding_dim": 16,
}


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES_CARS, ids=name)
def test_each_of_cars_takes_steps(path: Path, tmp_path: Path):
    """Proxy-ISA opens its memory in the second epoch, and its filter in the third."""
    epochs = 3 if path.stem == "proxy_isa" else 1
    train(miniature(read_recipe(path), epochs, **OF_CARS), tmp_path / "run", device="cpu")
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert len(rows) == epochs and all(abs(row.loss) < float("inf") for row in rows)
    assert rows[-1].validation is not None and 0 < rows[-1].validation["map@r"] <= 1


def test_all_of_cars_have_one_budget_but_for_the_epochs_that_the_weights_of_proxy_isa_need():
    recipes = {path.stem: read_recipe(path) for path in RECIPES_CARS}
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
        read_recipe(RECIPES_CARS[0], [f"dataset.root={root}"]).dataset
        for root in (tmp_path / "half", trees.cars_kaggle(tmp_path / "whole"))
    )
    classes = {split: half.build(split).class_names for split in ("train", "validation", "test")}
    assert [(len(names), names[0]) for names in classes.values()] == [(78, "001"), (20, "079"), (98, "099")]
    assert whole.build("test").class_names == (trees.CARS[99], trees.CARS[100])
    (tmp_path / "half" / "197").mkdir()
    refuses(r"no Cars196 in this folder; expected .*196 folders of classes", half.build, "test")
