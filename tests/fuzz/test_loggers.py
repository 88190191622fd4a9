"""Loggers that fail in any way at any moment, and figures of any name: the run loses nothing, and they catch up."""

import errno
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.documents import EpochRow, Metrics, ScoredCheckpoint, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.progress import CLASSES, MirroredProgress, Silent
from tests.fuzz.conftest import RECIPE, examples

EPOCHS = 3


FAULTS: tuple[Callable[[], BaseException], ...] = (
    lambda: OSError(errno.ENOSPC, "No space left on device", "/x/events"),
    lambda: ConnectionError("https://me:secret@logs.example is down\nand more"),
    lambda: KeyError(),
    lambda: ValueError("\x1b]0;title\x07" * 50),
    lambda: ValueError("\n\n"),
    lambda: MemoryError(),
    lambda: RecursionError("deep"),
    lambda: AssertionError(),
    lambda: SystemExit(3),
    lambda: ImportError("no module named \ud800"),
)
plans = st.lists(st.none() | st.sampled_from(FAULTS), max_size=8)
names = st.text(min_size=1, max_size=12) | st.sampled_from(
    ["recall@1", "../x", "a/b", "", " ", "\x00", "\u202e", "a" * 600, "\n"]
)


class Planned:
    """Fails as planned; at each call of any method the next one of the plan."""

    plan: list[Any]
    shown: list[int]

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        self._next()
        self.known_as = known_as or "planned"

    def log(self, figures: Metrics, epoch: int) -> None:
        self._next()
        self.shown.append(-epoch if any(name.startswith("test/") for name in figures) else epoch)

    def close(self, *, finished: bool) -> None:
        self._next()

    def _next(self) -> None:
        fault = self.plan.pop(0) if self.plan else None
        if fault:
            raise fault()


def ended_run(folder: Path, figures: dict[str, float]) -> RunFolder:
    """A run of some epochs with these figures, as training leaves it."""
    run = RunFolder(folder)
    run.create(parse_recipe(RECIPE, "base.yaml"), overwrite=False)
    for epoch in range(1, EPOCHS + 1):
        row = EpochRow(
            epoch=epoch, loss=1.0, lr=0.1, images_per_second=1.0, waiting=0.0, seconds=1.0 * epoch, validation=figures
        )
        run.append_metrics(row)
    scored = ScoredCheckpoint(epoch=EPOCHS, validation=figures, test=figures)
    Summary(last=scored, best=scored, selected_by="map@r", seconds=3.0, images_per_second=1.0, skipped_images=()).write(
        run.summary_path
    )
    return run


def show(run: RunFolder, loggers: str, *, is_trained: bool = False) -> list[str]:
    """A session that trains a run, or resumes one that is complete; returns what it warns of."""
    recipe = parse_recipe(RECIPE, "base.yaml", [f"training.loggers=[{loggers}]"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        session = MirroredProgress(Silent(), recipe, run)
        for row in run.read_metrics() if is_trained else ():
            session.epoch(row)
        session.log_test()
        session.close()
    return [str(one.message) for one in warned if "training.loggers" in str(one.message)]


@pytest.mark.heavy
@examples(60, 500)
@given(sessions=st.lists(plans, min_size=1, max_size=3), figures=st.dictionaries(names, st.floats(0, 1), max_size=3))
def test_a_logger_that_fails_costs_the_run_nothing_and_catches_up(
    sessions: list[list[Any]], figures: dict[str, float], tmp_path_factory: pytest.TempPathFactory
):
    figures = {"map@r": 0.5, **figures}
    run = ended_run(tmp_path_factory.mktemp("logged") / "run", figures)
    before = run.metrics_path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CLASSES, "tensorboard", Planned)
        Planned.shown = []
        for number, plan in enumerate(sessions):
            Planned.plan = [*plan]
            told = show(run, "tensorboard", is_trained=number == 0)
            used = plan[: len(plan) - len(Planned.plan)]
            assert len(told) == sum(fault is not None for fault in used) <= 1
            assert all("\n" not in line and "secret" not in line for line in told)
        Planned.plan = []
        assert show(run, "tensorboard") == []
    assert run.metrics_path.read_bytes() == before
    assert set(Planned.shown) == {1, 2, 3, -EPOCHS}
    if not any(fault for plan in sessions for fault in plan):
        assert Planned.shown == [1, 2, 3, -EPOCHS]


@pytest.mark.heavy
@examples(20, 100)
@given(figures=st.dictionaries(names, st.floats(0, 1), max_size=4), is_blocked=st.booleans())
def test_tensorboard_takes_figures_of_any_name_or_is_left_out(
    figures: dict[str, float], is_blocked: bool, tmp_path_factory: pytest.TempPathFactory
):
    pytest.importorskip("tensorboard", reason="the extra dmlkit[tensorboard] is not installed")
    run = ended_run(tmp_path_factory.mktemp("boards") / "run", {"map@r": 0.5, **figures})
    if is_blocked:
        (run.path / "tensorboard").write_text("no folder")
    told = show(run, "tensorboard", is_trained=True)
    assert len(told) <= 1 and bool(told) >= is_blocked
