"""Label paths from tables, nested folders and glyphs: the classes of each level, and paths of unequal depth."""

import csv
import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dmlkit.datasets import FolderConfig, GlyphsConfig, TableConfig, VectorsConfig
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import class_subset
from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.experiment import assemble
from tests.conftest import refuses
from tests.datasets import trees

PATHS = ("corvids/crow/corax", "corvids/crow/corone", "corvids/magpie/pica", "gulls/gull/argus", "gulls/tern/rissa")
LEVELS = ("family", "genus", "species")


def table(root: Path, paths: tuple[str, ...], **columns: list[str]) -> TableConfig:
    with (root / "birds.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", *columns])
        for place, path in enumerate(paths):
            for index in range(2):
                image = f"{place}-{index}.jpg"
                trees.photo(root / image, 10 * place + index)
                rows.writerow([image, path, *(column[place] for column in columns.values())])
    return TableConfig(file=str(root / "birds.csv"), levels=LEVELS, validation_fraction=0)


def vectors(root: Path) -> DatasetConfig:
    np.save(root / "x.npy", np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32))
    np.save(root / "y.npy", np.array(PATHS).repeat(2))
    arrays = str(root / "x.npy"), str(root / "y.npy")
    return VectorsConfig(embeddings=arrays[0], labels=arrays[1], levels=LEVELS, validation_fraction=0)


SOURCES: dict[str, Callable[[Path], DatasetConfig]] = {
    "folder": lambda root: FolderConfig(root=str(trees.birds(root, PATHS, 2)), levels=LEVELS, validation_fraction=0),
    "table": lambda root: table(root, PATHS),
    "vectors": vectors,
}


@pytest.mark.parametrize("source", ["folder", "table", "vectors"])
def test_the_classes_of_each_level_are_those_of_the_paths(source: str, tmp_path: Path):
    images = SOURCES[source](tmp_path).build("all")
    assert images.class_names == PATHS and tuple(images.levels) == LEVELS
    for depth, codes in enumerate(images.levels.values(), start=1):
        for (one, first), (other, second) in product(enumerate(PATHS), repeat=2):
            same = first.split("/")[:depth] == second.split("/")[:depth]
            assert (codes[one] == codes[other]).item() == same
    assert images.super_classes is not None and images.super_classes.tolist() == images.levels["genus"].tolist()


def test_folders_of_splits_are_nested_too(tmp_path: Path):
    trees.birds(tmp_path, ("train/a/b/c", "train/a/b/d", "test/a/e/f"), 2)
    config = FolderConfig(root=str(tmp_path), levels=LEVELS, validation_fraction=0)
    assert config.build("train").class_names == ("a/b/c", "a/b/d") and config.build("test").class_names == ("a/e/f",)
    assert config.build("all").levels["genus"].tolist() == [0, 0, 1]


def test_a_subset_of_classes_keeps_its_levels(tmp_path: Path):
    images = SOURCES["folder"](tmp_path).build("all")
    some = class_subset(images, [4, 2, 0])
    assert some.class_names == (PATHS[4], PATHS[2], PATHS[0])
    assert some.levels["family"].tolist() == images.levels["family"][[4, 2, 0]].tolist()
    assert some.levels["species"].tolist() == [0, 1, 2]
    assert class_subset(FolderConfig(root=str(tmp_path), validation_fraction=0).build("all"), [0]).levels == {}


def test_super_classes_are_two_levels(tmp_path: Path):
    config = table(tmp_path, ("a", "b", "c", "d"), super_class=["x", "y", "x", "y"])
    images = config.model_copy(update={"levels": ()}).build("all")
    assert {name: codes.tolist() for name, codes in images.levels.items()} == {
        "super_class": [0, 1, 0, 1],
        "class": [0, 1, 2, 3],
    }
    with pytest.raises(UserError, match=r"dataset.levels: table has super-classes of its own; remove this key"):
        table(tmp_path, PATHS, super_class=["x"] * 5).build("all")


def test_folders_of_unequal_depth_are_named(tmp_path: Path):
    config = SOURCES["folder"](tmp_path)
    trees.photos(tmp_path, ("corvids/0.jpg", "gulls/gull/0.jpg", "gulls/gull/argus/old/0.jpg"), 91)
    (tmp_path / "owls").mkdir()
    faults = sorted(config.listing().faults)
    assert [fault.removeprefix(f"{tmp_path}/") for fault in faults] == [
        "corvids/0.jpg: lies in a family folder, expected folders family/genus/species; move it",
        "gulls/gull/0.jpg: lies in a family/genus folder, expected folders family/genus/species; move it",
        "gulls/gull/argus/old/0.jpg: lies deeper than the 3 levels family/genus/species; move it up or name one more "
        "level",
        "owls: has no genus folders, expected family/genus/species; add one or remove it",
    ]


def test_a_flat_folder_is_no_hierarchy(tmp_path: Path):
    trees.photos(tmp_path, ("crow/0.jpg", "dove/0.jpg"))
    with pytest.raises(UserError, match=r"crow/0.jpg: lies in a family folder, .* \(1 more folders are wrong\)"):
        FolderConfig(root=str(tmp_path), levels=LEVELS).listing()


