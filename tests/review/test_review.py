"""A review of labels: questions that a person answers in a table, the bound, and the table of labels."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from dmlkit.evaluation.image_gallery import ImageGallery
from dmlkit.gallery.change import add_images, create_gallery
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.metrics.audit import LabelAudit
from dmlkit.review import proposals
from dmlkit.review.folder import ReviewFolder
from dmlkit.review.proposals import ProposedLabel, Review, propose
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.points import PointSet
from tests.conftest import csv_rows, refuses
from tests.datasets import trees
from tests.vectors.stored import ON_CPU


def write_answers(path: Path, answers: list[str]) -> None:
    rows = csv_rows(path)
    for row, answer in zip(rows, answers, strict=True):
        row["answer"] = answer
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["path", "label", "answer"])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def inbox(place: Path, tmp_path: Path) -> tuple[Path, Path]:
    create_gallery(place / "run", place / "photos", tmp_path / "gallery", model=ON_CPU)
    trees.photos(tmp_path / "inbox", (f"{index}.jpg" for index in range(6)), first=100, side=(40, 30))
    return tmp_path / "gallery", tmp_path / "inbox"


def test_help_names_the_gallery_and_the_inbox(dmlkit):
    shown = dmlkit("review", "--help").out
    assert "{GALLERY} {INBOX}" in shown and "SOURCE" not in shown and "QUERIES" not in shown


def test_answers_are_read_up_to_the_first_empty_one(dmlkit, inbox: tuple[Path, Path], tmp_path: Path):
    gallery, images = inbox
    words, folder = ("review", gallery, images, "-o", tmp_path / "review", "--device", "cpu"), tmp_path / "review"
    result = dmlkit(*words, "-n", "4").ok()
    assert "of 6 labels at most 6 (100.0%) are wrong, with 95% confidence, whenever you stop" in result.out
    asked = csv_rows(folder / "questions.csv")
    assert len(asked) == 4 and {row["answer"] for row in asked} == {""}
    write_answers(folder / "questions.csv", ["same", "a new bird", "", "same"])
    assert dmlkit(*words, "-n", "4").code == 0
    state = ReviewFolder(folder)
    row_of = {one.path: row for row, one in enumerate(state.review.proposals)}
    given = [list(state.answers(row_of[row["path"]]).values()) for row in asked]
    assert given == [[asked[0]["label"]], ["a new bird"], [], [asked[3]["label"]]]
    assert state.statement().checked == 2  # the last answer is kept, and counts after that before it
    now = csv_rows(folder / "questions.csv")
    assert now[0]["path"] == asked[2]["path"] and len(now) == 3
    write_answers(folder / "questions.csv", ["?", "same", "same"])
    answered = (folder / "questions.csv").read_bytes()
    result = dmlkit(*words)
    (folder / "questions.csv").write_bytes(answered)  # as if the command had been killed before it wrote the table
    assert dmlkit(*words).out == result.out
    assert result.code == 0 and "of 6 labels at most 0 (0.0%) are wrong" in result.out
    labels = {row["path"]: row["label"] for row in csv_rows(folder / "labels.csv")}
    assert labels[Path(asked[1]["path"]).name] == "a new bird" and Path(asked[2]["path"]).name not in labels
    (tmp_path / "rows.npy").touch()
    rows = dmlkit("review", gallery, tmp_path / "rows.npy", "-o", tmp_path / "other", "--add")
    rows.refused("have no files to add; remove --add")
    assert "5 images added" in dmlkit(*words, "--add").ok().out
    assert ImageGallery(gallery).labels()["a new bird"] == 1 and len(ImageGallery(gallery)) == 12 + 5


def proposed(row: int, label: str | None = "a", probability: float = 0.9, group: int | None = None) -> ProposedLabel:
    return ProposedLabel(path=f"{row}.jpg", label=label, probability=probability, id=f"{row}", group=group)


def begin(folder: Path, proposals: list[ProposedLabel], **shares: float) -> ReviewFolder:
    folder.mkdir()
    shares = {"wrong": 0.05, "audit": 0.5, **shares}
    names = tuple({proposal.label for proposal in proposals if proposal.label})
    Review(gallery="g", images="i", names=names, proposals=tuple(proposals), **shares).write(folder / "review.json")
    return ReviewFolder(folder)


def test_the_bound_is_that_of_the_replies(tmp_path: Path):
    proposals = [proposed(row, probability=0.5 + row / 100) for row in range(40)]
    state = begin(tmp_path / "review", proposals)
    asked, left = state.ask(30), set(range(40))
    for question in asked:  # one that is not drawn is the most doubtful one that is left
        assert question.row in left and (question.is_draw or question.row == min(left))
        left.remove(question.row)
    assert {question.is_draw for question in asked} == {True, False}
    rows = [question.row for question in asked]
    answers = {row: "b" if row % 7 == 0 else None if row % 11 == 0 else "a" for row in rows}
    expected, now = LabelAudit([proposal.probability for proposal in proposals]), state.statement()
    for number, question in enumerate(asked):
        assert state.reply({question.row: answers[question.row]}, "ada") == 1
        expected.add(question.row, is_wrong=answers[question.row] != "a", is_draw=question.is_draw)
        now = state.statement()
        assert (now.most_wrong, now.checked) == (expected.most_wrong(), number + 1)
    assert now.corrected == sum(answer != "a" for answer in answers.values())
    assert state.waiting == []
    assert ReviewFolder(tmp_path / "review").statement() == now  # as another process reads it


def test_an_answer_holds_for_its_group_and_what_it_changes_counts_as_wrong(tmp_path: Path):
    groups = [0, 0, 0, None, None, None, 1, 1, None]  # the last three are unknown
    labels = ["a", "b", "a", "a", "b", "b", None, None, None]
    rows = enumerate(zip(labels, groups, strict=True))
    proposals = [proposed(row, label, 0.9 if label else 0.0, group) for row, (label, group) in rows]
    state = begin(tmp_path / "review", proposals, audit=0.01)
    assert state.ask_unknown() == [[6, 7], [8]]
    before = state.statement()
    assert (before.labels, before.most_wrong, before.unknown, before.spread) == (6, 6, 3, 0)
    state.reply({0: "c"}, "ada")
    assert [state.label(row) for row in range(9)] == ["c", "c", "c", "a", "b", "b", None, None, None]
    assert state.statement().spread == 2
    state.reply({1: "b"}, "ada")  # the group has two labels: it gives none to others
    assert [state.label(row) for row in range(3)] == ["c", "b", "a"] and state.statement().spread == 0
    state.reply({6: "new", 8: None}, "ada")
    now = state.statement()
    assert [state.label(row) for row in (6, 7, 8)] == ["new", "new", None] and state.ask_unknown() == [[7]]
    assert (now.labels, now.spread, now.unknown) == (7, 1, 0)
    while asked := state.ask(1):
        row = asked[0].row
        state.reply({row: "new" if row == 7 else labels[row]}, "ada")
    done = state.statement()
    assert (done.checked, done.most_wrong, done.corrected) == (7, 0, 1)
    assert state.ask_unknown() == []
    for row in (-1, 9):  # a line on it would make the journal unreadable
        refuses(f"row {row}: expected an image of this review, 0 to 8", state.reply, {0: "a", row: "b"}, "ada")
    assert ReviewFolder(tmp_path / "review").statement() == done


def test_labels_that_unknown_images_have_from_answers_are_drawn_too(tmp_path: Path):
    """Two hundred proposals that are right; 300 unknown images in 30 groups, of which 3 images are of another label."""
    proposals = [proposed(row, probability=0.99) for row in range(200)]
    proposals += [proposed(row, None, 0.0, row // 10) for row in range(200, 500)]
    truth = {row: "a" if row < 200 else "odd" if row in (207, 333, 481) else f"new {row // 10}" for row in range(500)}
    state = begin(tmp_path / "review", proposals)
    for group in state.ask_unknown():
        state.reply({group[0]: truth[group[0]]}, "ada")
    at_first = state.statement()
    assert (at_first.labels, at_first.spread, at_first.most_wrong) == (470, 270, 470)
    asked = list[int]()
    while (now := state.statement()).most_wrong > 0.05 * now.labels:
        (question,) = state.ask(1)
        asked.append(question.row)
        state.reply({question.row: truth[question.row]}, "ada")
        wrong = sum(state.label(row) not in (None, truth[row]) for row in range(500))
        assert wrong <= state.statement().most_wrong
    copied = [row for row in asked if row >= 200]
    assert 0 < len(copied) < 135 and len(set(copied)) == len(copied) and len(asked) < at_first.more_draws * 1.5
    assert ReviewFolder(tmp_path / "review").statement() == now
    assert (tmp_path / "review" / "answers.jsonl").read_text().count('"copied"') == 1


def test_near_duplicates_are_asked_about_once_unless_they_are_drawn(tmp_path: Path):
    state = begin(tmp_path / "review", [proposed(row, "a", 0.5, row // 10) for row in range(60)], audit=0.01)
    asked = [question for question in state.ask(20) if not question.is_draw]
    assert len({question.row // 10 for question in asked}) == len(asked) == 6


def test_a_disagreement_counts_as_wrong_until_it_ends(tmp_path: Path):
    state = begin(tmp_path / "review", [proposed(0)])
    (question,) = state.ask(1)
    state.reply({question.row: "a"}, "ada")
    assert state.reply({question.row: "a"}, "ada") == 0  # sent twice, kept once
    ReviewFolder(tmp_path / "review").reply({question.row: "b"}, "bob")
    state.refresh()
    now = state.statement()
    assert (now.disagreements, now.corrected, state.label(0)) == (1, 1, None)
    assert state.answers(0) == {"ada": "a", "bob": "b"} and state.disagreements() == [0]
    state.reply({question.row: "a"}, "bob")
    now = state.statement()
    assert (now.disagreements, now.corrected, now.most_wrong, state.label(0)) == (0, 0, 0, "a")


def test_what_a_killed_process_began_to_write_is_no_answer(tmp_path: Path):
    state = begin(tmp_path / "review", [proposed(row) for row in range(4)])
    rows = [question.row for question in state.ask(3)]
    state.reply({rows[0]: "a"}, "ada")
    journal = tmp_path / "review" / "answers.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"answer":{"row":1,"id":"1","lab')
    state = ReviewFolder(tmp_path / "review")
    assert state.statement().checked == 1
    state.reply({rows[1]: "b"}, "ada")
    assert ReviewFolder(tmp_path / "review").statement().checked == 2
    kept = journal.read_bytes()
    assert kept.count(b"\n") == 5
    journal.write_bytes(kept + b"{}\n{\n")
    refuses(r"answers\.jsonl: expected a question or an answer", ReviewFolder, tmp_path / "review")


def test_a_line_of_another_review_is_reported_at_every_call(tmp_path: Path):
    state = begin(tmp_path / "review", [proposed(0)])
    state.reply({state.ask(1)[0].row: "a"}, "ada")
    journal = tmp_path / "review" / "answers.jsonl"
    kept = journal.read_bytes()
    journal.write_bytes(kept + b'{"question":{"row":9,"is_draw":true}}\n')
    for _ in range(2):
        refuses("a line on an image of another review", state.refresh)
    journal.write_bytes(kept)
    state.refresh()
    assert state.statement().checked == 1 and state.waiting == []


def test_images_that_an_answer_cannot_tell_apart_are_refused(tmp_path: Path):
    numbers = np.random.default_rng(0).normal(size=(24, 4))
    gallery, inbox = ({"vector": part.tolist()} for part in (numbers[:20], numbers[20:]))
    parquet.write_table(pa.table({**gallery, "label": ["a", "b"] * 10}), tmp_path / "gallery.parquet")
    parquet.write_table(pa.table({**inbox, "path": ["0.jpg", "1.jpg", "2.jpg", "1.jpg"]}), tmp_path / "inbox.parquet")
    places = tmp_path / "gallery.parquet", tmp_path / "inbox.parquet"
    refuses(r"inbox\.parquet: has 1\.jpg 2 times", propose, *places, 0.01, 0.25, model=ON_CPU)


def test_frames_of_a_video_have_no_files_to_add(dmlkit, tmp_path: Path):
    (tmp_path / "gallery").mkdir()
    for name in ("gallery/gallery.json", "clip.mp4"):
        (tmp_path / name).touch()
    result = dmlkit("review", tmp_path / "gallery", tmp_path / "clip.mp4", "-o", tmp_path / "review", "--add")
    assert "clip.mp4 have no files to add; remove --add" in " ".join(result.refused("the frames of").err.split())


@pytest.mark.parametrize(
    ("said", "label"),
    [("Same", "a"), ("SAME", "a"), ("same.", "a"), ("?", None), ("??", None), ("?.", None), ("Samen", "Samen")],
)
def test_answers_are_compared_after_case_and_a_final_dot(tmp_path: Path, said: str, label: str | None):
    state = begin(tmp_path / "review", [proposed(row) for row in range(9)])
    row = state.ask(1)[0].row
    state.reply({row: said}, "ada")
    assert state.answers(row) == {"ada": label}
    assert state.new_labels() == ({} if label in ("a", None) else {label: 1})
    assert state.statement().corrected == (label != "a")


@pytest.mark.parametrize("label", ["?", "Same", "??."])
def test_an_answer_that_is_a_label_of_the_gallery_means_it(tmp_path: Path, label: str):
    state = begin(tmp_path / "review", [proposed(0), proposed(1, label)])
    state.reply({0: label, 1: label}, "ada")
    assert [state.answers(row) for row in (0, 1)] == [{"ada": label}, {"ada": label}]


def test_embeddings_and_arrays_can_be_reviewed(dmlkit, inbox: tuple[Path, Path], place: Path, tmp_path: Path):
    gallery, images = inbox
    stored = tmp_path / "stored"
    assert dmlkit("embed", place / "run", images, "-o", stored, "--device", "cpu").code == 0
    assert dmlkit("review", gallery, stored, "-o", tmp_path / "a").code == 0
    assert {Path(row["path"]) for row in csv_rows(tmp_path / "a/labels.csv")} == set(images.iterdir())
    dmlkit("review", gallery, stored / "embeddings.npy", "-o", tmp_path / "b").ok()
    assert [row["path"] for row in csv_rows(tmp_path / "b/labels.csv")] == [f"row {number}" for number in range(6)]


def test_new_labels_are_named_before_they_are_added(dmlkit, inbox: tuple[Path, Path], tmp_path: Path):
    gallery, images = inbox
    words, table = ("review", gallery, images, "-o", tmp_path / "r", "--device", "cpu"), tmp_path / "r/questions.csv"
    assert dmlkit(*words, "-n", "3").code == 0
    own = ImageGallery(gallery).labels()
    spelled = str(next(iter(own))).upper()
    write_answers(table, [spelled, "a new bird", "Same"])
    noted = table.read_bytes().replace(b"path,label,answer", b"path,label,answer,notes")
    table.write_bytes(noted)
    stopped = dmlkit(*words, "--add").refused("2 labels new in these answers, so nothing was added")
    output = " ".join(stopped.out.split())
    assert f"2 labels that {gallery} did not have: '{spelled}' (not '{spelled.lower()}'), 'a new bird'" in output
    assert ImageGallery(gallery).labels() == own and (tmp_path / "r/questions.csv.old").read_bytes() == noted
    corrected = (tmp_path / "r/labels.csv").read_bytes() + b"by hand\n"
    (tmp_path / "r/labels.csv").write_bytes(corrected)
    assert dmlkit(*words, "--add").code == 0
    assert (tmp_path / "r/labels.csv.old").read_bytes() == corrected
    now = ImageGallery(gallery).labels()
    assert {label: now[label] for label in now.keys() - own} == {spelled: 1, "a new bird": 1}


def test_a_review_goes_on_where_its_folders_have_another_path(dmlkit, inbox: tuple[Path, Path], tmp_path: Path):
    gallery, images = inbox
    folder, link = tmp_path / "review", tmp_path / "link"
    link.symlink_to(images)
    for paths in ((gallery, images), map(os.path.relpath, (gallery, images)), (gallery, link)):
        asked = dmlkit("review", *paths, "-o", folder, "--device", "cpu")
        assert asked.code == 0
        assert csv_rows(folder / "questions.csv")[0]["path"].startswith(str(images))


def test_what_a_review_refuses(dmlkit, inbox: tuple[Path, Path], tmp_path: Path):
    gallery, images = inbox
    folder = tmp_path / "review"
    assert dmlkit("review", gallery, images, "-o", folder, "--device", "cpu").code == 0
    before = (folder / "review.json").read_bytes(), (folder / "answers.jsonl").read_bytes()
    path = csv_rows(folder / "questions.csv")[0]["path"]
    for answers, message in (
        (["unknown"], "'unknown' is no label"),
        (["one", "two"], f"questions.csv:3: {path} has the answers one and two; keep one of them"),
    ):
        lines = ["path,label,answer", *(f"{path},x,{answer}" for answer in answers)]
        (folder / "questions.csv").write_text("\n".join(lines))
        dmlkit("review", gallery, images, "-o", folder, "--device", "cpu").refused(message)
    (folder / "questions.csv").write_text("path,label,answer\nother.jpg,a,same\n")
    for words, message in (
        ((gallery, images, "-o", folder), "questions.csv:2: expected the columns path, label, answer"),
        ((gallery, images / "0.jpg", "-o", folder), "this is a review of"),
        ((gallery, images, "-o", images / "review"), "where every file is read as data"),
    ):
        dmlkit("review", *words, "--device", "cpu").refused(message)
    assert ((folder / "review.json").read_bytes(), (folder / "answers.jsonl").read_bytes()) == before


def test_images_that_a_review_leaves_out_or_knows_are_told_when_it_starts(
    dmlkit, inbox: tuple[Path, Path], place: Path, tmp_path: Path
):
    gallery, images = inbox
    for name in ("x.jpg", "y.jpg"):
        (images / name).write_bytes(b"none")
    result = dmlkit("review", gallery, images, "-o", tmp_path / "r", "--device", "cpu").ok()
    assert "x.jpg: cannot read this image" in result.err and "1 more of this kind" in result.err
    assert f"no image is unknown without a threshold; run dmlkit calibrate {gallery}" in result.err  # it has none
    assert "of 6 labels" in result.out and "found there" not in result.err
    own = next((place / "photos").glob("*/*.jpg"))
    result = dmlkit("review", gallery, own, "-o", tmp_path / "own").ok()
    assert f"{own}: 1 of these images is in {gallery}, and found there" in result.err


def test_one_label_by_the_threshold_of_pairs(dmlkit, inbox: tuple[Path, Path], tmp_path: Path):
    gallery, images = inbox
    manifest = json.loads((gallery / "gallery.json").read_text())
    (gallery / "gallery.json").write_text(json.dumps({**manifest, "threshold": -0.75}))  # of its run, when created
    result = dmlkit("review", gallery, images / "0.jpg", "-o", tmp_path / "r", "--device", "cpu").ok()
    assert f"the threshold -0.75 is for pairs of images; run dmlkit calibrate {gallery}" in result.err
    assert "about 1 more answer on labels drawn at random would make it 1.0%" in result.out


def test_what_is_not_added_is_told(dmlkit, inbox: tuple[Path, Path], tmp_path: Path):
    gallery, images = inbox
    words = ("review", gallery, images, "-o", tmp_path / "r", "--device", "cpu")
    dmlkit(*words).ok()
    ImageGallery(gallery, device="cpu").add(images / "0.jpg", label="emu")
    (images / "1.jpg").unlink()
    result = dmlkit(*words, "--add").ok()
    assert f"4 images added to {gallery}" in result.out
    assert f"to undo it: dmlkit gallery restore {gallery} 2" in result.out
    assert "1 image skipped: already in the gallery" in result.out and "the label 'emu', which it keeps" in result.out
    assert "1 image skipped: could not be read" in result.out and "1.jpg: cannot read this image" in result.out
    again = dmlkit(*words, "--add").ok()
    assert "0 images added" in again.out and "5 images skipped: already" in again.out and "undoes" not in again.out


def test_only_a_gallery_gets_the_advice_to_serve_or_change_it(
    dmlkit, inbox: tuple[Path, Path], place: Path, tmp_path: Path
):
    stored = tmp_path / "stored"
    dmlkit("embed", place / "run", place / "photos", "-o", stored, "--device", "cpu").ok()
    for source, advises in ((stored, False), (inbox[0], True)):
        result = dmlkit("review", source, inbox[1], "-o", tmp_path / f"of_{source.name}", "--device", "cpu").ok()
        shown, advice = result.out, result.err
        assert ("use identify --threshold" in advice, "run dmlkit calibrate" in advice) == (not advises, advises)
        assert "next: write answers into" in shown and "all labels: " in shown
        assert ("dmlkit serve" in shown, "--add" in shown) == (advises, advises)


def test_images_without_a_label_are_in_no_pair_of_two_labels(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Groups are of images that are more alike than any two of the gallery with different labels, by a loop."""
    gallery, model = files / "gallery", ModelChoice(files / "run", device="cpu")
    labels = [letter for letter in "ABCDEFGH" for _ in range(5)]
    (gallery / "identification.json").unlink()
    manifest = json.loads((gallery / "gallery.json").read_text()) | {"threshold": -1.0, "threshold_is_own": True}
    (gallery / "gallery.json").write_text(json.dumps(manifest))
    points = GalleryFolder(gallery).points_at(torch.arange(40)).numpy()
    twin = tmp_path / "twin.png"  # of a labeled image, with other bytes
    twin.write_bytes((files / "photos/A/0.png").read_bytes() + b"0")
    add_images(gallery, twin, model=model)
    assert GalleryFolder(gallery).labels == [*labels, None]
    alike = points @ points.T
    closest = alike[np.array(labels)[:, None] != np.array(labels)].max()
    thresholds, measure = list[float](), proposals.pair_thresholds

    def recorded(searched: PointSet) -> tuple[float, float]:
        thresholds.extend(measure(searched))
        return thresholds[0], thresholds[1]

    monkeypatch.setattr(proposals, "pair_thresholds", recorded)
    propose(gallery, files / "photos" / "B", 0.1, 0.1, model=model)
    assert thresholds[0] == pytest.approx(closest + 1e-6, abs=1e-7)
