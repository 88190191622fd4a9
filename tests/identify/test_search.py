"""`dmlkit search`: what it finds is what a naive search finds, on the screen, as JSON, CSV and a page."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmlkit.identify.page import Picture, Shelf, write_page
from dmlkit.manifolds import Poincare
from dmlkit.vectors.folder import EmbeddingFolder
from tests.conftest import ON_THE_BALL, Cli, csv_rows
from tests.datasets import trees
from tests.vectors.stored import EUCLIDEAN, POINTS, embeddings_at, manifest


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A run on the ball, photos, and the embeddings of a few of them."""
    from dmlkit.vectors.run import embed

    folder = tmp_path_factory.mktemp("place")
    trained_once(folder, ON_THE_BALL)
    trees.photos(folder / "photos", (f"{index}.jpg" for index in range(12)), side=(40, 30))
    for index in range(2):
        trees.photo(folder / "new" / f"{index}.jpg", 3 * index, (40, 30))
    embed(folder / "run", folder / "photos", device="cpu")
    embed(folder / "run", folder / "new", output=folder / "asked", device="cpu")
    return folder


def test_an_image_a_folder_and_embeddings_find_the_same(place: Path, dmlkit: Cli, tmp_path: Path):
    source = place / "run" / "embeddings" / "photos"
    ball, gallery = EmbeddingFolder(source).manifold, EmbeddingFolder(source)
    queries = torch.from_numpy(np.array(EmbeddingFolder(place / "asked").points))
    points = torch.from_numpy(np.array(gallery.points))
    exact = -ball.paired_distance(queries.double()[:, None], points.double())
    assert isinstance(ball, Poincare)
    answers: list[Any] = []
    for asked, *words in (("new", "--device", "cpu"), ("asked",)):
        result = dmlkit("search", source, place / asked, "-k", 5, "--json", *words).ok()
        answers.append(json.loads(result.out))
    by_image, by_embedding = answers
    assert by_image == by_embedding
    assert (by_image["k"], by_image["similarity"], by_image["skipped"]) == (5, "negative_distance", [])
    for row, query in enumerate(by_image["queries"]):
        assert query["path"] == str(place / "new" / f"{row}.jpg")
        order = exact[row].argsort(descending=True)[:5]
        assert [one["id"] for one in query["neighbors"]] == order.tolist()
        assert [one["similarity"] for one in query["neighbors"]] == pytest.approx(exact[row][order].tolist(), abs=1e-6)
        assert [one["path"] for one in query["neighbors"]] == [gallery.items["path"][int(one)].as_py() for one in order]
        assert query["neighbors"][0]["path"] == str(place / "photos" / f"{3 * row}.jpg")
    single = dmlkit("search", source, place / "new" / "1.jpg", "-k", 5, "--json", "-o", tmp_path / "x.csv")
    near = by_image["queries"][1]["neighbors"]  # a batch of another size rounds otherwise: the order is what agrees
    (alone,) = json.loads(single.out)["queries"]
    assert [one["id"] for one in alone["neighbors"]] == [one["id"] for one in near]
    rows = csv_rows(tmp_path / "x.csv")
    assert [(row["query"], int(row["id"]), row["path"]) for row in rows] == [
        (str(place / "new" / "1.jpg"), one["id"], one["path"]) for one in near
    ]


def test_the_screen_tells_what_is_cut_and_what_was_broken(place: Path, dmlkit: Cli, tmp_path: Path):
    shutil.copytree(place / "new", tmp_path / "new")
    (tmp_path / "new" / "bad<b>.jpg").write_bytes(b"none")
    moved = tmp_path / "moved"
    shutil.copytree(place / "run" / "embeddings" / "photos", moved)
    page = tmp_path / "page.html"
    result = dmlkit("search", moved, tmp_path / "new", "-k", 99, "--run", place / "run", "-o", page).ok()
    assert f"note: -k 99 is reduced to 12, the number of images in {moved}" in result.out
    assert "1 image could not be read" in result.out and "bad<b>.jpg: cannot read this image" in result.out
    assert result.out.count("rank") == 2 and "placeholder" not in result.out
    assert page.read_text().count("<img") == 2 * 13
    for name in "wxyz":
        (tmp_path / "new" / f"{name}.jpg").write_bytes(b"none")
    result = dmlkit("search", moved, tmp_path / "new", "-k", 1, "--run", place / "run")
    assert "5 images could not be read:" in result.out and result.out.count("cannot read this image") == 1
    assert "4 more of this kind: " in result.out
    many = dmlkit("search", moved, moved, "-k", 1)
    assert many.out.count("rank") == 10 and "and 2 more queries" in many.out


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = '</title><script>alert(1)</script><img src=x onerror="alert(1)">\x1b\u202e'


