"""Labels of what is embedded: one rule for folders and tables, and the run that the manifest names."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pyarrow import csv, parquet

from dmlkit.gallery.sources import open_points
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.images import images_at
from tests.conftest import Cli
from tests.datasets import trees

HOSTILE = "new\nline \x1b]0;title\x07"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A folder with ``run``; ``photos`` of two classes with one photo at the top; and ``table.csv`` of them."""
    folder = tmp_path_factory.mktemp("home")
    trained_once(folder)
    for number, name in enumerate(("crow/1.jpg", "crow/deep/2.jpg", "dove/1.jpg", "top.jpg")):
        trees.photo(folder / "photos" / name, number, (40, 30))
    (folder / "table.csv").write_text(
        "path,label,species,family,category,x_1,y_1,x_2,y_2\n"
        "photos/crow/1.jpg,c1,007,corvids/crows,a,,,,\n"
        "photos/dove/1.jpg,d1,010,doves,b,,,,\n"
        "photos/dove/1.jpg,d1,010,doves,c,0,0,20,20\n"
    )
    return folder


def pairs(items: dict[str, Any]) -> list[tuple[Path, str | None]]:
    return list(zip(map(Path, items["path"]), items["label"], strict=True))


def embedded(home: Path, source: Path, *options: object, dmlkit: Cli, output: Path) -> dict[str, Any]:
    dmlkit("embed", home / "run", source, "-o", output, "--device", "cpu", *options).ok()
    return parquet.read_table(output / "items.parquet").to_pydict()


def test_a_folder_labels_its_images_by_subfolder_as_in_a_gallery(home: Path, tmp_path: Path, dmlkit: Cli):
    items = embedded(home, home / "photos", dmlkit=dmlkit, output=tmp_path / "e")
    found = {path.relative_to(home / "photos").as_posix(): label for path, label in pairs(items)}
    assert found == {"top.jpg": None, "crow/1.jpg": "crow", "crow/deep/2.jpg": "crow", "dove/1.jpg": "dove"}
    assert dmlkit("gallery", "create", home / "run", home / "photos", "-o", tmp_path / "g").code == 0
    assert open_points(tmp_path / "g").labels == items["label"] == open_points(tmp_path / "e").labels
    assert labels_of(home / "photos", "none") == [None] * 4


def test_folders_of_a_model_with_levels_are_labels_with_all_levels(home: Path, tmp_path: Path, dmlkit: Cli):
    """As its dataset names the classes: calibration compares these names with those that it was trained on."""
    run, birds = shutil.copytree(home / "run", tmp_path / "run"), tmp_path / "birds"
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["dataset"] = {"name": "folder", "root": str(birds), "levels": ["family", "genus"]}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    names = {"corvids/crow/1.jpg": "corvids/crow", "corvids/crow/old/2.jpg": "corvids/crow", "gulls/3.jpg": "gulls"}
    for number, name in enumerate((*names, "4.jpg")):
        trees.photo(birds / name, number)
    items = embedded(tmp_path, birds, dmlkit=dmlkit, output=tmp_path / "e")
    found = {path.relative_to(birds).as_posix(): label for path, label in pairs(items)}
    assert found == {**names, "4.jpg": None}
    assert dmlkit("gallery", "create", run, birds / "gulls", "-o", tmp_path / "g").code == 0
    assert dmlkit("gallery", "add", tmp_path / "g", birds).code == 0
    assert sorted(map(str, open_points(tmp_path / "g").labels)) == ["None", "corvids/crow", "corvids/crow", "gulls"]


def labels_of(source: Path, labels: str | None) -> list[str | None]:
    images = images_at(source, labels)
    return images.label_names(images.labels)


def test_class_folders_below_train_and_test_are_labels(tmp_path: Path):
    for number, name in enumerate(("train/crow/1.jpg", "train/2.jpg", "test/dove/deep/3.jpg")):
        trees.photo(tmp_path / "split" / name, number)
    assert labels_of(tmp_path / "split", "folder") == ["dove", None, "crow"]


