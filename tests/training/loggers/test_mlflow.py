"""MLflow's own client finds what metrics.jsonl holds, in a store of files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmlkit.run_folder.folder import RunFolder
from dmlkit.training import progress as loggers
from dmlkit.training.progress import allowed
from tests.conftest import TINY_RECIPE

tracking = pytest.importorskip("mlflow.tracking", reason="the extra dmlkit[mlflow] is not installed")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # versions that would rather have a database ask for it
    return tracking.MlflowClient(f"file:{tmp_path}/store")


def runs_of(client: Any) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name("dmlkit").experiment_id]))


def test_a_run_and_its_resumption_are_one_run(
    client: Any, tmp_path: Path, dmlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    recipe, folder = tmp_path / "logged.yaml", tmp_path / "run"
    recipe.write_text(TINY_RECIPE.replace("epochs: 3", "epochs: 3, workers: 0, loggers: [mlflow]"))
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


def test_a_server_that_is_down_stops_nothing(
    tmp_path: Path, dmlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    recipe = tmp_path / "logged.yaml"
    recipe.write_text(TINY_RECIPE.replace("epochs: 3", "epochs: 2, workers: 0, loggers: [mlflow]"))
    result = dmlkit("train", recipe, "-o", tmp_path / "run")
    assert result.code == 0 and result.err.count("mlflow fails") == 1 and "secret" not in result.err


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt
