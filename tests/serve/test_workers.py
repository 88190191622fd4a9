"""``dmlkit serve --workers``: processes of uvicorn that share a port, a gallery and their counts."""

import base64
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from urllib.request import urlopen

import pytest

pytest.importorskip("fastapi", reason="needs dmlkit[serve]")
from dmlkit.gallery.change import create_gallery
from dmlkit.serve.client import Client
from tests.conftest import END
from tests.processes import wait_until
from tests.vectors.stored import ON_CPU

pytestmark = pytest.mark.heavy


def workers_of(process: "Popen[str]") -> set[int]:
    """Return the processes that a server has started to answer requests."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    words = {int(child): Path(f"/proc/{child}/cmdline") for child in children}
    return {child for child, path in words.items() if path.exists() and b"spawn_main" in path.read_bytes()}


def counted(url: str, name: str) -> float:
    text = urlopen(f"{url}/metrics", timeout=END).read().decode()
    (value,) = re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_workers_share_a_gallery_and_their_counts_are_replaced_and_finish_what_runs(place: Path, tmp_path: Path):
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
            wait_until(lambda: len(workers_of(process)) == 2, process)
            client, first = Client(url, timeout=END), workers_of(process)
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
            assert process.wait(END) == 0 and (tmp_path / "messages").read_text() == ""
        finally:
            process.kill()


def test_a_process_that_cannot_start_again_ends_all(place: Path, tmp_path: Path):
    create_gallery(place / "run", place / "photos", tmp_path / "gallery", model=ON_CPU)
    words = ["serve", str(tmp_path / "gallery"), "--port", "0", "--device", "cpu", "--workers", "2"]
    with Popen([sys.executable, "-m", "dmlkit", *words], stdout=PIPE, stderr=PIPE, text=True) as process:
        try:
            wait_until(lambda: len(workers_of(process)) == 2, process)
            (tmp_path / "gallery").rename(tmp_path / "away")
            for worker in workers_of(process):
                os.kill(worker, signal.SIGKILL)
            _, messages = process.communicate(timeout=END)
            assert process.returncode == 2 and "no such file or folder" in messages and "Traceback" not in messages
        finally:
            process.kill()