def test_a_column_of_a_table_is_the_label(home: Path, tmp_path: Path, dmlkit: Cli):
    columns = {"species": ["007", "010", "010"], "family": ["corvids/crows", "doves", "doves"], "none": [None] * 3}
    columns |= {"category": ["a", "b", "c"]}
    assert {name: labels_of(home / "table.csv", name) for name in columns} == columns
    items = embedded(home, home / "table.csv", "--labels", "category", dmlkit=dmlkit, output=tmp_path / "e")
    assert items["label"] == columns["category"]
    items = embedded(home, home / "table.csv", dmlkit=dmlkit, output=tmp_path / "e")
    assert items["label"] == ["c1", "d1", "d1"]
    assert items["path"] == [str(home / "photos" / name / "1.jpg") for name in ("crow", "dove", "dove")]
    points = open_points(tmp_path / "e").points_at(torch.arange(3))
    assert not points[1].equal(points[2])  # the box


def test_what_cannot_label_is_refused_in_one_line(home: Path, tmp_path: Path, dmlkit: Cli):
    columns = "path, label, species, family, category, x_1, y_1, x_2, y_2"
    for words, message in (
        ([home / "table.csv", "--labels", "kind"], f"has no column 'kind'; it has {columns}"),
        ([home / "photos", "--labels", "species"], "is not a table, so it has no columns; use folder or none"),
        (["--split", "test", "--labels", "none"], "--labels none applies only to IMAGES"),
    ):
        dmlkit("embed", home / "run", *words, "-o", tmp_path / "e").refused(message)


def test_an_image_finds_the_model_of_embeddings_also_after_a_move(home: Path, tmp_path: Path, dmlkit: Cli):
    query, own = home / "photos" / "dove" / "1.jpg", tmp_path / "own"
    shutil.copytree(home / "run", own / "runs" / "demo")
    shutil.copytree(home / "photos", own / "photos")
    assert dmlkit("embed", own / "runs" / "demo", own / "photos", "-o", own / "e", "--device", "cpu").code == 0
    assert json.loads((own / "e" / "manifest.json").read_text())["run"] == str(own / "runs" / "demo")

    def nearest(folder: Path) -> str | None:
        result = dmlkit("search", folder, query, "-k", 1, "--json")
        return json.loads(result.out)["queries"][0]["neighbors"][0]["label"] if result.code == 0 else result.err

    assert nearest(own / "e") == "dove"
    (own / "e").rename(tmp_path / "alone")
    assert EmbeddingFolder(tmp_path / "alone").run == own / "runs" / "demo" and nearest(tmp_path / "alone") == "dove"
    (tmp_path / "alone").rename(own / "e")
    own.rename(tmp_path / "moved")
    assert nearest(tmp_path / "moved" / "e") == "dove"
    shutil.rmtree(tmp_path / "moved" / "runs")
    assert "the run that made it is unknown or has moved; name the run" in str(nearest(tmp_path / "moved" / "e"))


def test_a_label_cannot_act_on_the_terminal(home: Path, tmp_path: Path, dmlkit: Cli):
    trees.photos(tmp_path / "photos" / HOSTILE, (f"{number}.jpg" for number in range(2)))
    assert dmlkit("embed", home / "run", tmp_path / "photos", "-o", tmp_path / "e", "--device", "cpu").code == 0
    assert open_points(tmp_path / "e").labels == [HOSTILE] * 2
    for words in (
        ("search", tmp_path / "e", tmp_path / "photos", "-o", tmp_path / "s.csv"),
        ("cluster", tmp_path / "e", "-k", 1),
        ("duplicates", tmp_path / "e", "--threshold", "0.1"),
        ("eval", tmp_path / "e", "--metric", "recall@1"),
    ):
        result = dmlkit(*words)
        assert "\x1b" not in result.out + result.err and "\x07" not in result.out + result.err, words
    assert "new\\nline" in dmlkit("search", tmp_path / "e", tmp_path / "photos").out.replace("\n", "")
    assert csv.read_csv(tmp_path / "s.csv", parse_options=csv.ParseOptions(newlines_in_values=True)).num_rows == 4
