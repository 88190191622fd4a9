"""Addresses of the Hub, ``hf://OWNER/NAME``: huggingface_hub itself downloads, from a stand-in on this machine."""

import hashlib
import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import yaml

import dmlkit as package
from dmlkit.backbones.timm_models import find
from dmlkit.distributed.launch import start_ranks
from dmlkit.errors import OptionError, UserError
from dmlkit.vectors.hub import download, load_hub
from tests.conftest import ONE_EPOCH, Cli, refuses

pytest.importorskip("huggingface_hub", reason="it comes with the extra dmlkit[timm]")

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the Hub that a snapshot needs, for the folders ``ROOT/OWNER/NAME/REVISION``."""

    root = Path()
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.answer(has_body=False)

    def do_GET(self) -> None:
        self.answer(has_body=True)

    def answer(self, has_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, kind, revision, *rest = parts[2:] if is_api else parts
        folder = self.root / owner / name
        revision = next((key for key, sha in COMMITS.items() if sha == revision), revision)
        if not folder.exists():
            return self.send({"error": "Repository not found"}, has_body, 404, {"X-Error-Code": "RepoNotFound"})
        if not (folder / revision).exists():
            return self.send({"error": "Invalid rev id"}, has_body, 404, {"X-Error-Code": "RevisionNotFound"})
        sha = COMMITS[revision]
        files = {one.name: one.read_bytes() for one in (folder / revision).iterdir()}
        if is_api and kind == "revision":
            return self.send({"id": f"{owner}/{name}", "sha": sha, "siblings": []}, has_body)
        if is_api:
            rows = [
                {"type": "file", "path": one, "size": len(text), "oid": hashlib.sha1(text).hexdigest()}
                for one, text in files.items()
            ]
            return self.send(rows, has_body)
        text = files[rest[0]]
        return self.send(text, has_body, 200, {"ETag": f'"{hashlib.sha1(text).hexdigest()}"', "X-Repo-Commit": sha})

    def send(self, content: object, has_body: bool, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def folder(trained_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and its export in ``hub``."""
    from dmlkit.export.export import export

    home = tmp_path_factory.mktemp("address")
    return export(trained_once(home, ONE_EPOCH), "hub", output=home / "hub").written[0]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The root of the repositories of a server on this machine, which huggingface_hub takes for the Hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.root, Hub.asked = tmp_path / "hub", []
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    Thread(target=server.serve_forever, daemon=True).start()
    yield Hub.root
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_an_address_gives_the_embeddings_of_the_run(folder: Path, hub: Path):
    shutil.copytree(folder, hub / "birds" / "letters" / "main")
    (hub / "birds" / "letters" / "main" / "pytorch_model.bin").write_bytes(b"a pickle, which nobody asks for")
    images = list(np.random.default_rng(0).integers(0, 256, (3, 20, 24, 3), dtype=np.uint8))
    own = package.load(folder.parent / "run", device="cpu")
    model = package.load("hf://birds/letters", device="cpu")
    np.testing.assert_array_equal(model.embed(images), own.embed(images))
    assert model.trained.fingerprint == own.trained.fingerprint
    assert {path.rsplit("/", 1)[1] for path in Hub.asked if "/resolve/" in path} == {
        "config.json",
        "model.safetensors",
        "recipe.yaml",
    }
    # another revision is another model
    shutil.copytree(folder, hub / "birds" / "letters" / "v1")
    config = hub / "birds" / "letters" / "v1" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "format": 99}))
    refuses("config of a model for the Hub of format 99", package.load, "hf://birds/letters@v1", device="cpu")
    assert download("hf://birds/letters").name == COMMITS["main"]


def test_without_a_network_what_was_downloaded_is_read_at_once(
    folder: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
):
    """huggingface_hub would try six times, for 23 s, before it looks into its cache."""
    repository = hub / "birds" / "letters" / "main"
    shutil.copytree(folder, repository)
    file = find("hf-hub:birds/letters", "config.json")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", pytest.fail)
    assert find("hf-hub:birds/letters", "config.json") == file
    with pytest.raises(
        OptionError, match=r"config.json of birds/others \(hub.invalid has no address here: no network\?\)"
    ):
        find("hf-hub:birds/others", "config.json")
    assert "cannot download it (hub.invalid has no address here: no network?)" in refused("hf://birds/others")


def refused(address: str) -> str:
    with pytest.raises(UserError) as error:
        package.load(address, device="cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_model_is_refused(hub: Path, monkeypatch: pytest.MonkeyPatch):
    (hub / "someone" / "timm" / "main").mkdir(parents=True)
    (hub / "someone" / "timm" / "main" / "config.json").write_text("{}")
    assert "hf://nobody/nothing: no such repository, or it is private" in refused("hf://nobody/nothing")
    assert "has no branch, tag or commit v9" in refused("hf://someone/timm@v9")
    message = refused("hf://someone/timm")
    assert "has no model.safetensors and no recipe.yaml" in message and "timm:hf-hub:someone/timm" in message
    for address in ("hf://", "hf://a", "hf://a/b/c", "hf://../b", "hf://a/b@../c", "hf://a/b@", "hf://a/b@v/../../x"):
        assert f"{address}: expected hf://OWNER/NAME" in refused(address)
    with pytest.raises(UserError, match="this is an exported model; checkpoint='best' applies only to runs"):
        package.load("hf://someone/timm", checkpoint="best", device="cpu")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub is not installed; install it with: pip install 'dmlkit[timm]'" in refused("hf://a/b")


def test_without_a_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Cli):
    with socket.create_server(("127.0.0.1", 0)) as unused:
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    message = refused("hf://a/b")
    assert "hf://a/b: cannot download it (" in message and "load their folder" in message
    for command in (
        ["embed", "hf://a/b", tmp_path],
        ["eval", "hf://a/b"],
        ["search", "hf://a/b", tmp_path],
        ["serve", "hf://a/b"],
    ):
        dmlkit(*command).refused("hf://a/b: only Python reads models of the Hub")


def test_a_recipe_of_a_folder_reads_nothing_else(folder: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "m")
    (tmp_path / "base.yaml").write_text("seed: 7")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    local = {"name": "timm", "model": f"local-dir:{tmp_path}", "architecture": "resnet18"}
    for change, message in (
        ({"extends": "../base.yaml"}, "extends is not allowed in the recipe of an exported model"),
        ({"regularizers": [{"name": "distill", "teacher": "../run"}]}, "regularizers are not allowed"),
        ({"backbone": {**local, "architecture": None}}, "backbone.architecture is missing"),
        ({"backbone": local, "transform": {"name": "pretrained"}}, "transform has not all keys"),
    ):
        (tmp_path / "m" / "recipe.yaml").write_text(yaml.safe_dump({**recipe, **change}))
        refuses(message, load_hub, tmp_path / "m", start_ranks("cpu"))