def test_a_page_shows_pictures_and_obeys_no_name(tmp_path: Path):
    photo = trees.photo(tmp_path / "1.jpg", 1, (400, 300))
    path = tmp_path / "page.html"
    shelves = [Shelf(Picture(str(photo), ["asked"]), [Picture(HOSTILE, [HOSTILE]), Picture("gone", stored=b"jpeg")])]
    assert write_page(path, HOSTILE, [HOSTILE], shelves) == 1  # the hostile name is no file
    page, text = Tags(), path.read_text(encoding="utf-8")
    page.feed(text)
    kinds = [tag for tag, _ in page.tags]
    assert "script" not in kinds and kinds.count("img") == 2 and "alert(1)" in page.text
    assert not {"\x1b", "\u202e"} & set(text)
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert all(one["loading"] == "lazy" and (one["src"] or "").startswith("data:image/jpeg;base64,") for one in images)
    (policy,) = (one["content"] or "" for tag, one in page.tags if one.get("http-equiv") == "Content-Security-Policy")
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    hashed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; img-src data:; style-src 'sha256-{hashed}'")
    assert "unsafe" not in policy
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert not [one for _, one in page.tags if any(name.startswith("on") or name == "style" for name in one)]


OTHER = {**manifest()["model"], "fingerprint": "0" * 64}
SMALLER = {**manifest()["preprocessing"], "size": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": OTHER}, "embeddings of another model (fingerprint 000000000000, "),
        ({"manifold": EUCLIDEAN}, "embeddings of another model (manifold.name: was sphere, now euclidean"),
        ({"preprocessing": SMALLER}, "embeddings of another model (preprocessing.size: was 16, now 8)"),
        ({"dim": 4, "features": 4, "points": POINTS[:, :4]}, "embeddings with 4 dimensions, but "),
    ],
)
def test_embeddings_of_another_model_are_refused(changes: dict[str, Any], message: str, tmp_path: Path, dmlkit: Cli):
    source = embeddings_at(tmp_path / "source")
    dmlkit("search", source, embeddings_at(tmp_path / "other", **changes)).refused(message)


def test_what_cannot_be_searched_is_refused(tmp_path: Path, dmlkit: Cli, place: Path):
    source = embeddings_at(tmp_path / "source")
    dmlkit("search", source, source, "-k", 0).refused("-k 0: expected at least 1 neighbor")
    dmlkit("search", source, source, "--run", place / "run").refused("applies to an image or a folder of images, but")
    dmlkit("search", source, place / "new").refused("name the run with --run RUN")
    dmlkit("search", source, place / "new", "--run", place / "run").refused("embeddings with 4 dimensions, but")
    empty = embeddings_at(tmp_path / "empty", POINTS[:0])
    dmlkit("search", empty, source).refused("is empty")
    photos = place / "run" / "embeddings" / "photos"
    (tmp_path / "bad.jpg").write_bytes(b"none")
    dmlkit("search", photos, tmp_path / "bad.jpg").refused("bad.jpg: cannot read this image")
    assert "rank" not in dmlkit("search", source, empty, "-k", 1).ok().out


def test_images_of_either_side_that_could_not_be_read_are_counted(tmp_path: Path, dmlkit: Cli):
    """One of the source and two others; a source that is compared with itself has its own once."""
    lines = [f"{name}.jpg: cannot read this image" for name in ("old/0", "new/1", "new/2")]
    source = embeddings_at(tmp_path / "source", skipped=lines[:1])
    other = embeddings_at(tmp_path / "other", skipped=lines[1:])
    for command, *more in (["search"], ["identify"], ["select"], ["duplicates"], ["duplicates", "--threshold", 0.9]):
        assert "3 images could not be read" in dmlkit(command, source, other, *more).ok().out, command
        assert "1 image could not be read" in dmlkit(command, source, source, *more).ok().out, command
    assert dmlkit("search", source, other, "--json").json()["skipped"] == lines
    assert dmlkit("select", source, other, "--json").json()["skipped"] == lines
