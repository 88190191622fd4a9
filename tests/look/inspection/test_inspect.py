"""`dmlkit inspect`: the page holds what is there, says what is not, and obeys no name."""

import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmlkit.files.where import Where
from dmlkit.look.inspection import findings
from dmlkit.look.inspection import pictures as embedding_map
from dmlkit.look.inspection.findings import inspect
from dmlkit.look.inspection.page import write_inspection
from tests.conftest import Cli
from tests.datasets import trees
from tests.identify.test_duplicates import HURTS, labelled, turned
from tests.metrics.naive import at_rank
from tests.vectors.stored import POINCARE, embeddings_at


class Anchors(HTMLParser):
    """The sections of a page, its scripts, and handlers in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.scripts: list[dict[str, str | None]] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "section" and found.get("class") == "part":
            self.parts.append(str(found["id"]))
        if tag == "script":
            self.scripts.append(found)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]


def read(path: Path) -> tuple[str, list[str], dict[str, Any]]:
    """The page, its parts, and the data of its script."""
    text = path.read_text(encoding="utf-8")
    anchors = Anchors()
    anchors.feed(text)
    assert anchors.handlers == [] and [script.get("type") for script in anchors.scripts] == ["application/json", None]
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return text, anchors.parts, json.loads(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    return trained_once(tmp_path_factory.mktemp("run"))


def test_a_run_has_every_part_and_the_figures_of_eval(run: Path, dmlkit: Cli, tmp_path: Path):
    assert "missing" not in dmlkit("inspect", run, "-o", tmp_path / "x.html", "--device", "cpu").ok().out
    text, parts, data = read(tmp_path / "x.html")
    assert f"<title>Inspection of {run}</title>" in text
    assert parts == [
        *("figures", "similarities", "worst", "confused", "classes", "suspects", "alike", "leaks", "map", "training"),
        "recipe",
    ]
    report = dmlkit("eval", run, "--json", "--device", "cpu").json()
    for name, value in report["metrics"].items():
        low, high = report["intervals"][name]
        assert f"<td>{name}</td><td>{value:.4f}</td><td>{low:.4f} to {high:.4f}</td>" in text
    assert len(data["classes"]["rows"]) == report["classes"] and data["classes"]["head"][0] == "class"
    worst = report["worst_classes"][0]
    assert data["classes"]["rows"][0][:2] == [worst["class"], worst["queries"]]
    assert set(data["planes"]) == {"t-SNE", "PCA"} and len(data["pictures"]) == len(data["paths"])
    for plane in data["planes"].values():  # numbers of few digits, so that 60 000 images take little room
        places = [*plane[0], *plane[1]]
        assert {type(place) for place in places} == {int} and (min(places), max(places)) == (0, 4095)
    again = dmlkit("inspect", run, "-o", tmp_path / "x.html", "--device", "cpu", "--split", "validation")
    assert again.code == 0 and "validation split of" in (tmp_path / "x.html").read_text()


def test_the_pretrained_backbone_is_shown_where_it_is_known(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    summary = findings.Summary.read(run / "summary.json")
    figures = {"validation": None, "test": {"map@r": 0.1234}, "difference": {}, "classes": 4}
    shown = findings.Summary.model_validate({**summary.model_dump(), "pretrained": figures})

    def read_told(_: Path) -> findings.Summary:
        return shown

    monkeypatch.setattr(findings.Summary, "read", read_told)
    write_inspection(inspect(run, device="cpu"), tmp_path / "x.html", "x")
    assert "<th>pretrained</th>" in (tmp_path / "x.html").read_text()
    assert "<td>0.1234</td>" in (tmp_path / "x.html").read_text()


def test_names_that_hurt_are_drawn_safely_and_lost_images_counted(dmlkit: Cli, tmp_path: Path):
    hostile = ["</script><script>alert(1)</script>", f"{HURTS}<img src=x onerror=alert(1)>", "\U0001f426 \u05e9\u05dc"]
    points = np.concatenate([turned(0, 1, 2, 3), turned(40, 41, 42, 4), turned(80, 81, 82, 83)])
    source = labelled(embeddings_at(tmp_path / "e", points), [name for name in hostile for _ in range(4)])
    result = dmlkit("inspect", source, "-o", tmp_path / "x.html").ok()
    assert re.search(r"note: \d+ pictures are missing: image files were moved or deleted", result.out)
    text, parts, data = read(tmp_path / "x.html")
    assert "leaks" not in parts and "suspects" in parts
    assert "<img src=x" not in text and "alert(1)</script><" not in text and "\u202e" not in text
    assert hostile[0] in data["names"] and data["pictures"] == {}
    script = re.findall("<script>(.*?)</script>", text, re.DOTALL)[-1]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in text and "default-src 'none'" in text


def test_an_array_has_no_images_that_could_be_lost(dmlkit: Cli, tmp_path: Path):
    np.save(tmp_path / "x.npy", turned(0, 1, 40, 41))
    np.save(tmp_path / "y.npy", np.array([0, 0, 1, 1]))
    result = dmlkit("inspect", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", "-o", tmp_path / "x.html")
    assert result.code == 0 and f"missing: the rows of {tmp_path / 'x.npy'} have none" in result.out, result


def test_conditions_choose_the_images(dmlkit: Cli, tmp_path: Path):
    source = labelled(embeddings_at(tmp_path / "e", turned(0, 1, 40, 41, 80, 81)), ["a", "a", "b", "b", "c", "c"])
    dmlkit("inspect", source, "--where", "label in a, c", "-o", tmp_path / "x.html").ok()
    assert [read(tmp_path / "x.html")[2]["names"][row] for row in read(tmp_path / "x.html")[2]["labels"]] == [*"aacc"]


def test_photos_are_in_the_page(dmlkit: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import pyarrow as pa
    from pyarrow import parquet

    source = embeddings_at(tmp_path / "e", turned(*range(0, 80, 10)))
    paths = [str(tmp_path / "photos" / f"{row}.jpg") for row in range(8)]
    for row, path in enumerate(paths[1:]):
        trees.photo(Path(path), row)
    table = {"id": list(range(8)), "path": paths, "label": ["a", "b"] * 4}
    parquet.write_table(pa.table(table), source / "items.parquet")
    monkeypatch.setattr(embedding_map, "MOST_PICTURES", 5)
    monkeypatch.setattr(findings, "MOST_TSNE", 7)
    dmlkit("inspect", source, "-o", tmp_path / "x.html").ok()
    text, _, data = read(tmp_path / "x.html")
    assert 4 <= len(data["pictures"]) <= 5 and list(data["planes"]) == ["PCA"]
    assert data["paths"] == [f"{row}.jpg" for row in range(8)]
    assert "✓ right" in text and "✗ wrong" in text and "no picture" in text


def test_without_opentsne_the_other_maps_are_drawn(dmlkit: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openTSNE", None)
    source = embeddings_at(tmp_path / "e", turned(*range(12)))
    result = dmlkit("inspect", source, "-o", tmp_path / "x.html").ok()
    message = "no map by t-SNE: t-SNE needs openTSNE; install it with: pip install 'dmlkit[tsne]'"
    assert message in " ".join(result.out.split())
    assert list(read(tmp_path / "x.html")[2]["planes"]) == ["PCA"]


@pytest.mark.parametrize(
    ("labels", "message", "parts"),
    [
        ([None] * 4, "4 of 4 images have no label", ["figures", "map"]),
        (["a"] * 4, "one class", ["figures", "map"]),
        (["a", "b", "c", None], "1 of 4 images have no label", ["figures", "suspects", "alike", "map"]),
        (["a", "b", "c", "d"], "no query has another item of its class", ["figures", "suspects", "alike", "map"]),
        (["a"], "one class", ["figures", "map"]),
    ],
    ids=str,
)
def test_what_is_missing_is_told(dmlkit: Cli, tmp_path: Path, labels: list[str | None], message: str, parts: list[str]):
    source = labelled(embeddings_at(tmp_path / "e", turned(*range(len(labels)))), labels)
    result = dmlkit("inspect", source, "-o", tmp_path / "x.html").ok()
    assert message in " ".join(result.out.split())
    assert read(tmp_path / "x.html")[1] == parts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{e}", "-o", "{pages}"], "is a folder; expected the name of a file"),
        (["{e}", "-o", "x.txt"], "--output x.txt: expected a name that ends in .html"),
        (["{e}", "-o", "{new}", "--set", "dataset.root=x"], "applies to a run, but"),
        (["{folder}", "-o", "{new}"], "expected a run, a folder of embeddings"),
    ],
)
def test_bad_input_is_told_in_a_line(dmlkit: Cli, tmp_path: Path, words: list[str], message: str):
    places = {"{folder}": tmp_path, "{new}": tmp_path / "x.html", "{pages}": tmp_path / "pages.html"}
    places["{pages}"].mkdir()
    places["{e}"] = embeddings_at(tmp_path / "e", turned(0, 1))
    result = dmlkit("inspect", *(places.get(word, word) for word in words))
    assert result.code == 2 and result.err.startswith("error: ") and message in result.err
    assert not (tmp_path / "x.html").exists()


def test_every_step_is_shown_to_its_end(run: Path, tmp_path: Path):
    shown: dict[str, tuple[int, int]] = {}

    @contextmanager
    def bar(what: str, total: int) -> Generator[Callable[[int], None]]:
        done: list[int] = []
        yield done.append
        shown[what] = (sum(done), total)

    shutil.rmtree(run / "vectors", ignore_errors=True)  # otherwise nothing is embedded
    write_inspection(inspect(run, device="cpu", bar=bar), tmp_path / "x.html", "x", bar=bar)
    assert list(shown) == ["embedding", "searching", "t-SNE", "ranking", "drawing"]
    assert all(done == total > 0 for done, total in shown.values()), shown


def test_two_hyperbolic_dimensions_are_shown_in_the_disk(tmp_path: Path, dmlkit: Cli):
    points = np.array([[0.0, 0.0], [0.5, 0.0], [0.0, -0.9], [0.3, 0.3]], dtype=np.float32)
    space = {**POINCARE, "curvature": -4.0}  # of radius 1/2
    source = labelled(embeddings_at(tmp_path / "e", points / 2, manifold=space, dim=2, features=2), [*"aabb"])
    dmlkit("inspect", source, "-o", tmp_path / "x.html").ok()
    planes = read(tmp_path / "x.html")[2]["planes"]
    assert list(planes) == ["disk", "PCA"]
    assert planes["disk"] == [[round((x + 1) / 2 * 4095) for x in row] for row in points.T.tolist()]


def test_a_class_that_only_the_gallery_has_is_named_without_pictures(tmp_path: Path):
    """As of a run whose test images search the training images: `c9` has a single image, which is not inspected."""
    found = inspect(labelled(embeddings_at(tmp_path / "e", turned(0, 1, 80, 81)), ["a", "a", "b", "b"]))
    assert found.evaluation is not None
    confused = replace(found.evaluation, class_names=["a", "b", "c9"], nearest_labels=torch.tensor([2, 0, 1, 1]))
    (_, heading), (_, (ours, theirs)) = embedding_map.confusions(replace(found, evaluation=confused))
    assert heading.startswith("a taken for c9 by 1 queries") and heading.endswith("which only the gallery has")
    assert [shown.path[0] for shown in ours] == ["0", "1"] and theirs == []


@pytest.mark.parametrize("split", ["train", "all"])
def test_training_images_are_not_similar_to_themselves(run: Path, dmlkit: Cli, tmp_path: Path, split: str):
    dmlkit("inspect", run, "--split", split, "-o", tmp_path / "x.html", "--device", "cpu").ok()
    parts = read(tmp_path / "x.html")[1]
    assert "leaks" not in parts and "recipe" in parts


def test_the_worst_queries_have_the_order_of_plot_retrieval(tmp_path: Path):
    """Of equal map@r those whose nearest image is wrong come first, the most similar first; then others in order."""
    angles, labels = np.array([7, 83, 16, 30, 3, 4, 59, 74, 34]), list("aaabbbccc")
    keys: list[tuple[float, float, int]] = []
    for query, angle in enumerate(angles):
        order = [int(row) for row in abs(angles - angle).argsort() if row != query]
        hits = [int(labels[row] == labels[query]) for row in order]
        keys.append((at_rank(hits, 2, "map@r", 1), np.inf if hits[0] else abs(angles[order[0]] - angle), query))
    expected: list[int] = []
    for *_, query in sorted(keys):
        expected += [query] if [labels[row] for row in expected].count(labels[query]) < 2 else []
    source = labelled(embeddings_at(tmp_path / "e", turned(*angles)), labels)
    shelves = [block[1] for block in embedding_map.worst(inspect(source))[1:]]
    assert [int(shelf.asked.path[0]) for shelf in shelves] == expected == [0, 3, 8, 1, 7, 4]


def test_all_training_images_are_compared_with_those_that_fulfill_a_condition(files: Path):
    """One of them is a copy of a test image; the others have none of the labels."""
    run, photos = files / "run", files / "photos"
    shutil.copy(photos / "E/2.png", photos / "A/copy.png")
    paths = sorted(photos.glob("*/*.png"))
    splits = {path: "test" if path.parent.name in "EFGH" else "train" for path in paths}
    rows = [f"{path.relative_to(photos)},{path.parent.name},{splits[path]}" for path in paths]
    (photos / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    dataset = f"dataset: {{name: table, file: '{photos}/list.csv', validation_fraction: 0}}\ntransform:"
    recipe, text = run / "recipe.yaml", (run / "recipe.yaml").read_text()
    recipe.write_text(re.sub("dataset:.*?transform:", dataset, text, flags=re.DOTALL))
    classes = {"training_classes": [*"ABCD"], "validation_classes": [], "test_classes": [*"EFGH"]}
    (run / "classes.json").write_text(json.dumps(json.loads((run / "classes.json").read_text()) | classes))
    found = inspect(run, where=Where.of("label in E, F"), device="cpu")
    assert found.leaks is not None
    others, near = found.leaks
    assert len(others) == 21 and len(found.collection) == 10
    position = [path.endswith("E/2.png") for path in found.collection.paths].index(True)
    assert others.paths[int(near.indices[position])].endswith("A/copy.png")
