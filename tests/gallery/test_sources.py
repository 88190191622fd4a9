"""Every command takes a run, embeddings, a gallery or an array by the same word, and answers as NumPy does."""

import json
import re
import shutil
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import yaml

from dmlkit.files.source import kind_of
from dmlkit.gallery.change import GallerySettings, create_gallery
from dmlkit.gallery.sources import open_points
from dmlkit.identify.identify import identify
from dmlkit.vectors.points import in_memory
from dmlkit.vectors.run import embed
from tests.conftest import Cli, csv_rows
from tests.datasets import trees
from tests.vectors.stored import ON_CPU


class Home(NamedTuple):
    """Sources of the same points: those of the run's test split, and those of photos in a gallery."""

    run: Path
    embeddings: Path
    array: Path
    gallery: Path
    photos: Path
    points: dict[str, np.ndarray]
    labels: dict[str, list[str]]

    def words(self, kind: str) -> list[object]:
        """The source, and the options that give an array its labels."""
        labels = ["--labels", self.array.with_name("y.npy")] if kind == "array" else []
        return [getattr(self, kind), *labels]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Home:
    folder = tmp_path_factory.mktemp("home")
    trained_once(folder)
    embed(folder / "run", split="test", output=folder / "e", device="cpu")
    trees.birds(folder / "photos", ("crow", "dove", "finch"), 4)
    create_gallery(folder / "run", folder / "photos", folder / "gallery", model=ON_CPU)
    points = np.load(folder / "e" / "embeddings.npy")
    stored = open_points(folder / "e")
    labels = [str(label) for label in stored.labels]
    np.save(folder / "x.npy", points)
    np.save(folder / "y.npy", np.array(labels))
    gallery = open_points(folder / "gallery")
    asked = [str(label) for label in gallery.labels]
    kinds = {"run": points, "embeddings": points, "array": points, "gallery": in_memory(gallery).points.numpy()}
    named = {"run": labels, "embeddings": labels, "array": labels, "gallery": asked}
    paths = (folder / "run", folder / "e", folder / "x.npy", folder / "gallery", folder / "photos")
    return Home(*paths, kinds, named)


KINDS = ("run", "embeddings", "array", "gallery")
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_points_and_their_images_are_the_same_by_every_door(home: Home, kind: str):
    labels = home.array.with_name("y.npy") if kind == "array" else None
    found = open_points(getattr(home, kind), labels=labels)
    assert kind_of(getattr(home, kind)) == kind
    assert list(found.labels) == home.labels[kind] and len(found) == len(home.points[kind]) == len(found.paths)
    np.testing.assert_allclose(in_memory(found).points.numpy(), home.points[kind], atol=1e-6)
    blocks = list(found.blocks(5))
    assert [len(block) for block in blocks[:-1]] == [5] * (len(blocks) - 1)
    np.testing.assert_allclose(torch.cat(blocks).numpy(), home.points[kind], atol=1e-6)
    rows = torch.tensor([7, 0, 7])
    np.testing.assert_allclose(found.points_at(rows).numpy(), home.points[kind][[7, 0, 7]], atol=1e-6)
    items = found.items_at(rows)
    assert [item.label for item in items] == [home.labels[kind][row] for row in (7, 0, 7)]
    assert [item.path for item in items] == [found.paths[row] for row in (7, 0, 7)]


def nearest_of(points: np.ndarray, query: np.ndarray, count: int) -> list[tuple[float, int]]:
    """By a loop over cosines."""
    cosines = [float(np.dot(query.astype(np.float64), point.astype(np.float64))) for point in points]
    return sorted(((cosine, row) for row, cosine in enumerate(cosines)), key=lambda one: (-one[0], one[1]))[:count]