def test_labels_of_unequal_depth_are_named_with_their_lines(tmp_path: Path):
    config = table(tmp_path, (*PATHS, "gulls/gull", "gulls//argus", "a/b/c/d"))
    where = f"{tmp_path}/birds.csv"
    expected = "expected 3: family/genus/species"
    assert config.listing().faults == [
        *(f"{where}:{line}: the class 'gulls/gull' has 2 levels, {expected}" for line in (12, 13)),
        *(
            f"{where}:{line}: the class 'gulls//argus' has an empty level, expected family/genus/species"
            for line in (14, 15)
        ),
        *(f"{where}:{line}: the class 'a/b/c/d' has 4 levels, {expected}" for line in (16, 17)),
    ]


@pytest.mark.parametrize("levels", [("genus",), ("genus", "genus"), ("Genus", "species"), ("genus:x", "species")])
def test_names_of_levels(levels: tuple[str, ...]):
    with pytest.raises(ValidationError, match=r"expected at least two different names|String should match"):
        FolderConfig(root="photos", levels=levels)


def test_glyphs_have_scripts_and_letters():
    config = GlyphsConfig(classes=60, images_per_class=2, levels=("script", "letter", "character"))
    images, plain = config.build("all"), GlyphsConfig(classes=60, images_per_class=2).build("all")
    assert [name.rpartition("/")[2] for name in images.class_names] == list(plain.class_names)
    assert all(torch.equal(images.sample(index), plain.sample(index)) for index in range(0, 120, 17))
    assert len(images.levels["script"].unique()) < len(images.levels["letter"].unique()) < 60
    with pytest.raises(UserError, match=r"dataset.levels: needs shapes_per_class 1"):
        GlyphsConfig(classes=60, shapes_per_class=2, levels=("script", "letter", "character")).build("all")
    with pytest.raises(UserError, match=r"has 3 levels, expected 2: script/character; rename it or change the levels"):
        GlyphsConfig(classes=60, levels=("script", "character")).build("all")


TERMS = "regularizers: [{name: hierarchy, num_proxies: 8, levels: true}]\n"
SAMPLER = "sampler: {name: hierarchical, super_classes_per_batch: 2, classes_per_super_class: 1, level: LEVEL}\n"
THREE = ", levels: [script, letter, character]"


def recipe(level: str = "script", metric: str = "h_ap", levels: str = THREE, last: str = TERMS + SAMPLER) -> str:
    dataset = f"dataset: {{name: glyphs, classes: 300, images_per_class: 2{levels}}}"
    return f"{dataset}\nloss: {{name: triplet}}\nmetrics: [map@r, {metric}]\n{last.replace('LEVEL', level)}"


def test_a_recipe_with_levels_is_assembled():
    experiment = assemble(parse_recipe(recipe(), "r.yaml"))
    (term,) = experiment.objective.regularizers
    assert torch.equal(term.levels[:, 0], experiment.train.levels["script"])
    classes = experiment.train.labels[experiment.sampler.batches(0)[0]]
    assert len(experiment.train.levels["script"][classes].unique()) == 2
    assert experiment.recipe.dataset.build("test").levels.keys() == {"script", "letter", "character"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "map@r:font"}, "r.yaml:3: metrics.1: map@r:font: unknown level 'font'; expected one of script"),
        ({"level": "character"}, "r.yaml:5: sampler.level: got 'character'; expected one of script, letter"),
        ({"level": "font"}, "r.yaml:5: sampler.level: got 'font'; expected one of script, letter"),
        ({"levels": "", "last": ""}, "r.yaml:3: metrics.1: h_ap: dataset glyphs has no levels; set dataset.levels"),
        (
            {"levels": "", "last": TERMS, "metric": "map@5"},
            "r.yaml:4: regularizers: hierarchy.levels needs a dataset with levels; set dataset.levels",
        ),
        (
            {"levels": "", "last": SAMPLER, "metric": "map@5"},
            "r.yaml:4: sampler.level: got 'script'; the dataset has no levels; set dataset.levels",
        ),
    ],
)
def test_levels_that_the_dataset_lacks(change: dict[str, str], message: str):
    refuses(f"^{message}", lambda: assemble(parse_recipe(recipe(**change), "r.yaml")))


@pytest.mark.slow
def test_a_run_and_its_embeddings_have_the_same_metrics_of_levels(tmp_path, monkeypatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    others = "training: {epochs: 1, select_by: h_ap}\nbackbone: {name: small_cnn, width: 4}\nembedding_dim: 4\n"
    Path("r.yaml").write_text(recipe() + others)
    assert dmlkit("train", "r.yaml", "-o", "run").code == 0
    wanted = ["--metric", "recall@1:letter", "--metric", "h_ap", "--metric", "map@r", "--json"]
    of_run = dmlkit("eval", "run", *wanted)
    assert dmlkit("embed", "run", "--split", "test", "-o", "points").code == 0
    of_points = dmlkit("eval", "points", *wanted)
    assert of_run.code == of_points.code == 0, of_points.err
    metrics = [json.loads(result.out)["metrics"] for result in (of_run, of_points)]
    assert metrics[0] == pytest.approx(metrics[1]) and set(metrics[0]) == {"recall@1:letter", "h_ap", "map@r"}
    message = "recall@1:font: unknown level 'font'; expected one of script, letter, character"
    dmlkit("eval", "run", "--metric", "recall@1:font").refused(message)
