"""A review of labels: questions that a person answers in a table, the bound, and the table of labels."""

import csv
from pathlib import Path

import pytest

from dmlkit.embedding.gallery.change import create_gallery
from dmlkit.embedding.image_gallery import ImageGallery
from dmlkit.embedding.questions.review import ProposedLabel, Review
from dmlkit.metrics.audit import LabelAudit
from tests.datasets import trees
from tests.embedding.gallery.conftest import place  # noqa: F401 - a fixture


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open(encoding="utf-8")))


def write_answers(path: Path, answers: list[str]) -> None:
    rows = rows_of(path)
    for row, answer in zip(rows, answers, strict=True):
        row["answer"] = answer
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["path", "label", "answer"])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def inbox(place: Path, tmp_path: Path) -> tuple[Path, Path]:  # noqa: F811
    create_gallery(place / "run", place / "photos", tmp_path / "gallery", device="cpu")
    for index in range(6):
        trees.photo(tmp_path / "inbox" / f"{index}.jpg", 100 + index, (40, 30))
    return tmp_path / "gallery", tmp_path / "inbox"


def test_answers_are_read_up_to_the_first_empty_one(dmlkit, inbox: tuple[Path, Path], tmp_path: Path):
    gallery, images = inbox
    words, folder = ("review", gallery, images, "-o", tmp_path / "review", "--device", "cpu"), tmp_path / "review"
    result = dmlkit(*words, "--ask", "4")
    assert result.code == 0, result.err
    assert "of 6 labels at most 6 (100.0%) are wrong, with 95% confidence, whenever you stop" in result.out
    asked = rows_of(folder / "questions.csv")
    assert len(asked) == 4 and {row["answer"] for row in asked} == {""}
    write_answers(folder / "questions.csv", ["same", "a new bird", "", "same"])
    assert dmlkit(*words, "--ask", "4").code == 0
    state = Review.read(folder / "review.json")
    assert [reply.label for reply in state.replies] == [asked[0]["label"], "a new bird"]
    now = rows_of(folder / "questions.csv")
    kept = [(row["path"], row["answer"]) for row in now[:2]]
    assert kept == [(asked[2]["path"], ""), (asked[3]["path"], "same")]  # later answers wait for this one
    write_answers(folder / "questions.csv", ["?", "same", "same", "same"])
    answered = (folder / "questions.csv").read_bytes()
    result = dmlkit(*words)
    (folder / "questions.csv").write_bytes(answered)  # as if the command had been killed before it wrote the table
    assert dmlkit(*words).out == result.out
    assert result.code == 0 and "of 6 labels at most 0 (0.0%) are wrong" in result.out
    labels = {row["path"]: row["label"] for row in rows_of(folder / "labels.csv")}
    assert labels[Path(asked[1]["path"]).name] == "a new bird" and Path(asked[2]["path"]).name not in labels
    added = dmlkit(*words, "--add")
    assert added.code == 0 and "5 images added" in added.out
    assert ImageGallery(gallery).labels()["a new bird"] == 1 and len(ImageGallery(gallery)) == 12 + 5


def test_the_bound_is_that_of_the_replies():
    proposals = tuple(ProposedLabel(path=f"{row}.jpg", label="a", probability=0.5 + row / 100) for row in range(40))
    state = Review(gallery="g", images="i", wrong=0.05, audit=0.5, proposals=proposals, unknown=0).ask(30)
    rows, left = [question.row for question in state.asked], set(range(40))
    for question in state.asked:  # one that is not drawn is the most doubtful one that is left
        assert question.row in left and (question.is_draw or question.row == min(left))
        left.remove(question.row)
    assert {question.is_draw for question in state.asked} == {True, False}
    answers = {f"{row}.jpg": "b" if row % 7 == 0 else "?" if row % 11 == 0 else "same" for row in rows}
    state, expected = state.reply(answers), LabelAudit([proposal.probability for proposal in proposals])
    for one in (reply.question for reply in state.replies):
        expected.add(one.row, is_wrong=answers[f"{one.row}.jpg"] != "same", is_draw=one.is_draw)
    now = state.statement()
    wrong = sum(answer != "same" for answer in answers.values())
    assert (now.most_wrong, now.corrected, now.checked, now.labels) == (expected.most_wrong(), wrong, 30, 40)
    assert state.asked == ()


def test_what_a_review_refuses(dmlkit, inbox: tuple[Path, Path], tmp_path: Path):
    gallery, images = inbox
    folder = tmp_path / "review"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert dmlkit("review", gallery, images, "-o", folder, "--device", "cpu").code == 0
    before = (folder / "review.json").read_bytes()
    rows = rows_of(folder / "questions.csv")
    (folder / "questions.csv").write_text(f"path,label,answer\n{rows[0]['path']},{rows[0]['label']},unknown\n")
    result = dmlkit("review", gallery, images, "-o", folder, "--device", "cpu")
    assert result.code == 2 and "'unknown' is not a valid label" in result.err
    (folder / "questions.csv").write_text("path,label,answer\nother.jpg,a,same\n")
    for words, message in (
        ((gallery, images, "-o", folder), "questions.csv:2: expected the columns path, label, answer"),
        ((gallery, images / "0.jpg", "-o", folder), "this is a review of"),
        ((gallery, images, "-o", tmp_path / "full"), "has notes.txt but no review"),
        ((gallery, images, "-o", images / "review"), "where every file is read as data"),
    ):
        result = dmlkit("review", *words, "--device", "cpu")
        assert result.code == 2 and message in result.err and result.err.count("\n") == 1, result.err
    assert (folder / "review.json").read_bytes() == before