@pytest.mark.parametrize(("kind", "queries"), [*pairwise((*KINDS, KINDS[0]))])
def test_search_is_that_of_a_loop(kind: str, queries: str, home: Home, dmlkit: Cli):
    answer = dmlkit("search", getattr(home, kind), getattr(home, queries), "-k", 3, "--json").json()["queries"]
    assert len(answer) == len(home.points[queries])
    for query, point in zip(answer, home.points[queries], strict=True):
        expected = nearest_of(home.points[kind], point, 3)
        similarities = [neighbor["similarity"] for neighbor in query["neighbors"]]
        assert similarities == pytest.approx([similarity for similarity, _ in expected], abs=1e-5)
        for neighbor, (similarity, row) in zip(query["neighbors"], expected, strict=True):
            if sum(abs(similarity - other) < 1e-5 for other, _ in expected) == 1:
                assert neighbor["label"] == (None if kind == "array" else home.labels[kind][row])


@pytest.mark.parametrize("kind", ["run", "embeddings", "gallery"])
def test_photos_are_searched_with_in_every_source_whose_model_is_known(kind: str, home: Home, dmlkit: Cli):
    answer = dmlkit("search", getattr(home, kind), home.photos, "-k", 1, "--json").json()["queries"]
    for query, point in zip(answer, home.points["gallery"], strict=True):
        (expected,) = nearest_of(home.points[kind], point, 1)
        assert query["neighbors"][0]["similarity"] == pytest.approx(expected[0], abs=1e-5)


def test_a_run_is_loaded_once_to_search_it_with_images(home: Home, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    from dmlkit.vectors import fusion

    loaded: list[Any] = []
    real = fusion.load_model
    monkeypatch.setattr(fusion, "load_model", lambda *a, **o: loaded.append(a) or real(*a, **o))
    assert dmlkit("search", home.run, home.photos, "-k", 1).code == 0
    assert len(loaded) == 1


@every_kind
def test_eval_is_that_of_a_loop(kind: str, home: Home, dmlkit: Cli):
    result = dmlkit("eval", *home.words(kind), "--metric", "recall@1", "--json").ok()
    points, labels = home.points[kind], home.labels[kind]
    least, most = 0, 0  # rows of float32 that are normalized once more change the order of cosines that tie
    for row, point in enumerate(points):
        others = [other for other in nearest_of(points, point, len(points)) if other[1] != row]
        found = [labels[other] == labels[row] for cosine, other in others if cosine > others[0][0] - 3e-7]
        least, most = least + all(found), most + any(found)
    assert most - least <= 4
    assert least - 1e-6 <= json.loads(result.out)["metrics"]["recall@1"] * len(points) <= most + 1e-6


@every_kind
def test_identify_takes_the_nearest_label(kind: str, home: Home, tmp_path: Path, dmlkit: Cli):
    other = "gallery" if kind != "gallery" else "embeddings"
    table = tmp_path / "answers.csv"
    assert dmlkit("identify", *home.words(kind), getattr(home, other), "-o", table, "--threshold", "-1").code == 0
    answers = csv_rows(table)
    for answer, point in zip(answers, home.points[other], strict=True):
        (similarity, row), *_ = nearest_of(home.points[kind], point, 1)
        assert float(answer["score"]) == pytest.approx(similarity, abs=1e-5)
        assert answer["label"] == home.labels[kind][row]


def test_a_run_gives_the_newest_threshold_that_it_was_calibrated_to(home: Home, tmp_path: Path, dmlkit: Cli):
    threshold, calibrate = home.run / "threshold.json", ("calibrate", home.run, "--device", "cpu", "--far")
    assert identify(home.gallery, home.embeddings).threshold is None
    assert dmlkit(*calibrate, "0.3").code == 0
    own, taken = tmp_path / "own", tmp_path / "taken"
    create_gallery(home.run, home.photos, taken, model=ON_CPU)
    create_gallery(home.run, home.photos, own, settings=GallerySettings(threshold=0.125), model=ON_CPU)
    first = json.loads(threshold.read_text())["threshold"]
    assert identify(taken, home.embeddings).threshold == first
    assert dmlkit(*calibrate, "0.6").code == 0
    second = json.loads(threshold.read_text())["threshold"]
    assert second < first
    assert identify(taken, home.embeddings).threshold == second
    assert identify(home.gallery, home.embeddings).threshold == second  # created before it was calibrated
    for gallery, used in ((taken, second), (home.gallery, second), (own, 0.125)):
        assert f"similarity threshold: {used:.6g}; " in dmlkit("gallery", "info", gallery).ok().out
        assert dmlkit("gallery", "info", gallery, "--json").json()["threshold"] == used
    assert identify(own, home.embeddings).threshold == 0.125
    threshold.unlink()  # or the run has moved
    assert identify(taken, home.embeddings).threshold == first
    assert f"similarity threshold: {first:.6g}; " in dmlkit("gallery", "info", taken).ok().out


@every_kind
def test_other_commands_find_the_same_by_every_door(kind: str, home: Home, tmp_path: Path, dmlkit: Cli):
    """As of an array of the same points, which NumPy wrote."""
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, home.points[kind])
    np.save(y, np.array(home.labels[kind]))
    for name, *options in (("cluster", "-k", 3), ("duplicates", "--threshold", 0.9)):
        tables = []
        for number, words in enumerate((home.words(kind), [x, "--labels", y])):
            words = words[:1] if name == "duplicates" else words
            dmlkit(name, *words, *options, "-o", tmp_path / f"{name}{number}.csv").ok()
            tables.append([{**row, "path": "", "label": ""} for row in csv_rows(tmp_path / f"{name}{number}.csv")])
        for ours, theirs in zip(*tables, strict=True):
            for column, value in ours.items():
                same = value == theirs[column]
                assert same or float(value) == pytest.approx(float(theirs[column]), abs=1e-5)
    if kind != "run":  # of a run the features before the head are measured
        first, second = (dmlkit("curvature", source).out.splitlines() for source in (home.words(kind)[0], x))
        assert "delta-hyperbolicity" in first[1]
        ours, theirs = (list(map(float, re.findall(r"-?\d+\.\d+", " ".join(lines[1:])))) for lines in (first, second))
        # An array's rows are normalized once more: 1 ulp of a cosine near 1 is 1 % of a distance of 0.005.
        assert ours == pytest.approx(theirs, abs=0.003, rel=0.02)
    page = tmp_path / "page.html"
    assert dmlkit("inspect", *home.words(kind), "-o", page).code == 0
    assert "Inspection of" in page.read_text()


