"""`dmlkit identify`: tables, pages and screens, thresholds, boxes and refusals; for decisions see other files."""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError
from dmlkit.evaluation.image_gallery import open_gallery
from dmlkit.files.image_file import Box
from dmlkit.gallery.change import GallerySettings, add_images, create_gallery
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.identify.answers import known_labels
from dmlkit.identify.identify import identify
from dmlkit.identify.page import drawn_picture
from dmlkit.identify.rule import LabelRule
from tests.conftest import ON_THE_BALL, Cli, csv_rows
from tests.datasets import trees
from tests.gallery.conftest import BIRDS
from tests.vectors.stored import ON_CPU, embeddings_at


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A run on the ball, a gallery of its photos, and others to ask about."""
    folder = tmp_path_factory.mktemp("place")
    trained_once(folder, ON_THE_BALL)
    for label, name in enumerate(BIRDS):
        for index in range(2 + label):
            trees.photo(folder / "photos" / name / f"{index}.jpg", 10 * label + index, (40, 30))
    trees.photos(folder / "asked", (f"{index}.jpg" for index in range(12)), first=200, side=(40, 30))
    trees.photo(folder / "asked" / "known.jpg", 20, (40, 30))  # a finch
    create_gallery(folder / "run", folder / "photos", folder / "gallery", model=ON_CPU)
    return folder


@pytest.mark.parametrize(
    "rule", [LabelRule(), LabelRule("vote"), LabelRule(by="folder")], ids=["nearest", "vote", "folder"]
)
def test_images_without_a_label_do_not_count(rule: LabelRule, place: Path, tmp_path: Path):
    """The answers are those of a gallery without them, also to one of these images."""
    gallery = tmp_path / "gallery"
    stray = trees.photo(tmp_path / "stray" / "Unknown" / "0.jpg", 200, (40, 30))  # the first one that is asked about
    create_gallery(place / "run", tmp_path / "stray", gallery, model=ON_CPU)
    add_images(gallery, place / "photos", model=ON_CPU)
    assert GalleryFolder(gallery).labels.count(None) == 1
    found, expected = (identify(one, place / "asked", rule=rule, model=ON_CPU) for one in (gallery, place / "gallery"))
    assert found.answers == expected.answers and "1 image has no label in" in (found.note or "")
    near, wanted = (
        [[one.item.path for one in neighbors] for _, neighbors in side.neighbors.neighbors()]
        for side in (found, expected)
    )
    assert near == wanted and str(stray) not in near[0]


def test_the_table_says_unknown_below_the_threshold(place: Path, tmp_path: Path, dmlkit: Cli):
    table, page = tmp_path / "answers.csv", tmp_path / "page.html"
    (place / "asked" / "broken.jpg").write_bytes(b"none")
    asked = ("identify", place / "gallery", place / "asked", "-o", table, "--device", "cpu")
    result = dmlkit(*asked, "--threshold", "-1e-5", "-o", page)
    (place / "asked" / "broken.jpg").unlink()
    assert result.code == 0, result.err
    assert "13 images, 12 unknown (score below -1e-05)" in result.out and f"wrote {table}" in result.out
    assert "1 image could not be read" in result.out
    rows = csv_rows(table)
    near = [f"{name}_{rank}" for rank in (1, 2, 3) for name in ("nearest", "label", "similarity")]
    assert list(rows[0]) == [
        *("path", "label", "guess", "probability", "score", "margin", "known", "images", "x1", "y1", "x2", "y2"),
        *near,
        *(f"nearest_{side}_{rank}" for rank in (1, 2, 3) for side in ("x1", "y1", "x2", "y2")),
    ]
    assert [row["label"] for row in rows] == ["unknown"] * 12 + ["finch"]
    assert rows[-1]["nearest_1"].endswith("photos/finch/0.jpg") and rows[-1]["label_1"] == "finch"
    assert {row["guess"] for row in rows} <= set(BIRDS) and {row["known"] for row in rows} == {""}
    assert page.read_text().count("<img") == 4 * 13 and "unknown" in page.read_text()
    result = dmlkit(*asked)
    assert "13 images, 0 unknown" in result.out and "note: no image is unknown without a threshold" in result.out


def test_folders_named_after_labels_give_the_accuracy(place: Path, tmp_path: Path, dmlkit: Cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for number, name in enumerate(("crow", "gull", "emu")):
        for index in range(5):
            trees.photo(tmp_path / "asked" / name / f"{index}.jpg", 300 + 10 * number + index, (40, 30))
    trees.photo(tmp_path / "asked" / "gull" / "same.jpg", 30, (40, 30))  # gull/0.jpg of the gallery
    table, page = tmp_path / "answers.json", tmp_path / "page.html"
    scores = sorted(answer.score for answer in identify(place / "gallery", tmp_path / "asked", model=ON_CPU).answers)
    words = ("identify", place / "gallery", tmp_path / "asked", "--device", "cpu", "--threshold", scores[6])
    result = dmlkit(*words, "-o", table, "-o", page).ok()
    answers = json.loads(table.read_text())["images"]
    for answer in answers:
        folder = Path(answer["path"]).parent.name
        assert answer["known"] == (None if folder == "emu" else folder)
        assert answer["label"] == ("unknown" if answer["score"] < scores[6] else answer["guess"])
        assert answer["nearest"][0]["label"] == answer["guess"]
    known = [answer for answer in answers if answer["known"]]
    right = sum(answer["label"] == answer["known"] for answer in known)
    unknown = sum(answer["label"] == "unknown" for answer in known)
    guessed = sum(answer["guess"] == answer["known"] for answer in known)
    expected = {"images": 11, "right": right, "unknown": unknown, "guessed": guessed}
    assert json.loads(table.read_text())["accuracy"] == expected and 0 < right < 11
    assert f"the best guess is correct for {guessed} of 11" in result.out
    counts = f"{right} right, {unknown} unknown, {11 - right - unknown} wrong"
    assert f"accuracy {right / 11:.3f} over 11 images with known labels: {counts}" in result.out
    # the most doubtful first: unknown ones, then by probability, and by margin where those are equal
    order = sorted(answers, key=lambda one: (one["label"] != "unknown", one["probability"], one["margin"]))
    lines = result.out.splitlines()
    shown = [line.split("│")[1].strip() for line in lines if ".jpg" in line]
    assert shown == ["/".join(Path(answer["path"]).parts[-2:]) for answer in order[:10]]
    assert max(map(len, lines[: lines.index(next(line for line in lines if "└" in line)) + 1])) <= 80
    text = page.read_text()
    places = [text.index(f'title="{answer["path"]}"') for answer in order]
    assert places == sorted(places) and "max-width: none" in text and "✗ wrong" in text
    alone = dmlkit(*words[:-2], "--threshold", "-99")
    assert alone.code == 0 and "wrote" not in alone.out and "0 unknown (score below -99)" in alone.out
    own = dmlkit("identify", place / "gallery", place / "photos" / "gull", "--threshold", "-99", "--device", "cpu")
    assert "accuracy 1.000 over 5 images" in own.out
    assert "note: 5 of these images are in the source, and found there" in " ".join(own.out.split())
    new = place / "photos" / "gull" / "+.jpg"  # comes first
    trees.photo(new, 77)
    grouped = dmlkit("identify", place / "gallery", place / "photos", "--by", "folder", "--device", "cpu")
    new.unlink()
    folders = len(list((place / "photos").iterdir()))
    assert f"note: {folders} of these groups are in the source" in " ".join(grouped.out.split()), grouped.err
    assert "in the source" not in result.out  # a copy of one is another file


def test_a_gallery_keeps_its_threshold(place: Path, tmp_path: Path):
    gallery = tmp_path / "gallery"
    create_gallery(place / "run", place / "photos", gallery, settings=GallerySettings(threshold=-1e-5), model=ON_CPU)
    labels = [answer.label for answer in identify(gallery, place / "asked", model=ON_CPU).answers]
    assert labels == ["unknown"] * 12 + ["finch"]
    answers = identify(gallery, place / "asked", rule=LabelRule(threshold=-99), model=ON_CPU).answers
    assert "unknown" not in {answer.label for answer in answers}


def test_one_label_has_no_margin(place: Path, tmp_path: Path):
    gallery = tmp_path / "gallery"
    create_gallery(place / "run", place / "photos" / "crow", gallery, label="crow", model=ON_CPU)
    for by in ("nearest", "vote"):
        identified = identify(gallery, place / "asked", rule=LabelRule(by), model=ON_CPU)
        assert {answer.label for answer in identified.answers} == {"crow"}
        assert {answer.margin for answer in identified.answers} == {None}
    identified.write(tmp_path / "answers.csv")
    row = (tmp_path / "answers.csv").read_text().splitlines()[1].split(",")
    assert row[3] == "" and row[5] == "" and row[20] == "" and len(row) == 33  # two pictures: no third one is near


def test_a_known_label_may_be_that_of_a_deeper_folder(place: Path, tmp_path: Path):
    wanted = {"2020/crow/a.jpg": "crow", "2021/dove/b.jpg": "dove", "gull/2021/c.jpg": "gull", "emu/d.jpg": None}
    trees.photos(tmp_path / "asked", wanted, first=300, side=(40, 30))
    answers = dict(identify(place / "gallery", tmp_path / "asked", model=ON_CPU).labeled())
    known = {str(Path(path).relative_to(tmp_path / "asked")): answer.known for path, answer in answers.items()}
    paths = ["fox/cat/1.jpg", "fox/fox/1.jpg"]
    (tmp_path / "fox").mkdir()
    found = known_labels(tmp_path / "fox", [str(tmp_path / path) for path in paths], ["cat", "fox"], ["cat", "fox"])
    assert [*found] == ["cat", "fox"]  # their own, before that of the folder above
    assert known == wanted


def test_what_cannot_be_identified_is_refused(place: Path, tmp_path: Path, dmlkit: Cli):
    gallery, table = tmp_path / "gallery", tmp_path / "answers.csv"
    create_gallery(place / "run", place / "photos" / "dove" / "0.jpg", gallery, model=ON_CPU)
    other = embeddings_at(tmp_path / "other", np.eye(5, 8, dtype=np.float32))
    np.save(array := tmp_path / "rows.npy", GalleryFolder(place / "gallery").points_at(torch.arange(4)).numpy())
    for words, message in (
        ((gallery, place / "asked"), f"{gallery}: no image has a label; add images with their labels"),
        ((place / "gallery", place / "asked", "-k", 0, "--method", "vote"), "-k 0: expected at least 1"),
        ((place / "gallery", place / "asked", "-k", 3), "-k 3: applies to --method vote, got --method nearest; add"),
        ((place / "gallery", place / "asked", "--threshold", "nan"), "--threshold nan: expected a similarity"),
        ((place / "gallery", place / "asked", "--threshold", "60"), "--threshold 60: expected at most"),
        ((place / "gallery", array, "--by", "folder"), "have no folders or columns; remove this option"),
        ((place / "gallery", other), "embeddings with 8 dimensions, but"),
        ((place / "gallery", place / "asked", "--run", tmp_path), "no run here"),
    ):
        dmlkit("identify", *words, "-o", table).refused(message)
    assert not table.exists()


def test_each_box_gets_an_answer(place: Path, tmp_path: Path, dmlkit: Cli):
    """Two photos of the gallery side by side in one image: each box finds its own, in all commands."""
    both = Image.new("RGB", (80, 30))
    for left, name in ((0, "finch"), (40, "gull")):
        both.paste(Image.open(place / "photos" / name / "0.jpg"), (left, 0))
    (tmp_path / "asked").mkdir()
    both.save(tmp_path / "asked" / "both.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "both.txt").write_text("0 0.75 0.5 0.5 1\n0 0.25 0.5 0.5 1\n")
    asked, boxes = tmp_path / "asked", ("--boxes", tmp_path / "labels", "--device", "cpu")
    table, page = tmp_path / "answers.csv", tmp_path / "page.html"
    result = dmlkit("identify", place / "gallery", asked, *boxes, "-o", table, "-o", page).ok()
    assert "2 boxes, " in result.out and "box 40 0 80 30" in result.out
    rows = csv_rows(table)
    assert [[row[name] for name in ("guess", "x1", "y1", "x2", "y2")] for row in rows] == [
        ["gull", "40", "0", "80", "30"],
        ["finch", "0", "0", "40", "30"],
    ]
    assert all(float(row["score"]) == pytest.approx(0, abs=1e-3) for row in rows)
    assert page.read_text().count("<section") == 2
    found = identify(place / "gallery", table, boxes=Boxes(margin=0.1), model=ON_CPU)  # answers are a table of boxes
    assert [answer.known for answer in found.answers] == ["gull", "finch"]
    for row, answer in zip(rows, found.answers, strict=True):  # the margin shows other pixels
        assert answer.score != pytest.approx(float(row["score"]), abs=1e-7)

    assert "box 0 0 40 30" in " ".join(dmlkit("search", place / "gallery", asked, *boxes).out.split())
    near = dmlkit("search", place / "gallery", asked, *boxes, "-k", "1", "--json").json()["queries"]
    assert [query["box"] for query in near] == [[40, 0, 80, 30], [0, 0, 40, 30]]
    assert [query["neighbors"][0]["label"] for query in near] == ["gull", "finch"]
    assert dmlkit("embed", place / "run", asked, *boxes, "-o", tmp_path / "e").code == 0
    items = parquet.read_table(tmp_path / "e" / "items.parquet").to_pydict()
    assert items["x1"] == [40, 0] and items["y2"] == [30, 30] and len(set(items["path"])) == 1
    gallery = tmp_path / "gallery"
    create_gallery(place / "run", None, gallery, model=ON_CPU)
    assert "2 images added" in dmlkit("gallery", "add", gallery, asked, *boxes, "--label", "bird").out
    assert "2 images skipped" in dmlkit("gallery", "add", gallery, asked, *boxes).out
    near_table = tmp_path / "near.csv"
    near_table.write_text("query,rank,similarity,id,label,path,x1,y1,x2,y2\n")  # as earlier versions wrote it
    found_here = dmlkit("search", gallery, asked, *boxes, "-k", 1, "--json", "-o", near_table)
    sides = [[*map(float, list(row.values())[-8:])] for row in csv_rows(near_table)]
    for query, row in zip(json.loads(found_here.out)["queries"], sides, strict=True):
        assert query["neighbors"][0]["box"] == query["box"] == row[:4] == row[4:]
    table.write_text(",".join([*rows[0]][:21]) + "\n")  # as earlier versions wrote it
    assert "2 of these boxes are in the source" in dmlkit("identify", gallery, asked, *boxes, "-o", table).out
    for row in csv_rows(table):
        assert [row[f"nearest_{side}_1"] for side in ("x1", "y1", "x2", "y2")] == [*row.values()][8:12] != [""] * 4
        assert row["nearest_x1_3"] == "" != row["nearest_x1_2"]
    assert "in the source" not in dmlkit("identify", gallery, asked, "--device", "cpu").ok().out
    chosen, two = tmp_path / "chosen.csv", tmp_path / "two.csv"
    two.write_text("path,x1,y1,x2,y2\nasked/both.png,10,0,50,30\nasked/both.png,30,0,70,30\n")
    for _ in range(2):  # also over the table of the first time
        assert dmlkit("select", place / "gallery", two, "-n", "2", "-o", chosen).code == 0
    assert sorted(row["x1"] for row in csv_rows(chosen)) == ["10.0", "30.0"]
    asked_next = dmlkit("select", place / "gallery", two, "-n", "2", "--json").json()["images"]
    assert sorted(one["box"] for one in asked_next) == [[10, 0, 50, 30], [30, 0, 70, 30]]
    unlabeled = dmlkit("select", tmp_path / "e", "-n", "2", "--json").json()["images"]  # its own images
    assert sorted(one["box"] for one in unlabeled) == [[0, 0, 40, 30], [40, 0, 80, 30]]
    dmlkit("review", place / "gallery", two, "-o", tmp_path / "review", "--device", "cpu").refused(
        "has boxes of images, and a review asks about whole images"
    )
    for source in (gallery, tmp_path / "e"):  # several boxes of an image differ wherever images are listed
        for words in (("search", source, asked), ("duplicates", source), ("cluster", source, "-k", "2")):
            result = dmlkit(*words)
            shown = " ".join(result.out.split())
            assert "box 0 0 40 30" in shown and "box 40 0 80 30" in shown, result.err
    listed = tmp_path / "listed.csv"
    for words in (("duplicates", tmp_path / "e", "--threshold", "-100"), ("cluster", tmp_path / "e", "-k", "2")):
        for _ in range(2):  # also over the table of the first time
            assert dmlkit(*words, "-o", listed).code == 0
        rows = [[float(row[side]) for side in ("x1", "y1", "x2", "y2")] for row in csv_rows(listed)]
        assert sorted(rows) == [[0, 0, 40, 30], [40, 0, 80, 30]]
        listed.unlink()
    for _ in range(2):
        assert dmlkit("duplicates", tmp_path / "e", place / "gallery", "--threshold", "-100", "-o", listed).code == 0
    pairs = csv_rows(listed)
    assert {(row["x1"], row["other_x1"]) for row in pairs} == {("0.0", ""), ("40.0", "")}
    labels = tmp_path / "labels"
    again = open_gallery(place / "gallery", device="cpu").identify(asked, boxes=labels)
    assert [answer.guess for answer in again.answers] == ["gull", "finch"]
    assert [box and list(box[:4]) for box in again.neighbors.boxes] == [query["box"] for query in near]
    in_python = open_gallery(gallery, device="cpu")
    assert in_python.add(asked, label="bird", boxes=Boxes(labels, margin=0.2)).added == 2  # other pixels
    found_there = in_python.search(asked, k=1, boxes=labels).neighbors()
    assert [found[0].similarity for _, found in found_there] == pytest.approx([0, 0], abs=1e-3)
    with pytest.raises(UserError, match="has no boxes and no columns; name a file of boxes with --boxes"):
        in_python.add(asked, boxes=Boxes(confidence=0.5))
    before = len(GalleryFolder(gallery))
    (tmp_path / "labels" / "both.txt").write_text("0 0.75 0.5 0.9 1\n")
    for words in (("gallery", "add", gallery), ("identify", gallery), ("search", gallery), ("embed", place / "run")):
        wrong = dmlkit(*words, asked, *boxes)  # after a note on other columns
        assert wrong.code == 2 and "both.txt:1: the box" in wrong.err.splitlines()[-1], wrong
    assert len(GalleryFolder(gallery)) == before
    for words, message in (
        (("--box-confidence", "0.5"), "has no boxes and no columns; name a file of boxes with --boxes"),
        (("--box-margin", "0.5"), "has no boxes and no columns; name a file"),
    ):
        result = dmlkit("identify", gallery, asked, *words)
        assert result.code == 2 and message in " ".join(result.err.split())
    result = dmlkit("identify", place / "gallery", place / "gallery", "--boxes", labels)
    assert result.code == 2 and "--boxes" in result.err and "is a gallery" in " ".join(result.err.split())


def test_a_box_is_drawn(tmp_path: Path):
    Image.new("RGB", (160, 80), "blue").save(tmp_path / "a.png")
    shown = np.asarray(Image.open(BytesIO(drawn_picture(str(tmp_path / "a.png"), Box(40, 20, 100, 60)))))
    assert shown.shape == (80, 160, 3)
    is_blue = (shown[..., 2] > 150) & (shown[..., 0] < 60)
    assert is_blue[:18].all() and is_blue[:, :38].all() and is_blue[30:50, 50:90].all()
    assert not is_blue[20, 40:100].any() and not is_blue[20:60, 40].any() and not is_blue[59, 40:100].any()
    assert (shown[20:60, 40, 0] > 150).all()  # yellow


def test_a_table_of_queries_needs_no_labels(place: Path, tmp_path: Path, dmlkit: Cli, caplog: pytest.LogCaptureFixture):
    """With and without the column of labels, answers are the same, but only known labels can be right."""
    table = place / "asked.csv"
    words = ("identify", place / "gallery", table, "-o", tmp_path / "answers.json", "--device", "cpu")
    found: list[Any] = []
    for header, cells in (("path,camera", ",3"), ("path,label,camera", ",finch,3")):
        lines = [f"asked/{name}.jpg{cells}" for name in ("0", "known")]
        table.write_text("\n".join([header, *lines]) + "\n")
        dmlkit(*words).ok()
        found.append(json.loads((tmp_path / "answers.json").read_text()))
    without, with_labels = found
    assert without["accuracy"] is None and with_labels["accuracy"]["images"] == 2
    assert [image | {"known": None} for image in with_labels["images"]] == without["images"]
    assert caplog.messages == [f"{table}: other columns: camera"] * 2  # once a command
    caplog.clear()
    for name in ("Labels", "lable"):
        table.write_text(f"path,table,{name}\nasked/0.jpg,1,finch\n")
        assert dmlkit(*words).code == 0 and f"no image has a known label; did you mean '{name}'?" in caplog.text
        caplog.clear()
    table.write_text("\n".join(["path,table,camera", "asked/0.jpg,1,3", "asked/known.jpg,1,3"]) + "\n")
    grouped = dmlkit(*words[:3], "--by", "camera", "--device", "cpu")
    assert caplog.messages == [f"{table}: other columns: table, camera"]
    assert grouped.code == 0 and "1 group" in grouped.out, grouped
    table.write_text("place,camera\na.jpg,3\n")
    dmlkit(*words).refused("has no column 'path'")


@pytest.mark.parametrize("box", [Box(10.4, 5.0, 10.6, 20.0), Box(4.0, 7.4, 30.0, 7.6), Box(39.6, 29.6, 40.0, 30.0)])
def test_a_box_narrower_than_a_pixel_is_drawn(box: Box, tmp_path: Path):
    photo = trees.photo(tmp_path / "photo.jpg", 1, (40, 30))
    plain, drawn = (np.asarray(Image.open(BytesIO(drawn_picture(str(photo), one)))).astype(int) for one in (None, box))
    rows, columns = np.nonzero(abs(drawn - plain).max(2) > 60)
    scale = plain.shape[1] / 40
    assert rows.size and abs(columns / scale - (box.left + box.right) / 2).min() < 2
    assert abs(rows / scale - (box.top + box.bottom) / 2).min() < 2
