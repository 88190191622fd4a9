"""MLflow's client, TensorBoard's reader and Weights & Biases hold the rows of metrics.jsonl, each epoch once."""

import importlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dmlkit.run_folder.folder import RunFolder
from dmlkit.training import progress as loggers
from dmlkit.training.progress import allowed
from tests.conftest import TINY_RECIPE
from tests.processes import wait_until


def logged(name: str, epochs: int) -> str:
    return TINY_RECIPE.replace("epochs: 3", f"epochs: {epochs}, workers: 0, loggers: [{name}]")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    tracking = pytest.importorskip("mlflow.tracking", reason="the extra dmlkit[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # versions that would rather have a database ask for it
    return tracking.MlflowClient(f"file:{tmp_path}/store")


def runs_of(client: Any) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name("dmlkit").experiment_id]))


def test_a_run_and_its_resumption_are_one_run(client, tmp_path, dmlkit, monkeypatch):
    recipe, folder = tmp_path / "logged.yaml", tmp_path / "run"
    recipe.write_text(logged("mlflow", 3))
    with monkeypatch.context() as patch:
        patch.setattr(loggers.MirroredProgress, "log_test", interrupted)
        dmlkit("train", recipe, "-o", folder)
    (found,) = runs_of(client)
    assert found.info.status == "FINISHED" and "metrics.test/map_at_r" not in found.data.metrics
    assert dmlkit("train", recipe, "-o", folder, "--resume").code == 0
    (found,) = runs_of(client)
    rows = RunFolder(folder).read_metrics()
    for name in loggers.figures_of(rows[0]):
        history = [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, allowed(name))]
        assert history == [(row.epoch, loggers.figures_of(row)[name]) for row in rows]
    assert "test/map_at_r" in found.data.metrics
    assert found.data.params["loss.name"] == "proxy_anchor" and found.info.run_name == "run"


def test_a_server_that_is_down_stops_nothing(tmp_path, dmlkit, monkeypatch):
    pytest.importorskip("mlflow.tracking", reason="the extra dmlkit[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    recipe = tmp_path / "logged.yaml"
    recipe.write_text(logged("mlflow", 2))
    result = dmlkit("train", recipe, "-o", tmp_path / "run")
    assert result.code == 0 and result.err.count("mlflow fails") == 1 and "secret" not in result.err


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    name = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(name, reason="the extra dmlkit[tensorboard] is not installed")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_event_files_hold_the_rows(tmp_path: Path, dmlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    recipe, folder = tmp_path / "logged.yaml", tmp_path / "run"
    recipe.write_text(logged("tensorboard", 3))
    with monkeypatch.context() as patch:
        patch.setattr(loggers.LoggedRuns, "write", interrupted)
        stopped = dmlkit("train", recipe, "-o", folder)
    assert "fails" not in stopped.err
    assert not (folder / "loggers.json").exists()  # the first epoch is shown, and not noted
    assert dmlkit("train", recipe, "-o", folder, "--resume").code == 0
    rows, found = RunFolder(folder).read_metrics(), scalars(folder)
    for name in loggers.figures_of(rows[0]):
        expected = [(row.epoch, pytest.approx(loggers.figures_of(row)[name], rel=1e-6)) for row in rows]
        assert found[name] == expected
    assert [step for step, _ in found["test/map@r"]] == [3]


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
    pytest.importorskip("wandb", reason="the extra dmlkit[wandb] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.chdir(tmp_path)
    Path("logged.yaml").write_text(logged("wandb", 2))
    assert dmlkit("train", "logged.yaml", "-o", "run").ok().err == ""
    wait_until(lambda: any("test/map@r" in one for one in rows_of(tmp_path)))  # another process writes the file
    rows, found = RunFolder(Path("run")).read_metrics(), rows_of(tmp_path)
    for row in rows:
        (row_of_run,) = [one for one in found if one["epoch"] == row.epoch and "loss" in one]
        assert {name: row_of_run[name] for name in loggers.figures_of(row)} == loggers.figures_of(row)
    name = json.loads(Path("run/loggers.json").read_text())["loggers"]["wandb"]["known_as"]
    assert list(tmp_path.glob(f"wandb/offline-run-*-{name}"))
    texts = [path.read_text("latin-1") for path in Path("run").rglob("*") if path.is_file()]
    assert "0123456789" * 4 not in "".join(texts)


def test_without_a_key_the_run_goes_on(tmp_path: Path, dmlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb", reason="the extra dmlkit[wandb] is not installed")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    Path("logged.yaml").write_text(logged("wandb", 1))
    assert "wandb fails (no API key; run wandb login, or" in dmlkit("train", "logged.yaml", "-o", "run").ok().err
