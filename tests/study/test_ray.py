"""Studies on a Ray cluster: the figures of this machine alone, whatever dies or is asked to stop on the way."""

import json
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from dmlkit.distributed.launch import start_fabric
from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.study.definition.file import read_study
from dmlkit.study.runs.run_study import run_study
from tests.conftest import TINY_RECIPE

pytestmark = [pytest.mark.slow, pytest.mark.heavy]
STUDY = """\
claim: A larger margin is better
recipe: tiny.yaml
overrides: {training.epochs: EPOCHS}
seeds: [0, 1]
metrics: [recall@1, map@r]
variants:
  small: {}
  large: {loss.margin: 0.3}
expect:
- {better: large, than: small, metric: recall@1}
"""
EPOCHS = 20
LINUX = Path("/proc/self/cwd").exists()
METHODS = ("start_model", "step", "epoch", "finish", "fail")
RUNS = [f"{name}/seed-{seed}" for seed in (0, 1) for name in ("small", "large")]


class Told:
    """Everything that a study tells."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def note(self, line: str) -> None:
        """Nothing is done with it."""

    def expect(self, runs: int, epochs: int) -> None:
        """As little."""

    def start_run(self, name: str, epochs: int) -> Any:
        def tell(method: str) -> Callable[..., None]:
            def append(*_: Any, **__: Any) -> None:
                self.events.append((name, method))

            return append

        return SimpleNamespace(**{method: tell(method) for method in METHODS})

    def of(self, name: str) -> list[str]:
        return [method for other, method in self.events if other == name and method != "step"]


def train(folder: Path, ray: str | None, told: Told, text: str, *, out: str = "out") -> dict[str, Any]:
    (folder / "tiny.yaml").write_text(TINY_RECIPE)
    (folder / "study.yaml").write_text(text)
    study = read_study(folder / "study.yaml", [])
    run_study(study, Path(out), start_fabric("cpu"), told, "dmlkit study", ray=ray)
    return json.loads((folder / out / "results.json").read_text())


@pytest.fixture(scope="module")
def cluster(ray_environment: None) -> Iterator[None]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def here(ray_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def meanwhile(act: Callable[[], bool]) -> Generator[None]:
    """Look again and again whether it is time to act, until that is done."""
    over = Event()

    def watch() -> None:
        while not over.wait(0.05) and not act():
            pass

    thread = Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def checkpoint_written() -> bool:
    return any(Path("out").rglob("last.pt"))


def stop_the_study() -> bool:
    if checkpoint_written():
        os.kill(os.getpid(), signal.SIGTERM)
        return True
    return False


def signal_a_worker(number: signal.Signals) -> bool:
    """Whether there was a process of Ray that trains a run of a study in the working directory."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # has gone, or is another user's
            if (process / "cmdline").read_bytes().startswith(b"ray::train_run") and (process / "cwd").samefile("."):
                os.kill(int(process.name), number)
                return True
    return False


def test_stopped_and_with_workers_that_end_the_figures_are_those_of_this_machine(
    request: pytest.FixtureRequest, tmp_path: Path
):
    text = STUDY.replace("EPOCHS", str(EPOCHS))
    told, again, at_last = Told(), Told(), Told()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TrainingStoppedError, match="each run after a checkpoint"), meanwhile(stop_the_study):
        train(tmp_path, "cpu", told, text)  # on a cluster of its own
    assert signal.getsignal(signal.SIGTERM) == handler
    runs = {name: tmp_path / "out" / "runs" / name for name in RUNS}
    began = [run for run in runs.values() if (run / "recipe.yaml").exists()]
    assert began and all((run / "checkpoints" / "last.pt").exists() for run in began)
    assert not all((run / "summary.json").exists() for run in runs.values())

    request.getfixturevalue("cluster")
    left = [signal.SIGTERM, signal.SIGKILL]

    def end_workers() -> bool:
        """One as soon as it trains, one where a run is complete and others are not."""
        is_time = left[0] == signal.SIGTERM or any(Path("out").rglob("summary.json"))
        if is_time and signal_a_worker(left[0]):
            left.pop(0)
        return not left

    with meanwhile(end_workers):
        results = train(tmp_path, "cpu", again, text)  # their runs go on in other tasks
    assert not left or not LINUX
    for name, run in runs.items():
        assert [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").open()] == list(range(1, EPOCHS + 1))
        assert told.of(name).count("epoch") + again.of(name).count("epoch") <= EPOCHS + 3  # none began anew
        events = told.of(name) + again.of(name)
        assert events[0] == "start_model" and events[-1] == "finish"
        command = json.loads((run / "environment.json").read_text())["command"]
        assert not any("--node-ip-address" in word for word in command)
    expected = train(tmp_path, None, Told(), text, out="alone")
    assert results["variants"] == expected["variants"] and results["verdicts"] == expected["verdicts"]
    train(tmp_path, "cpu", at_last, text)
    assert at_last.events == [(name, "finish") for name in RUNS]


def test_runs_that_fail_are_told_and_the_others_go_on(cluster: None, tmp_path: Path):
    text, told = STUDY.replace("EPOCHS", "2").replace("{loss.margin: 0.3}", "{optimizer.lr: 1e30}"), Told()
    results = train(tmp_path, "cpu", told, text)
    assert results["failed"].keys() == {"large/seed-0", "large/seed-1"}
    for name, reason in results["failed"].items():
        assert re.match(rf"{name}, on .*not finite", reason) and told.of(name)[-1] == "fail"
    assert list(results["variants"]) == ["small"] and results["missing"] == {"large": [0, 1]}
