"""``dmlkit serve`` against the functions that the commands call, and against requests that must be refused."""

import asyncio
import base64
import shutil
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="needs dmlkit[serve]")
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from dmlkit.errors import UserError
from dmlkit.evaluation.calibration import calibrate_run
from dmlkit.gallery import index as building
from dmlkit.gallery.change import GallerySettings, add_images, create_gallery, remove_images, restore_version
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import LabelledImage
from dmlkit.gallery.migrate import migrate_gallery
from dmlkit.identify.identify import identify
from dmlkit.identify.search import search
from dmlkit.serve import service as serving
from dmlkit.serve.access import Access
from dmlkit.serve.app import make_app
from dmlkit.serve.client import Client
from dmlkit.serve.requests import Guard
from dmlkit.serve.server import _config
from dmlkit.serve.service import Service
from dmlkit.transforms.presets import ImageNetConfig
from dmlkit.vectors.embedder import load
from tests.conftest import END, refuses
from tests.datasets import trees
from tests.processes import start, wait_until
from tests.vectors.stored import ON_CPU

BIRDS = ("crow", "dove", "finch", "gull")
LOCAL = "http://127.0.0.1"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A calibrated run, and photos for a gallery and for questions."""
    folder = tmp_path_factory.mktemp("serve")
    trained_once(folder)
    trees.birds(folder / "photos", BIRDS, 4)
    trees.photos(folder / "asked", (f"{index}.jpg" for index in range(5)), first=200, side=(40, 30))
    return folder


@pytest.fixture(scope="module")
def kept(place: Path) -> Path:
    """A gallery that no test changes."""
    create_gallery(place / "run", place / "photos", place / "gallery", model=ON_CPU)
    return place / "gallery"


@pytest.fixture
def gallery(kept: Path, tmp_path: Path) -> Path:
    return shutil.copytree(kept, tmp_path / "gallery")


@contextmanager
def client_of(source: Path, **access: Any) -> Iterator[TestClient]:
    service = Service(source, ON_CPU)
    app = make_app(service, Access(**access))
    with closing(service), TestClient(app, LOCAL, raise_server_exceptions=False) as found:
        yield found


@pytest.fixture(scope="module")
def reader(kept: Path, place: Path) -> Iterator[TestClient]:
    """A client of a server that its tests leave as it is."""
    with client_of(kept, allow_writes=True, root=place / "asked") as found:
        yield found


@pytest.fixture
def client(gallery: Path, place: Path) -> Iterator[TestClient]:
    with client_of(gallery, allow_writes=True, root=place / "asked") as found:
        yield found


@contextmanager
def occupied(service: Service) -> Iterator[None]:
    """Let the thread of the model wait within the block."""
    started, release = threading.Event(), threading.Event()
    waiting = service.submit([], lambda _: started.set() or release.wait(END))
    assert started.wait(END)
    try:
        yield
    finally:
        release.set()
    assert waiting.result(END)


def noise(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (20, 20, 3), dtype=np.uint8) for _ in range(count)]


def served_by(client: TestClient) -> Service:
    return cast(FastAPI, client.app).state.served.service


def sent(*paths: Path) -> Any:
    return [("images", (path.name, path.read_bytes())) for path in paths]


def asked(place: Path) -> list[Path]:
    return sorted((place / "asked").iterdir())


def test_a_pretrained_model_embeds_and_compares_without_images(place: Path, tmp_path: Path):
    timm = pytest.importorskip("timm", reason="the extra dmlkit[timm] is not installed")
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=0), str(tmp_path / "vit"))
    paths = asked(place)[:2]
    with client_of(tmp_path / "vit") as client:
        points = load(f"timm:local-dir:{tmp_path / 'vit'}", device="cpu").embed(paths)
        answer = client.post("/v1/embed", files=sent(*paths)).json()
        np.testing.assert_allclose(answer["embeddings"], points, atol=1e-6)
        compared = client.post("/v1/verify", files=sent(*paths)).json()
        assert compared["similarity"] == pytest.approx(float(points[0] @ points[1]), abs=1e-5)
        assert compared["threshold"] is None and client.get("/v1/info").json()["images"] == 0
        for question in ("search", "identify"):
            refused = client.post(f"/v1/{question}", files=sent(*paths))
            assert refused.status_code == 409 and "has no images; serve a gallery of this model" in refused.text


def test_answers_are_those_of_the_commands(reader: TestClient, kept: Path, place: Path):
    paths = asked(place)
    points = load(place / "run", device="cpu").embed(paths)
    reply = reader.post("/v1/embed", files=sent(*paths)).json()
    np.testing.assert_allclose(reply["embeddings"], points, atol=1e-6)
    assert reply["names"] == [path.name for path in paths]

    nearest = dict(search(kept, place / "asked", k=5, model=ON_CPU).neighbors())
    for query in reader.post("/v1/search?k=5", files=sent(*paths)).json()["queries"]:
        expected = [one.plain() for one in nearest[str(place / "asked" / query["name"])]]
        assert [one["id"] for one in query["nearest"]] == [one["id"] for one in expected]
        np.testing.assert_allclose(
            [one["similarity"] for one in query["nearest"]], [one["similarity"] for one in expected], atol=1e-6
        )

    labels = {Path(path).name: answer for path, answer in identify(kept, place / "asked", model=ON_CPU).labeled()}
    for answer in reader.post("/v1/identify", files=sent(*paths)).json()["answers"]:
        expected = labels[answer["name"]]
        assert (answer["label"], answer["guess"]) == (expected.label, expected.guess)
        assert answer["probability"] == pytest.approx(expected.probability, abs=1e-4)
        assert answer["score"] == pytest.approx(expected.score, abs=1e-6)


def test_two_images_are_compared_with_the_threshold_of_the_run(reader: TestClient, place: Path):
    first, second = asked(place)[:2]
    model = load(place / "run", device="cpu")
    similarity = float(model.similarity(*(model.embed([path]) for path in (first, second)))[0, 0])
    answer = reader.post("/v1/verify", files=sent(first, second)).json()
    assert answer == {"similarity": pytest.approx(similarity, abs=1e-6), "threshold": None, "same": None}
    calibrated = calibrate_run(place / "run", far=0.5)
    try:
        answer = reader.post("/v1/verify", files=sent(first, second)).json()
        assert answer["threshold"] == calibrated.threshold and answer["same"] == (similarity >= calibrated.threshold)
        assert reader.post("/v1/verify", files=sent(first, first)).json()["same"] is True
    finally:
        (place / "run" / "threshold.json").unlink()


def test_the_same_images_as_files_as_base64_and_as_paths(reader: TestClient, place: Path):
    paths = asked(place)[:2]
    as_files = reader.post("/v1/embed", files=sent(*paths)).json()["embeddings"]
    contents = [path.read_bytes() for path in paths]
    for write in (
        lambda content: base64.b64encode(content).decode(),
        lambda content: base64.encodebytes(content).decode(),  # lines of 76, as the command base64 writes them
        lambda content: base64.urlsafe_b64encode(content).decode().rstrip("="),
        lambda content: f"data:image/jpeg;base64,{base64.b64encode(content).decode()}",
    ):
        answer = reader.post("/v1/embed", json={"images": [write(content) for content in contents]}).json()
        assert answer["embeddings"] == as_files
    assert reader.post("/v1/embed", json={"paths": [path.name for path in paths]}).json()["embeddings"] == as_files


def test_one_thread_opens_the_model_and_computes(kept: Path, monkeypatch: pytest.MonkeyPatch):
    threads, load_model = list[str](), serving.load_same_model

    def record(*words: Any) -> Any:
        threads.append(threading.current_thread().name)
        return load_model(*words)

    monkeypatch.setattr(serving, "load_same_model", record)
    service = Service(kept, ON_CPU)
    threads += service.submit([np.zeros((8, 8, 3), np.uint8)], lambda _: [threading.current_thread().name]).result(END)
    service.close()
    assert threads == ["model", "model"]


def test_a_search_takes_the_index_of_a_gallery_and_reads_points_from_memory(gallery, place, monkeypatch):
    monkeypatch.setattr(building, "FEWEST", 16)
    monkeypatch.setattr(building, "MARGIN", 1)
    built = building.index_gallery(gallery, "int8", 0.5)
    points = torch.from_numpy(load(place / "run", device="cpu").embed(asked(place)))
    expected = [
        [neighbor.item.id for neighbor in near]
        for _, near in search(gallery, place / "asked", k=3, model=ON_CPU).neighbors()
    ]
    service = Service(gallery, ON_CPU)
    monkeypatch.setattr(GalleryFolder, "points_at", None)
    found = service.submit([], lambda _: service.search(points, 3)).result(END)
    service.close()
    assert isinstance(service.snapshot.points.searcher, building.ApproximateGallery)
    assert [
        [neighbor["id"] for neighbor in near] for near in found
    ] == expected and service.snapshot.recall == built.index.recall


def test_images_that_wait_are_embedded_together_and_each_request_gets_its_own(kept, place, monkeypatch):
    service, images, sizes = Service(kept, ON_CPU), noise(6), list[int]()
    embed = service.embedder.embed
    with occupied(service):
        monkeypatch.setattr(service.embedder, "embed", lambda images: sizes.append(len(images)) or embed(images))
        requests = [service.submit([image], torch.Tensor.tolist) for image in images]
    found = [request.result(END)[0] for request in requests]
    service.close()
    assert sum(sizes) == 6 and min(sizes) > 1
    np.testing.assert_allclose(found, embed(images), atol=1e-6)


@pytest.mark.parametrize(("count", "expected"), [(3, {("model", 2, 3)}), (5, {("part", 1, 2), ("part", 1, 3)})])
def test_a_batch_with_images_for_all_cores_is_divided_among_them(count, expected, kept, monkeypatch):
    """Each part is computed by one thread, and the points keep the order of their images."""
    parts, before = set[Any](), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        service = Service(kept, ON_CPU)
        embed = service.embedder.embed

        def record(images: Any) -> Any:
            parts.add((threading.current_thread().name.partition("_")[0], torch.get_num_threads(), len(images)))
            return embed(images)

        monkeypatch.setattr(service.embedder, "embed", record)
        images = noise(count)
        found = service.submit(images, torch.Tensor.tolist).result(END)
        service.close()
    finally:
        torch.set_num_threads(before)
    assert parts == expected
    np.testing.assert_allclose(found, [embed([image])[0] for image in images], atol=1e-6)


def png(width: int, height: int) -> Any:
    file = BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return ("images", ("a.png", file.getvalue()))


def test_the_pixels_of_a_request_and_of_all_requests_are_bounded(reader: TestClient, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "MOST_PIXELS", 1200)
    monkeypatch.setattr(serving, "MOST_PIXELS_WAITING", 1500)
    monkeypatch.setattr(serving, "MOST_WAITING", 3)
    service = served_by(reader)
    with monkeypatch.context() as patch:  # from the headers alone
        patch.setattr(serving, "decode_image", None)
        refused = reader.post("/v1/embed", files=[png(30, 20), png(20, 31)])
        assert refused.status_code == 413
    assert refused.json()["error"].endswith("send fewer or smaller images")
    assert reader.post("/v1/embed", files=[png(30, 20), png(20, 30)]).status_code == 200
    with ThreadPoolExecutor() as pool, occupied(service):
        waiting = pool.submit(reader.post, "/v1/embed", files=[png(30, 20), png(20, 30)])
        wait_until(lambda: service._waiting > 0)
        for files in ([png(20, 20)], [png(1, 1)] * 2):
            busy = reader.post("/v1/embed", files=files)
            assert (busy.status_code, busy.headers["retry-after"]) == (503, "1"), busy.text
    assert waiting.result().status_code == 200
    assert reader.post("/v1/embed", files=[png(30, 20)] * 2).status_code == 200


def test_an_image_that_the_model_cannot_take_is_refused_before_it_waits_with_others(reader, place, monkeypatch):
    """Resized to a shorter side of 256 pixels it would have 4 GB; embedding it would fail the others of its batch."""
    service = served_by(reader)
    trained = service.embedder.trained
    recipe = trained.recipe.model_copy(update={"transform": ImageNetConfig()})
    monkeypatch.setattr(service.embedder, "trained", replace(trained, recipe=recipe))
    response = reader.post("/v1/embed", files=[*sent(*asked(place)[:1]), png(65_000, 1)])
    assert response.status_code == 422 and "a.png: the image of 65000 x 1 pixels" in response.json()["error"]


def test_a_request_that_is_given_up_leaves_the_others_their_answers(kept: Path):
    service, image = Service(kept, ON_CPU), np.zeros((8, 8, 3), np.uint8)
    with occupied(service):
        given_up, other = service.submit([image], len), service.submit([image], len)
        assert given_up.cancel()
    assert other.result(END) == 1
    assert service.submit([image], len).result(END) == 1
    service.close()


def test_changes_are_those_of_the_commands_and_can_be_undone(client: TestClient, gallery: Path, place: Path):
    (new, *_), started = asked(place), datetime.now(UTC)
    before = client.get("/v1/info").json()
    assert (before["images"], before["labels"], before["writes"]) == (16, 4, True)
    assert before["run"] == str(place / "run")
    refused = client.post("/v1/gallery/add?label=%20", files=sent(new)).json()["error"]
    assert refused.startswith("label: ' ' is no label") and not (gallery / "uploads").exists()
    added = client.post("/v1/gallery/add?label=heron", files=sent(new)).json()
    assert added["added"] == 1 and client.get("/v1/gallery/labels").json()["labels"]["heron"] == 1
    assert client.post("/v1/identify", files=sent(new)).json()["answers"][0]["guess"] == "heron"
    again = client.post("/v1/gallery/add?label=heron", files=sent(new)).json()
    assert again["added"] == 0 and again["messages"] == [f"{new.name}: is in the gallery already"]
    twins = [("images", (name, new.read_bytes())) for name in ("a.jpg", "b.jpg")]
    again = client.post("/v1/gallery/add?label=heron", files=twins).json()
    assert again["messages"] == ["b.jpg: the same picture as a.jpg", "a.jpg: is in the gallery already"]
    (image,) = client.get("/v1/gallery/images?label=heron").json()["images"]
    assert Path(image["path"]).read_bytes() == new.read_bytes()
    assert client.get(f"/v1/images/{image['id']}").content[:2] == b"\xff\xd8"
    assert client.post("/v1/gallery/remove", json={"ids": [image["id"]]}).json()["removed"] == 1
    assert "heron" not in client.get("/v1/gallery/labels").json()["labels"]
    versions = client.get("/v1/gallery/versions").json()["versions"]
    assert [version["images"] for version in versions] == [16, 17, 16]
    assert started <= datetime.fromisoformat(versions[1]["time"]) <= datetime.now(UTC)  # also in another time zone
    assert client.post("/v1/gallery/restore", json={"version": versions[1]["version"]}).json()["images"] == 17
    assert client.get("/v1/info").json()["images"] == 17


def test_the_file_of_an_image_that_another_process_adds_meanwhile_is_kept(client, place, monkeypatch):
    def after_another_one(*words: Any, **options: Any) -> Any:
        add_images(*words, **options)
        return add_images(*words, **options)

    monkeypatch.setattr(serving, "add_images", after_another_one)
    new, *_ = asked(place)
    assert client.post("/v1/gallery/add?label=heron", files=sent(new)).json()["added"] == 0
    (image,) = client.get("/v1/gallery/images?label=heron").json()["images"]
    assert Path(image["path"]).read_bytes() == new.read_bytes()


def test_an_addition_that_fails_leaves_no_files(client, gallery, place, monkeypatch):
    def fail(*_: Any, **__: Any) -> Any:
        raise UserError("the gallery is being changed")

    new, kept = asked(place)[:2]
    assert client.post("/v1/gallery/add?label=heron", files=sent(kept)).json()["added"] == 1
    before = sorted((gallery / "uploads").iterdir())
    monkeypatch.setattr(serving, "add_images", fail)
    assert "is being changed" in client.post("/v1/gallery/add?label=heron", files=sent(new)).json()["error"]
    assert client.post("/v1/gallery/add?label=heron", files=sent(kept)).status_code == 409
    assert sorted((gallery / "uploads").iterdir()) == before and len(before) == 1


def test_changes_of_other_processes_are_seen(client: TestClient, gallery: Path, place: Path):
    assert client.get("/v1/info").json()["images"] == 16
    remove_images(gallery, labels=["crow"])
    assert client.get("/v1/info").json()["images"] == 12
    add_images(gallery, place / "photos" / "crow", label="raven", model=ON_CPU)
    answer = client.post("/v1/identify", files=sent(place / "photos" / "crow" / "0.jpg")).json()["answers"][0]
    assert answer["guess"] == "raven"


@pytest.mark.parametrize("source", ["gallery", "run"])
def test_a_new_threshold_of_the_run_is_seen(source: str, place: Path, kept: Path):
    """By identify as by verify; on both sides of the score of an image."""
    paths = asked(place)[:2]
    try:
        with client_of(place / source) as client:
            score = client.post("/v1/identify", files=sent(*paths)).json()["answers"][0]["score"]
            threshold = calibrate_run(place / "run", far=0.5)
            for value in (score + 0.01, score - 0.01):
                other = threshold.model_copy(update={"threshold": value})
                other.write(place / "run" / "threshold.json")
                answer = client.post("/v1/identify", files=sent(*paths)).json()["answers"][0]
                assert (answer["label"] == "unknown") == (score < value)
                assert client.post("/v1/verify", files=sent(*paths)).json()["threshold"] == value
    finally:
        (place / "run" / "threshold.json").unlink(missing_ok=True)


def test_a_gallery_that_is_removed_is_reported_and_found_again(client: TestClient, gallery: Path, place: Path):
    gallery.rename(gallery.with_name("away"))
    response = client.post("/v1/identify", files=sent(*asked(place)[:1]))
    assert response.status_code == 409 and str(gallery) in response.json()["error"]
    gallery.with_name("away").rename(gallery)
    assert client.post("/v1/identify", files=sent(*asked(place)[:1])).status_code == 200


def test_a_run_is_served_and_is_not_changed(place: Path):
    with client_of(place / "run") as client:
        info = client.get("/v1/info").json()
        assert (info["kind"], info["version"], info["writes"]) == ("run", None, False)
        found = client.post("/v1/identify", files=sent(*asked(place)[:1])).json()["answers"]
        assert found[0]["guess"] in client.get("/v1/gallery/labels").json()["labels"]
        response = client.post("/v1/gallery/remove", json={"labels": ["a"]})
        assert response.status_code == 403 and "--allow-writes" in response.json()["error"]


PHOTO = ("images", ("a.png", b"\x89PNG\r\n\x1a\n damaged"))
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("request_", "status", "message"),
    [
        ({"url": "/v1/embed", "files": [PHOTO]}, 422, "a.png: cannot read this image"),
        ({"url": "/v1/embed", "files": [("photo", PHOTO[1])]}, 422, "expected files in the field images"),
        ({"url": "/v1/embed", "files": [PHOTO] * 65}, 413, "got more than 64 images; send fewer"),
        ({"url": "/v1/embed", "json": {"images": ["?"] * 65}}, 413, "got more than 64 images; send fewer"),
        ({"url": "/v1/embed", "json": {"images": ["?"] * 33, "paths": ["0.jpg"] * 32}}, 413, "got more than 64 images"),
        ({"url": "/v1/embed", "content": b"x"}, 415, "expected multipart/form-data or application/json"),
        ({"url": "/v1/embed", "json": {}}, 422, "got no image"),
        ({"url": "/v1/embed", "json": {"images": ["?"]}}, 422, "expected an image file in base64"),
        ({"url": "/v1/embed", "json": {"image": []}}, 422, "image: Extra inputs are not permitted"),
        ({"url": "/v1/embed", "json": {"paths": ["../recipe.yaml"]}}, 404, "no such file in the folder"),
        ({"url": "/v1/embed", "json": {"paths": ["link.jpg"]}}, 404, "no such file in the folder"),
        ({"url": "/v1/embed", "json": {"paths": ["\x00"]}}, 404, "cannot be read"),
        ({"url": "/v1/embed", "json": {"paths": ["loop.jpg"]}}, 404, "paths: loop.jpg: "),
        ({"url": "/v1/search?k=0", "json": {"paths": ["0.jpg"]}}, 422, "query.k"),
        ({"url": "/v1/search?K=3", "json": {"paths": ["0.jpg"]}}, 422, "query.K: no such parameter; expected k"),
        ({"url": "/v1/search?k=3&k=2", "json": {"paths": ["0.jpg"]}}, 422, "query.k: got 2 values, expected one"),
        ({"url": "/v1/gallery/add?label=a&label=b", "json": {"paths": ["0.jpg"]}}, 422, "query.label: got 2 values"),
        ({"url": "/v1/identify?threshold=0.9", "json": {"paths": ["0.jpg"]}}, 422, "this address takes none"),
        ({"url": "/v1/verify", "json": {"paths": ["0.jpg"]}}, 422, "got 1 image, expected 2 to compare"),
        ({"url": "/v1/gallery/add?label=unknown", "json": {"paths": ["0.jpg"]}}, 409, "unknown"),
        ({"url": "/v1/gallery/add?label=M%FCsli", "json": {"paths": ["0.jpg"]}}, 422, "query: expected UTF-8"),
        ({"url": f"/v1/gallery/add?label={'a' * 4097}", "json": {"paths": ["0.jpg"]}}, 422, "at most 4096 characters"),
        ({"url": "/v1/gallery/remove", "json": {}}, 409, "to select what to remove"),
        ({"url": "/v1/gallery/restore", "json": {"version": 99}}, 409, "has no version 99"),
        ({"url": "/v1/why"}, 422, "got 0 images, expected 2"),
        ({"url": "/v1/why?id=nothing"}, 404, "no picture with this id"),
        ({"url": "/v1/why?row=0"}, 404, "this server has no review"),
        ({"url": "/v1/review/add"}, 404, "this server has no review"),
        ({"url": "/v1/nothing"}, 404, "Not Found"),
        ({"url": "/v1/embed", "files": [("images", (None, "a.png"))]}, 422, "curl -F images=@FILE"),
        ({"url": "/v1/embed", "files": [png(20_000, 20_000)]}, 422, "expected at most 80,000,000"),
        ({"url": "/v1/embed", "files": [png(1, 65_536)]}, 422, "expected at most 65,535 on a side"),
        ({"url": "/v1/gallery/remove", "json": {"ids": ["a"] * 1001}}, 422, "at most 1000 items"),
        ({"url": "/v1/gallery/remove", "content": "{}", "headers": FORM}, 422, "expected application/json"),
        ({"url": "/v1/embed", "headers": {"origin": "http://["}}, 403, "pages of other sites"),
        ({"url": "/v1/embed", "headers": {"host": "["}}, 403, "localhost only"),
        ({"url": "/v1/embed", "headers": {"origin": "http://evil.example"}}, 403, "pages of other sites"),
        ({"url": "/v1/embed", "headers": {"host": "evil.example"}}, 403, "localhost only"),
        ({"url": "/v1/embed", "headers": {"content-length": "9" * 12}, "content": b""}, 413, "more than 64 MB"),
    ],
)
def test_what_cannot_be_answered_has_a_status_and_a_message(reader, place, request_, status, message):
    link, loop = (place / "asked" / name for name in ("link.jpg", "loop.jpg"))
    link.symlink_to(place / "photos" / "crow" / "0.jpg")
    loop.symlink_to(loop)
    try:
        response = reader.post(**request_)
    finally:
        link.unlink()
        loop.unlink()
    assert response.status_code == status and message in response.json()["error"], response.text


def test_a_token_is_needed_but_for_the_page_and_the_health(kept: Path):
    with client_of(kept, token="secret") as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            expected = 200 if headers.get("authorization") == "secret" else 401
            assert client.get("/v1/info", headers=headers).status_code == expected
        assert client.get("/v1/info", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/metrics").status_code == 401
        for path in ("/", "/page/app.js", "/page/style.css", "/docs", "/swagger/swagger-ui.css", "/healthz"):
            response = client.get(path)
            assert response.status_code == 200 and "default-src 'self'" in response.headers["content-security-policy"]
        assert client.get("/page/%2e%2e/service.py").status_code == 404  # a client resolves /page/.. itself
        proxy = {"host": "birds.example", "authorization": "Bearer secret"}  # without a token, localhost only
        assert client.get("/v1/info", headers=proxy).status_code == 200
        assert client.get("/v1/info", headers={**proxy, "origin": "http://evil.example"}).status_code == 403
        document = client.get("/openapi.json").json()  # /docs asks for the token
        assert document["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
        operations = [one for path, ways in document["paths"].items() if "/v1/" in path for one in ways.values()]
        assert operations and all(one["security"] for one in operations)


def test_bodies_without_a_length_are_counted_one_by_one_and_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("dmlkit.serve.requests.MOST_BYTES_AT_ONCE", 150)
    scope = {"type": "http", "path": "/v1/embed", "headers": [(b"host", b"127.0.0.1")]}

    async def application(_: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def answer_of(guard: Guard, *sizes: int) -> int:
        left, answers = [*sizes], list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0)
            return {"type": "http.request", "body": b"x" * left.pop(0), "more_body": bool(left)}

        async def send(message: Any) -> None:
            answers.append(message)

        await guard(scope, receive, send)
        return answers[0]["status"]

    async def answers() -> list[int]:
        guard = Guard(application, access=Access(), most_bytes=100)
        alone = [await answer_of(guard, *sizes) for sizes in ((60, 41), (60, 40))]
        together = await asyncio.gather(*(answer_of(guard, 30, 30) for _ in range(3)))
        return [*alone, *together, await answer_of(guard, 60, 40)]

    assert asyncio.run(answers()) == [413, 200, 200, 200, 503, 200]


def test_a_client_that_sends_more_than_is_taken_or_nothing_reads_the_refusal(monkeypatch: pytest.MonkeyPatch):
    """Whoever closes a socket with unread bytes resets it, so that the other end never reads what was sent before."""
    monkeypatch.setattr("dmlkit.serve.requests.SILENCE", 0.1)
    app = Guard(FastAPI(), access=Access(), most_bytes=100)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(_config(app))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/embed"
        try:
            for headers, status in (({}, 413), ({"Origin": "http://evil.example"}, 403)):
                with pytest.raises(HTTPError) as refused:
                    urlopen(Request(url, bytes(20_000_000), headers), timeout=END)
                assert refused.value.code == status and b"error" in refused.value.read()
            with socket.create_connection(listening.getsockname(), timeout=END) as silent:
                silent.sendall(
                    b"POST / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\nContent-Length: 3\r\n\r\n"
                )
                assert silent.recv(100).startswith(b"HTTP/1.1 403 ")
        finally:
            server.should_exit = True
            thread.join(END)


def test_an_upload_that_breaks_off_is_no_error(client: TestClient, capfd: pytest.CaptureFixture[str]):
    """Uvicorn prints the traceback of whatever an application raises."""
    for kind in (b"application/json", b"multipart/form-data; boundary=x"):
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": b"--x", "more_body": True}]

        async def receive(messages: Any = messages) -> dict[str, Any]:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            pass

        headers = [(b"host", b"127.0.0.1"), (b"content-type", kind)]
        scope = {"type": "http", "method": "POST", "path": "/v1/embed", "query_string": b"", "headers": headers}
        asyncio.run(cast(FastAPI, client.app)(scope, receive, send))
    assert capfd.readouterr().err == ""


def test_the_client_reports_a_server_that_does_not_answer_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        refuses(r"no answer within 0\.05 s", Client(url, timeout=0.05).info)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\n\r\n<html>", "status 404; is this a server of dmlkit serve"),
        (b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 5\r\n\r\n{oops", "status 502; is this a server of dmlkit serve"),
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 3\r\n\r\n[1]", "status 400; is this a server of dmlkit serve"),
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 9\r\n\r\n{", "status 400; is this a server of dmlkit serve"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", "is not JSON"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "connection ended before the answer"),
        (b"", "connection ended before the answer"),
    ],
)
def test_the_client_reports_answers_that_are_none(answer: bytes, message: str):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def reply() -> None:
            with listening.accept()[0] as connection:
                connection.recv(10_000)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        refuses(message, Client(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=END).info)
        thread.join(END)


def test_the_client_reports_what_it_cannot_send(tmp_path: Path):
    client = Client("http://127.0.0.1:1")
    refuses("got one str, expected a list of images", client.identify, "query.png")
    refuses(r"none\.png: cannot read this image: No such file", client.identify, [tmp_path / "none.png"])
    for address in ("localhost:8765", "http://a b", "http://a:port", "http://a..b", "http://[::1", "http://"):
        refuses("expected an address that starts with http://", Client, address)
    for address in ("http://127.0.0.1:8765/", "https://birds.example.org/api", "http://[::1]:80"):
        assert Client(address).url == address.rstrip("/")
    assert Client(token="").token is None  # e.g. of an empty variable
    for token in ("secret\n", "ключ"):
        refuses("token: expected printable ASCII", Client, "http://127.0.0.1:1", token=token)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def refuse() -> None:
            with listening.accept()[0] as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(UserError, match="takes at most 64 MB"):
            Client(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=END).identify([bytes(60_000_000)])
        thread.join(END)


@pytest.mark.slow
def test_the_command_serves_its_client_and_ends_when_it_is_told(gallery: Path, place: Path):
    environment = {"DMLKIT_TOKEN": "secret", "COLUMNS": "300"}
    words = ("serve", gallery, "--port", "0", "--allow-writes", "--device", "cpu")
    process = start(*words, environment=environment)
    try:
        wait_until(lambda: "\n" in process.printed(), process)
        line = process.printed()
        assert "16 images" in line
        url = next(word for word in line.split() if word.startswith("http://"))
        refuses("expected the header Authorization", Client(url).info)
        client, (first, second, *_) = Client(url, token="secret"), asked(place)
        assert client.info()["images"] == 16
        assert client.add([first], "heron")["added"] == 1
        (answer,) = client.identify([first.read_bytes()])
        assert answer["guess"] == "heron" and answer["nearest"][0]["id"] == client.search([first], k=1)[0][0]["id"]
        assert client.verify(first, first)["similarity"] == pytest.approx(1, abs=1e-5)
        assert np.shape(client.embed([first, second]))[0] == 2
        refuses("labels: got 'heron', expected a list", client.remove, labels="heron")
        assert client.remove(labels=["heron"]) == 1
        for _ in range(2):  # the second, which does not wait for requests, came with a traceback
            process.send_signal(signal.SIGINT)
        assert process.communicate()[0] == line and process.returncode == 0
    finally:
        process.kill()


def test_what_cannot_be_served_is_refused(dmlkit, kept, place, tmp_path, monkeypatch):
    np.save(tmp_path / "points.npy", np.eye(4, dtype=np.float32))
    for words, token, message in (
        ([kept, "--host", "0.0.0.0"], "", "set a token in DMLKIT_TOKEN"),
        ([place / "run", "--allow-writes"], "x", "is not a gallery"),
        ([kept, "--host", "nowhere.invalid"], "x", "cannot listen there"),
        ([tmp_path / "points.npy", "--port", "0"], "x", "the model of an array is not known"),
        ([kept], " x", "DMLKIT_TOKEN: expected printable ASCII"),
        ([kept, "--workers", "0"], "x", "'--workers'"),
        ([kept, "--workers", "2", "--review", place], "x", "one process divides the questions of a review"),
    ):
        monkeypatch.setenv("DMLKIT_TOKEN", token)
        result = dmlkit("serve", *map(str, words))
        assert result.code == 2 and message in result.err, result.err


def test_pictures_and_explanations_of_boxes_are_of_these_alone(place: Path, tmp_path: Path):
    """An image of two photos side by side: its boxes look like the photos, and are compared like them."""
    photos = [Image.open(place / "photos" / name / "0.jpg") for name in ("finch", "gull")]
    both = Image.new("RGB", (80, 30))
    for left, photo in zip((0, 40), photos, strict=True):
        both.paste(photo, (left, 0))
    for name, image in zip(("both", "finch", "gull"), (both, *photos), strict=True):
        image.save(tmp_path / f"{name}.png")
    table = tmp_path / "boxes.csv"
    table.write_text("path,label,x1,y1,x2,y2\nboth.png,finch,0,0,40,30\nboth.png,gull,40,0,80,30\n")
    create_gallery(place / "run", table, tmp_path / "gallery", model=ON_CPU)
    with client_of(tmp_path / "gallery") as client:
        ids = [client.get(f"/v1/gallery/images?label={name}").json()["images"][0]["id"] for name in ("finch", "gull")]
        for one, photo in zip(ids, photos, strict=True):
            shown = Image.open(BytesIO(client.get(f"/v1/images/{one}").content))
            assert shown.width / shown.height == pytest.approx(photo.width / photo.height, abs=0.05)
        answer = client.post(f"/v1/why?id={ids[0]}&id={ids[1]}").json()
        expected = client.post("/v1/why", files=sent(tmp_path / "finch.png", tmp_path / "gull.png")).json()
        assert answer["score"] == pytest.approx(expected["score"], abs=1e-6) and answer["images"] == expected["images"]


def test_samples_of_a_run_without_files_are_explained(place: Path, tmp_path: Path):
    with client_of(place / "run") as client:
        images = served_by(client).snapshot.loaded.images
        assert images is not None
        for row in (0, 1):
            sample = images.dataset.sample(int(images.rows[row])).permute(1, 2, 0).numpy()
            Image.fromarray(sample).save(tmp_path / f"{row}.png")
        expected = client.post("/v1/why", files=sent(tmp_path / "0.png", tmp_path / "1.png")).json()
        answer = client.post("/v1/why?id=0&id=1").json()
        assert answer["score"] == pytest.approx(expected["score"], abs=1e-6) and answer["images"] == expected["images"]


def test_a_version_of_another_model_is_not_restored_below_a_server(client: TestClient, gallery: Path, place: Path):
    run = shutil.copytree(place / "run", gallery.parent / "other")
    migrate_gallery(gallery, run, model=replace(ON_CPU, checkpoint="pretrained"))
    migrated = (gallery / "gallery.json").read_bytes()
    for address, body in (("remove", {"labels": ["crow"]}), ("restore", {"version": 1})):
        error = client.post(f"/v1/gallery/{address}", json=body).json()["error"]
        assert "another model now; start the server again" in error, error
        assert (gallery / "gallery.json").read_bytes() == migrated
    restore_version(gallery, 1)
    assert client.get("/v1/info").json()["version"] == 3
    error = client.post("/v1/gallery/restore", json={"version": 2}).json()["error"]
    assert f"version 2 has embeddings of another model, {run}; stop the server" in error
    assert client.get("/v1/info").json()["version"] == 3
    assert client.post("/v1/gallery/restore", json={"version": 1}).json() == {"images": 16, "version": 4}


def test_images_without_a_label_are_not_answers_and_pictures_stay_when_photos_move(place: Path, tmp_path: Path):
    gallery, photos = tmp_path / "gallery", shutil.copytree(place / "photos", tmp_path / "photos")
    labeled = sorted(photos.glob("*/*.jpg"))
    shutil.copy(asked(place)[0], photos / "new.jpg")  # the nearest of the first query
    create_gallery(place / "run", photos, gallery, settings=GallerySettings(thumbnails=True), model=ON_CPU)
    model = load(place / "run", device="cpu")
    expected = [labeled[row] for row in model.similarity(*map(model.embed, (asked(place), labeled))).argmax(1)]
    photos.rename(tmp_path / "moved")
    with client_of(gallery) as client:
        answers = client.post("/v1/identify", files=sent(*asked(place))).json()["answers"]
        assert [answer["guess"] for answer in answers] == [path.parent.name for path in expected]
        assert [answer["nearest"][0]["path"] for answer in answers] == [str(path) for path in expected]
        for picture in (gallery / "thumbnails").iterdir():
            assert client.get(f"/v1/images/{picture.stem}").content == picture.read_bytes()


def test_images_of_another_process_are_shown_and_explained(client: TestClient, gallery: Path, place: Path):
    shown, explained = asked(place)[:2]
    add_images(gallery, shown, label="heron", model=ON_CPU)
    assert client.get(f"/v1/images/{LabelledImage(str(shown), None).id()}").content[:2] == b"\xff\xd8"
    add_images(gallery, explained, label="heron", model=ON_CPU)
    name = LabelledImage(str(explained), None).id()
    assert client.post(f"/v1/why?id={name}", files=sent(shown)).status_code == 200
    assert client.get("/v1/images/nothing").status_code == 404
