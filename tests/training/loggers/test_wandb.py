"""Weights & Biases, offline: its own reader finds what metrics.jsonl holds."""

import importlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmlkit.run_folder.folder import RunFolder
from dmlkit.training import progress as loggers
from tests.conftest import TINY_RECIPE
from tests.processes import wait_until

wandb = pytest.importorskip("wandb", reason="the extra dmlkit[wandb] is not installed")


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format, in blocks of 32 768 bytes, after 7 bytes of its own."""
    place, record = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The history in the files of a run that was kept on this machine."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, Any]] = []
    for data in records_of(file.read_bytes()):
        record = messages.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    return rows


def test_an_offline_run_holds_the_rows(tmp_path: Path, dmlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.chdir(tmp_path)
    Path("logged.yaml").write_text(TINY_RECIPE.replace("epochs: 3", "epochs: 2, workers: 0, loggers: [wandb]"))
    result = dmlkit("train", "logged.yaml", "-o", "run")
    assert result.code == 0 and result.err == ""
    wait_until(lambda: any("test/map@r" in one for one in rows_of(tmp_path)))  # another process writes the file
    rows, found = RunFolder(Path("run")).read_metrics(), rows_of(tmp_path)
    for row in rows:
        (told,) = [one for one in found if one["epoch"] == row.epoch and "loss" in one]
        assert {name: told[name] for name in loggers.figures_of(row)} == loggers.figures_of(row)
    name = json.loads(Path("run/loggers.json").read_text())["loggers"]["wandb"]["known_as"]
    assert list(tmp_path.glob(f"wandb/offline-run-*-{name}"))
    texts = [path.read_text("latin-1") for path in Path("run").rglob("*") if path.is_file()]
    assert "0123456789" * 4 not in "".join(texts)


def test_without_a_key_the_run_goes_on(tmp_path: Path, dmlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    Path("logged.yaml").write_text(TINY_RECIPE.replace("epochs: 3", "epochs: 1, workers: 0, loggers: [wandb]"))
    result = dmlkit("train", "logged.yaml", "-o", "run")
    assert result.code == 0 and "wandb fails (no API key; run wandb login, or" in result.err