OPTIONS = [*product(("cluster", "inspect"), KINDS), *product(["eval"], ("run", "embeddings", "gallery"))]


@pytest.mark.parametrize(("command", "kind"), OPTIONS)  # eval refuses those of an array in other words
def test_an_option_that_does_not_apply_is_refused_in_the_same_words(kind, command, home, tmp_path, dmlkit):
    rest = {"cluster": ["-k", 3], "inspect": ["-o", tmp_path / "x.html"], "eval": []}[command]
    of_a_run = [("--split", "test", "a run"), ("--set", "dataset.root=x", "a run")]
    if command != "eval":
        of_a_run.append(("--device", "cpu", "a run or an image or a folder of images"))
    of_an_array = [("--manifold", "euclidean", "a file of vectors"), ("--labels", home.array, "a file of vectors")]
    refused = of_an_array if kind == "run" else of_a_run if kind == "array" else [*of_a_run, *of_an_array]
    names = dict(zip(KINDS, ("a run", "a folder of embeddings", "a file of vectors", "a gallery"), strict=True))
    for option, value, where in refused:
        result = dmlkit(command, getattr(home, kind), *rest, option, value)
        error = f"error: {option} {value}: applies to {where}, but {getattr(home, kind)} is {names[kind]}; remove this"
        assert result.code == 2 and result.err.startswith(error) and result.err.count("\n") == 1, result.err


