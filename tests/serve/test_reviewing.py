"""A review on the page of ``dmlkit serve``: its addresses, several reviewers, and what must be refused."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs dmlkit[serve]")
from fastapi.testclient import TestClient

from dmlkit.errors import UserError
from dmlkit.evaluation.image_gallery import ImageGallery
from dmlkit.gallery.change import add_images, create_gallery, rename_label
from dmlkit.identify.why import explain
from dmlkit.review import journal
from dmlkit.review.folder import ReviewFolder
from dmlkit.review.proposals import ProposedLabel, Review
from dmlkit.review.table import review
from dmlkit.serve import service as serving
from dmlkit.serve.access import Access
from dmlkit.serve.app import make_app
from dmlkit.serve.service import Service
from tests.conftest import END, refuses
from tests.datasets import trees
from tests.fuzz.conftest import FULL
from tests.gallery.conftest import BIRDS
from tests.processes import Forked, wait_until
from tests.vectors.stored import ON_CPU

LOCAL = "http://127.0.0.1"


@pytest.fixture
def folder(place: Path, tmp_path: Path) -> Path:
    """A gallery, an inbox and a review of its labels."""
    create_gallery(place / "run", place / "photos", tmp_path / "gallery", model=ON_CPU)
    trees.photos(tmp_path / "inbox", (f"{index}.jpg" for index in range(8)), first=100, side=(40, 30))
    review(tmp_path / "gallery", tmp_path / "inbox", tmp_path / "review", model=ON_CPU, ask=1)
    return tmp_path


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., TestClient]]:
    opened = list[TestClient]()

    def start(**options: Any) -> TestClient:
        service = Service(folder / "gallery", ON_CPU)
        access = Access(**{"allow_writes": True, "review": folder / "review", **options})
        opened.append(TestClient(make_app(service, access), LOCAL, raise_server_exceptions=False))
        return opened[-1].__enter__()

    yield start
    for client in opened:
        client.__exit__(None, None, None)


def ask(client: TestClient, reviewer: str, **wanted: Any) -> dict[str, Any] | None:
    response = client.post("/v1/review/question", json={"reviewer": reviewer, **wanted})
    assert response.status_code == 200, response.text
    return response.json()["question"]


def say(client: TestClient, question: dict[str, Any], label: str | None, reviewer: str) -> dict[str, Any]:
    body = {"reviewer": reviewer, "row": question["row"], "id": question["id"], "label": label}
    response = client.post("/v1/review/answer", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_question_that_another_reviewer_sees_is_asked_when_it_is_the_last_one(folder: Path, serve: Any):
    client, seen = serve(), set[int]()
    held = ask(client, "bob")  # who never answers
    while (question := ask(client, "ada")) is not None:
        seen.add(question["row"])
        say(client, question, question["label"], "ada")
    status = client.get("/v1/review").json()
    assert held is not None and held["row"] in seen and status["checked"] == status["labels"] == len(seen)


def test_answers_of_the_page_are_those_of_the_table_and_reach_the_gallery(folder: Path, serve: Any):
    client = serve()
    assert client.get("/v1/info").json()["review"] is True
    first = ask(client, "ada")
    assert first is not None and ask(client, "ada") == first  # until it has an answer
    other = ask(client, "bob")
    assert other is not None and other["row"] != first["row"]  # two people do not see one question
    assert say(client, other, "heron", "bob")["label"] == "heron"
    assert client.get("/v1/review").json()["checked"] == 0  # the question before it waits
    assert say(client, first, first["label"], "ada") == {
        "kept": 1,
        "answers": {"ada": first["label"]},
        "label": first["label"],
    }
    assert say(client, first, first["label"], "ada")["kept"] == 0
    now = client.get("/v1/review").json()
    state = ReviewFolder(folder / "review")
    assert (now["checked"], now["corrected"], now["most_wrong"]) == state.statement()[1:4] == (2, 1, now["most_wrong"])
    assert client.get(f"/v1/review/images/{first['row']}").content[:2] == b"\xff\xd8"

    say(client, first, "wren", "bob")
    now = client.get("/v1/review").json()
    assert now["disagree"] == [{"row": first["row"], "answers": {"ada": first["label"], "bob": "wren"}}]
    assert ask(client, "ada", row=first["row"])["answers"] == {"ada": first["label"], "bob": "wren"}
    say(client, first, None, "ada")
    say(client, first, None, "bob")
    while question := ask(client, "ada"):
        say(client, question, question["label"], "ada")
    while question := ask(client, "ada", about="unknown"):
        say(client, question, None, "ada")
    now = client.get("/v1/review").json()
    assert (now["most_wrong"], now["unknown"], now["checked"]) == (0, 0, now["labels"])
    before = len(ImageGallery(folder / "gallery"))
    assert client.post("/v1/review/add").json()["added"] == len(ReviewFolder(folder / "review").labeled())
    assert ImageGallery(folder / "gallery").labels()["heron"] == 1
    assert client.post("/v1/gallery/restore", json={"version": 1}).json()["images"] == before
    repeated, _ = review(folder / "gallery", folder / "inbox", folder / "review", model=ON_CPU)
    assert repeated.statement()._asdict() == {name: now[name] for name in repeated.statement()._asdict()}


def test_a_long_label_of_the_gallery_may_be_answered(folder: Path, serve: Any):
    taxon = "/".join(f"a rank with a long name {number}" for number in range(12))  # as of folders in folders
    for label in ImageGallery(folder / "gallery").labels():
        rename_label(folder / "gallery", str(label), f"{taxon}/{label}")
    review(folder / "gallery", folder / "inbox", folder / "long", model=ON_CPU, ask=1)
    client = serve(review=folder / "long")
    question = ask(client, "ada")
    assert question is not None and question["label"].startswith(taxon)
    assert say(client, question, question["label"], "ada")["kept"] == 1


def test_requests_are_answered_while_a_review_is_added(folder: Path, serve: Any, monkeypatch: pytest.MonkeyPatch):
    client, started, release = serve(), threading.Event(), threading.Event()

    def wait(*words: Any, **options: Any) -> Any:
        started.set()
        assert release.wait(END), "no request was answered meanwhile"
        return add_images(*words, **options)

    monkeypatch.setattr(serving, "add_images", wait)
    photo = [("images", ("a.jpg", (folder / "inbox" / "0.jpg").read_bytes()))]
    with client, ThreadPoolExecutor() as pool:
        adding = pool.submit(client.post, "/v1/review/add")
        assert started.wait(END)
        started.clear()
        second = pool.submit(client.post, "/v1/review/add")
        before = client.post("/v1/search?k=1", files=photo).json()["queries"][0]["nearest"][0]
        assert not started.is_set()  # one addition after the other: each loads a model
        release.set()
        added = adding.result().json()
        assert second.result().json()["added"] == 0
    after = client.post("/v1/search?k=1", files=photo).json()["queries"][0]["nearest"][0]
    assert added["version"] == client.get("/v1/info").json()["version"]
    assert before["path"] != after["path"] == str(folder / "inbox" / "0.jpg")


def test_an_addition_is_timed_from_its_begin(serve: Any, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise UserError("the disk is full")

    client = serve()
    monkeypatch.setattr(serving, "add_images", fail)
    assert client.post("/v1/review/add").status_code == 409
    assert "dmlkit_request_seconds_count 1.0" in client.get("/metrics").text


def test_why_is_that_of_the_command(folder: Path, place: Path, serve: Any):
    client = serve()
    question = ask(client, "ada")
    assert question is not None
    id_ = question["nearest"][0]["id"]
    listed = (client.get(f"/v1/gallery/images?label={label}").json()["images"] for label in BIRDS)
    (path,) = (image["path"] for images in listed for image in images if image["id"] == id_)
    expected, _ = explain(place / "run", Path(question["path"]), Path(path))
    answer = client.post(f"/v1/why?row={question['row']}&id={id_}").json()
    assert answer["score"] == pytest.approx(expected.score, abs=1e-5) and answer["grid"] == list(expected.grid)
    for heat, falls in zip(answer["heat"], expected.falls, strict=True):
        assert heat == pytest.approx(falls, abs=1e-5)
    photo = [("images", ("a.jpg", Path(question["path"]).read_bytes()))]
    sent = client.post(f"/v1/why?id={id_}", files=photo).json()
    assert sent["heat"][0] == pytest.approx(expected.falls[0], abs=1e-5) and len(sent["images"]) == 2


def test_what_a_review_refuses_has_a_status_and_a_message(
    folder: Path, place: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
):
    client = serve()
    question = ask(client, "ada")
    assert question is not None
    assert client.post("/v1/review/question", json={"reviewer": " "}).status_code == 422  # or it would be held for her
    body = {"reviewer": "ada", "row": question["row"], "id": question["id"], "label": "crow"}
    kept = (folder / "review" / "answers.jsonl").read_bytes()
    for change, status, message in (
        ({"row": 99}, 404, "no such image in this review"),
        ({"id": "0"}, 409, "0 is not the id of this image"),
        ({"label": "unknown"}, 409, "is no label"),
        ({"label": " "}, 409, "is no label"),
        ({"label": "\ud800"}, 422, "label"),
        ({"reviewer": "a\nb"}, 409, "printable"),
        ({"reviewer": " "}, 422, "reviewer"),
        ({"more": 1}, 422, "more"),
    ):
        response = client.post(
            "/v1/review/answer", content=json.dumps({**body, **change}), headers={"content-type": "application/json"}
        )
        assert (response.status_code, message in response.json()["error"]) == (status, True), response.text
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        assert client.post("/v1/review/answer", json=body, headers=headers).status_code == 403
    assert client.get("/v1/review/images/99").status_code == 404

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", full)
        response = client.post("/v1/review/answer", json=body)
        assert response.status_code == 409 and "free some space and answer again" in response.json()["error"]
    assert (folder / "review" / "answers.jsonl").read_bytes() == kept
    assert client.post("/v1/review/answer", json=body).json()["kept"] == 1
    (folder / "review").rename(folder / "away")
    for response in (client.get("/v1/review"), client.post("/v1/review/answer", json=body)):
        assert response.status_code == 409 and "missing" in response.json()["error"]
    assert not (folder / "review").exists()
    (folder / "away").rename(folder / "review")
    assert client.get("/v1/review").json()["checked"] == 1

    reader = serve(allow_writes=False, token="secret")
    secret = {"authorization": "Bearer secret"}
    assert reader.post("/v1/review/answer", json=body).status_code == 401
    assert reader.post("/v1/review/answer", json=body, headers=secret).status_code == 403
    assert reader.get("/v1/review", headers=secret).status_code == 200
    create_gallery(place / "run", None, folder / "other", model=ON_CPU)
    refuses("is a review of labels of", make_app, Service(folder / "other", ON_CPU), Access(review=folder / "review"))


def _answer_all(folder: Path) -> None:
    state = ReviewFolder(folder)
    while asked := state.ask(1):
        row = asked[0].row
        state.reply({row: f"label {row}"}, "ada")
        os.write(1, f"{row}\n".encode())


@pytest.mark.heavy
def test_a_kill_loses_no_acknowledged_answer_and_doubles_none(tmp_path: Path):
    kills, seed = 100 if FULL else 4, random.Random(0)
    proposals = tuple(
        ProposedLabel(path=f"{row}.jpg", label="a", probability=0.9, id=f"{row}") for row in range(20_000)
    )
    Review(gallery="g", images="i", wrong=0.01, audit=1, names=("a",), proposals=proposals).write(
        tmp_path / "review.json"
    )
    acknowledged = list[int]()
    for _ in range(kills):
        process = Forked(_answer_all, tmp_path)
        least = seed.randint(1, 8)
        wait_until(lambda process=process, least=least: process.printed().count("\n") >= least, process)
        time.sleep(seed.uniform(0.001, 0.1))
        process.kill()
        assert process.wait(END) == -signal.SIGKILL
        acknowledged += [int(line) for line in process.printed().splitlines(keepends=True) if line.endswith("\n")]
    state = ReviewFolder(tmp_path)
    assert len(set(acknowledged)) == len(acknowledged)
    assert all(state.answers(row) == {"ada": f"label {row}"} for row in acknowledged)
    answers = [line for line in (tmp_path / "answers.jsonl").read_bytes().splitlines() if b'"answer"' in line]
    assert len(acknowledged) <= len(answers) <= len(acknowledged) + kills  # a kill may come before the reply
    assert len({json.loads(line)["answer"]["row"] for line in answers}) == len(answers)
