"""``dmlkit serve --workers``: processes that share a port, a gallery and their counts, and are replaced and stopped."""

import base64
import json
import os
import re
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE, Popen
from urllib.request import urlopen

import pytest

pytest.importorskip("fastapi", reason="needs dmlkit[serve]")
from dmlkit.embedding.gallery.change import create_gallery
from dmlkit.embedding.serve.client import Client
from dmlkit.embedding.serve.workers import Work, run_workers
from dmlkit.errors import UserError
from tests.conftest import END
from tests.embedding.gallery.conftest import place  # noqa: F401  # pyright: ignore[reportUnusedImport] - a fixture
from tests.embedding.stored import ON_CPU
from tests.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


def workers_of(process: "Popen[str]") -> set[int]:
    """Return the processes that a server has started to answer requests."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    words = {int(child): Path(f"/proc/{child}/cmdline") for child in children}
    return {child for child, path in words.items() if path.exists() and b"spawn_main" in path.read_bytes()}


def counted(url: str, name: str) -> float:
    text = urlopen(f"{url}/metrics", timeout=END).read().decode()
    (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_workers_share_a_gallery_and_their_counts_are_replaced_and_finish_what_runs(place: Path, tmp_path: Path):  # noqa: F811
    create_gallery(place / "run", place / "photos", tmp_path / "gallery", model=ON_CPU)
    words = ["serve", str(tmp_path / "gallery"), "--port", "0", "--allow-writes", "--device", "cpu", "--workers", "2"]
    environment = {**os.environ, "COLUMNS": "300"}
    photo, *_ = sorted((place / "photos" / "crow").iterdir())
    with (
        (tmp_path / "messages").open("w+") as messages,
        Popen(
            [sys.executable, "-m", "dmlkit", *words], stdout=PIPE, stderr=messages, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "12 images" in line and "by 2 processes" in line
            url = next(word for word in line.split() if word.startswith("http://"))
            client, first = Client(url, timeout=END), workers_of(process)
            assert len(first) == 2
            for _ in range(8):
                client.embed([photo])
            content = photo.read_bytes() + b"another file"
            assert client.add([content], "heron")["added"] == 1
            assert {client.info()["images"] for _ in range(8)} == {13}
            assert counted(url, "dmlkit_request_seconds_count") == 17
            assert counted(url, "dmlkit_images_total") == 8 and counted(url, "dmlkit_gallery_images") == 13

            for ended in first:
                os.kill(ended, signal.SIGKILL)
            assert client.info()["images"] == 13  # waits for a new one
            wait_until(lambda: len(workers_of(process) - first) == 2, process)
            assert counted(url, "dmlkit_request_seconds_count") == 18
            said = (tmp_path / "messages").read_text()
            assert all(f"worker {ended} was ended by SIGKILL; another one" in said for ended in first)

            body = json.dumps({"images": [base64.b64encode(photo.read_bytes()).decode()]}).encode()
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), END) as connection:
                lines = ("POST /v1/embed HTTP/1.1", f"host: {host}", "content-type: application/json")
                lines = (*lines, f"content-length: {len(body)}", "expect: 100-continue", "", "")
                connection.sendall("\r\n".join(lines).encode())
                assert connection.recv(999).startswith(b"HTTP/1.1 100")
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: len(workers_of(process)) == 1)
                connection.sendall(body)
                assert connection.recv(99).startswith(b"HTTP/1.1 200")
            assert process.wait(END) == 0
        finally:
            process.kill()


def refuse(connection: Connection) -> None:
    connection.send("nothing to serve")


def end_at_once(_: Connection) -> None:
    sys.exit(3)


@pytest.mark.parametrize(("work", "message"), [(refuse, "nothing to serve"), (end_at_once, "ended with exit code 3")])
def test_a_worker_that_cannot_start_ends_all(work: Work, message: str):
    with pytest.raises(UserError, match=message):
        run_workers(work, 2, lambda _: pytest.fail("it serves"))
