"""Runs of studies that nobody trains: their figures are told, and lie in their folders as those of trained ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmlkit.errors import UserError
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import EpochRow, ScoredCheckpoint, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.runs import run_study as study_run
from dmlkit.study.verdicts import Cost, StudyResults, VariantResults
from tests.conftest import TINY_RECIPE, Killed

STUDY = """\
claim: A larger margin is better
recipe: tiny.yaml
seeds: [0, 1]
metrics: [map@r]
variants:
  small: {}
  large: {loss.margin: 0.3}
expect:
- {better: large, than: small, metric: map@r}
"""
Told = tuple[float, float] | str | OSError
"""The score on validation classes and the figure on test classes, or why a run fails."""


def write_study(folder: Path, text: str = STUDY) -> Path:
    (folder / "tiny.yaml").write_text(TINY_RECIPE)
    path = folder / "study.yaml"
    path.write_text(text)
    return path


def study(dmlkit: Callable[..., Any], path: Path, *words: object) -> Any:
    return dmlkit("study", path, "-o", path.parent / "out", "--device", "cpu", *words)


def write_run(recipe: Recipe, folder: Path, figures: tuple[float, float], *, epochs: int | None = None) -> None:
    """A run that is complete, or has finished some epochs."""
    run = RunFolder(folder)
    if not run.holds_run():
        run.create(recipe, overwrite=False)
    score, figure = figures
    total = recipe.training.epochs
    for epoch in range(len(run.read_metrics()) + 1, (total if epochs is None else epochs) + 1):
        run.append_metrics(
            EpochRow(
                epoch=epoch,
                loss=1.0,
                lr=0.1,
                images_per_second=1.0,
                waiting=0.0,
                seconds=10.0 * epoch,
                validation={"map@r": score - 0.01 * (total - epoch)},
            )
        )
    if epochs is None:
        test = {"map@r": figure, "recall@1": 1 - figure}  # of studies that report both: they disagree
        end = ScoredCheckpoint(epoch=total, validation={"map@r": score}, test=test)
        summary = Summary(
            last=end, best=end, selected_by="map@r", seconds=10.0 * total, images_per_second=1.0, skipped_images=()
        )
        summary.write(run.summary_path)


def results_of(figures: dict[str, list[dict[str, float]]], claim: str = "A claim") -> StudyResults:
    """The results of variants whose runs have these figures, by seed."""
    metrics = tuple(next(iter(figures.values()))[0])
    variants = {name: VariantResults.of(dict(enumerate(runs)), metrics) for name, runs in figures.items()}
    return StudyResults(
        claim=claim,
        seeds=tuple(range(len(next(iter(figures.values()))))),
        metrics=metrics,
        reference=next(iter(figures)),
        axis=None,
        verdicts=(),
        variants=variants,
        cost=Cost(models=4, seconds=1.5, on=("1 CPU thread",)),
        command="dmlkit study",
    )


def kill_after(number: int) -> Callable[[int], None]:
    def kill(trained: int) -> None:
        if trained == number:
            raise Killed

    return kill


class Trained:
    """What was trained, in its order; takes the place of `run_once`.

    Args:
        tell: the score and the figure of a run, from its recipe, or why it fails.
        before: called with the number of runs that were trained, before the next one is.
    """

    def __init__(self, tell: Callable[[Recipe], Told], before: Callable[[int], object] = lambda _: None) -> None:
        self.tell, self.before = tell, before
        self.folders: list[Path] = []

    def __call__(self, protocol: str, recipe: Recipe, folder: Path, ranks: Any, start_model: Any) -> Any:
        run = RunFolder(folder)
        if not run.summary_path.exists():
            self.before(len(self.folders))
            start_model()
            self.folders.append(folder)
            ending = self.tell(recipe)
            if isinstance(ending, str):
                raise UserError(ending)
            if isinstance(ending, OSError):
                raise ending
            write_run(recipe, folder, ending)
        return Summary.read(run.summary_path).chosen.test

    def names(self, out: Path) -> list[str]:
        return [str(folder.relative_to(out / "runs")) for folder in self.folders]


def train_by(
    monkeypatch: pytest.MonkeyPatch, tell: Callable[[Recipe], Told], before: Callable[[int], object] = lambda _: None
) -> Trained:
    """From here on studies are trained by this."""
    trained = Trained(tell, before)
    monkeypatch.setattr(study_run, "run_once", trained)
    return trained


def rate_of(recipe: Recipe) -> float:
    """The learning rate, which every optimizer has."""
    return recipe.model_dump()["optimizer"]["lr"]


def margin_of(recipe: Recipe) -> float:
    """Of a loss that has a margin."""
    return recipe.model_dump()["loss"]["margin"]


def scale_of(recipe: Recipe) -> float:
    """Of a loss that has a scale."""
    return recipe.model_dump()["loss"]["scale"]