def test_what_is_no_source_is_refused(home: Home, tmp_path: Path, dmlkit: Cli):
    np.save(tmp_path / "two.npy", np.array(["a", "b"]))
    np.save(tmp_path / "shares.npy", np.linspace(0, 1, len(home.labels["array"])))
    no_labels = "shares.npy has type float64; expected integers or text"
    np.save(tmp_path / "width.npy", np.eye(5, dtype=np.float32))
    for words, message in (
        (("cluster", home.array, "-k", 2, "--labels", tmp_path / "two.npy"), "has 2 labels, but"),
        (("identify", home.array, home.array, "--labels", tmp_path / "shares.npy"), no_labels),
        (("search", home.gallery, tmp_path / "width.npy"), "expected 8 coordinates, got 5"),
        (("search", home.array, home.photos), "the model of an array is unknown"),
        (("identify", home.array, home.embeddings, "-o", tmp_path / "a.csv"), "no image has a label"),
        (("duplicates", home.array, tmp_path / "width.npy", "--threshold", 0.5), "expected embeddings of the same"),
        (("export", home.gallery, "--format", "faiss"), "is a gallery; --format faiss exports a folder of embeddings"),
        (("export", home.run, "--format", "npz"), f"run dmlkit embed {home.run} FOLDER first"),
        (("export", home.embeddings, "--format", "onnx"), "expected a run"),
    ):
        dmlkit(*words).refused(message)


def test_commands_without_set_say_where_a_run_has_the_place_of_its_images(dmlkit, trained_once, tmp_path):
    run = trained_once(tmp_path)
    trees.photos(tmp_path / "photos", (f"{index // 3}/{index}.jpg" for index in range(12)), side=(40, 30))
    recipe, photo = run / "recipe.yaml", tmp_path / "photos" / "0" / "0.jpg"
    data = yaml.safe_load(recipe.read_text())
    data["dataset"] = {"name": "folder", "root": str(tmp_path / "gone"), "validation_fraction": 0}
    recipe.write_text(yaml.safe_dump(data))
    for words in (("search", run, photo), ("identify", run, photo), ("select", run, "-n", "2")):
        result = dmlkit(*words, "--device", "cpu")
        assert result.code == 2 and result.err.endswith(f"if it has moved, change dataset.root in {recipe}\n")
    other = Path(shutil.copytree(run, tmp_path / "other"))
    (other / "recipe.yaml").write_text(recipe.read_text().replace(str(tmp_path / "gone"), str(tmp_path / "photos")))
    result = dmlkit("search", other, run, "--device", "cpu")
    assert result.code == 2 and result.err.endswith(f"if it has moved, change dataset.root in {recipe}\n")
    result = dmlkit("duplicates", run, "--device", "cpu")
    assert result.code == 2 and result.err.endswith("if it has moved, use --set dataset.root=PATH\n")
    recipe.write_text(recipe.read_text().replace(str(tmp_path / "gone"), str(tmp_path / "photos")))
    assert dmlkit("search", run, photo, "--device", "cpu").code == 0  # the advice works


@pytest.mark.parametrize("option", [("--column", "label=kind"), ("--root", "."), ("--box-confidence", "0")])
def test_options_on_images_do_not_apply_to_points(option: tuple[str, str], home: Home, tmp_path: Path, dmlkit: Cli):
    """A table of images with their vectors is one of vectors, where an array is searched."""
    table = tmp_path / "both.csv"
    names = [f"e{index}" for index in range(home.points["array"].shape[1])]
    rows = [",".join(map(str, point)) for point in home.points["array"].tolist()]
    table.write_text("\n".join([",".join(["path", *names]), *(f"{row}.jpg,{cells}" for row, cells in enumerate(rows))]))
    assert len(dmlkit("search", home.array, table, "-k", 1, "--json").json()["queries"]) == len(rows)
    for source, queries, kind in (
        (home.embeddings, home.embeddings, "a folder of embeddings"),
        (home.gallery, home.gallery, "a gallery"),
        (home.array, table, "a file of vectors"),
    ):
        wrong = f"{' '.join(option)}: applies to an image or a folder of images, but {queries} is {kind}; remove this"
        dmlkit("search", source, queries, *option).refused(wrong)
