"""Study: every variant with every seed, and what that says about a claim."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from lightning_fabric import Fabric

from dmlkit.distributed.stopping import TrainingStoppedError, stop_signals
from dmlkit.errors import UserError
from dmlkit.run_folder.documents import Summary
from dmlkit.study.beside import beside_figures
from dmlkit.study.config import Candidate, Study, Variant
from dmlkit.study.protocol import Figures, fold_recipe, is_complete, run_once
from dmlkit.study.ray import train_on_ray
from dmlkit.study.record import open_study
from dmlkit.study.results import Choice, Cost, StudyResults, summarize_study
from dmlkit.study.workers import Run, train_at_once
from dmlkit.training.experiment import assemble
from dmlkit.training.progress import Progress

Engine = Literal["local", "ray"]  # where runs are trained: by this machine, or on a Ray cluster


class RunProgress(Progress, Protocol):
    """What is told of one run, beside what a training tells."""

    def start_model(self) -> None:
        """Before a model of the run is trained or continued."""

    def finish(self, figures: dict[str, float]) -> None:
        """After it, with the figures that the study reports."""


class StudyProgress(Protocol):
    """What a study tells while it runs."""

    def start_run(self, name: str, epochs: int) -> RunProgress:
        """Before a run of so many epochs, also before one that is complete."""
        ...


def run_study(
    study: Study,
    folder: Path,
    fabric: Fabric,
    progress: StudyProgress,
    command: str,
    *,
    jobs: int = 1,
    engine: Engine = "local",
    device: str = "auto",
) -> StudyResults:
    """Train what is missing of a study, and hold its claim against the figures.

    Runs lie in ``runs/VARIANT/seed-S``, with values to choose from in ``runs/VARIANT/CHOICE/seed-S``: there every
    choice is trained with the first seed, the best on validation classes with the others too. A complete run is
    never repeated, one that was cut off is continued.

    Args:
        study: what to train and compare.
        folder: of the study; gets ``study.json``, ``runs/`` and ``results.json``.
        fabric: device, precision and ranks, launched.
        progress: told of runs, and of their steps and epochs.
        command: that repeats the study; kept for reports.
        jobs: runs at once on this machine, see `train_at_once`.
        engine: ``local``, or ``ray``: as many runs at once as a cluster has room for, see `train_on_ray`.
        device: of a run on Ray; on this machine ``fabric`` has it.

    Returns:
        What ``results.json`` holds, see `summarize_study`.

    Raises:
        UserError: the folder holds another study, or a run fails.
        TrainingStoppedError: by Ctrl-C or SIGTERM, after a checkpoint or between two runs.
    """
    with open_study(study.record(), folder, fabric, command), stop_signals() as stop_requested:
        runs = _Runs(study, folder, fabric, progress, stop_requested, jobs, engine, device)
        check_components(study, folder)
        tuned = any(len(variant.candidates) > 1 for variant in study.variants)
        tried = study.config.seeds[:1] if tuned else study.config.seeds  # all in one go where no run waits for a choice
        others = study.config.seeds[len(tried) :]
        choices = runs.choose(tried)
        repeated = [
            runs.run(variant, choices[variant.name].candidate, seed) for seed in others for variant in study.variants
        ]
        figures = runs.train(repeated)
        for seed in others:
            for variant in study.variants:
                choice = choices[variant.name]
                choice.figures[seed] = figures[runs.run(variant, choice.candidate, seed).name]
        cost = Cost.of([path.parent for path in _summaries(folder / "runs")])
        results = summarize_study(study, choices, cost, command, beside=beside_figures(study, choices, folder, fabric))
        if fabric.is_global_zero:
            results.write(folder / "results.json")
    return results


def check_components(study: Study, folder: Path) -> None:
    """Build the components of every variant that has no run yet: what does not fit is told before anything trains.

    Raises:
        UserError: with the name of the variant.
    """
    for variant in study.variants:
        if (folder / "runs" / variant.name).exists():
            continue
        recipe = variant.candidates[0].recipe
        try:
            assemble(fold_recipe(recipe, 0) if study.config.protocol == "reality_check" else recipe)
        except UserError as error:
            raise UserError(f"{variant.name}: {error}") from error


@dataclass(frozen=True)
class _Runs:
    """Trains the runs of a study that are missing."""

    study: Study
    folder: Path
    fabric: Fabric
    progress: StudyProgress
    stop_requested: Callable[[Fabric], bool]
    jobs: int
    engine: Engine
    device: str

    def choose(self, seeds: Sequence[int]) -> dict[str, Choice]:
        """Train every candidate with these seeds. Of each variant the one that is best on validation classes with the
        first seed, the earlier one where two are equal."""
        tried = [(variant, candidate) for variant in self.study.variants for candidate in variant.candidates]
        figures = self.train([self.run(variant, candidate, seed) for seed in seeds for variant, candidate in tried])
        choices: dict[str, Choice] = {}
        for variant in self.study.variants:
            scores = [_validation_score(self.run(variant, one, seeds[0]).folder) for one in variant.candidates]
            best = variant.candidates[scores.index(max(scores))]
            chosen = {seed: figures[self.run(variant, best, seed).name] for seed in seeds}
            choices[variant.name] = Choice(best, tuple(scores), chosen)
        return choices

    def run(self, variant: Variant, candidate: Candidate, seed: int) -> Run:
        folder = self.folder / "runs" / variant.name / candidate.label / f"seed-{seed}"
        recipe = candidate.recipe.model_copy(update={"seed": seed})
        return Run(str(folder.relative_to(self.folder / "runs")), recipe, folder)

    def train(self, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
        """The figures of runs on the test classes, by their names; those that are not complete are trained."""
        protocol = self.study.config.protocol
        at_once = self.jobs > 1 or self.engine == "ray"
        together = [run for run in runs if at_once and not is_complete(protocol, run.folder)]
        names = {run.name for run in together}
        figures = {run.name: self._train(run) for run in runs if run.name not in names}
        return figures | (self._train_at_once(together) if together else {})

    def _train(self, run: Run) -> dict[str, float]:
        if self.stop_requested(self.fabric):
            raise TrainingStoppedError("stopped between two runs")
        return self._finish(run, self._begin(run))

    def _train_at_once(self, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
        named = {run.name: run for run in runs}
        begun: dict[str, RunProgress] = {}
        figures: dict[str, dict[str, float]] = {}

        def tell(name: str, method: str, told: Mapping[str, Any]) -> None:
            if name not in begun:
                begun[name] = self._begin(named[name])
            if method == "finish":
                figures[name] = self._finish(named[name], begun[name])
            else:
                getattr(begun[name], method)(**told)

        protocol = self.study.config.protocol
        if self.engine == "ray":
            train_on_ray(runs, protocol, self.device, lambda: self.stop_requested(self.fabric), tell)
        else:
            train_at_once(runs, protocol, self.jobs, self.fabric, self.stop_requested, tell)
        return figures

    def _begin(self, run: Run) -> RunProgress:
        return self.progress.start_run(run.name, self.study.epochs_per_run(run.recipe))

    def _finish(self, run: Run, progress: RunProgress) -> dict[str, float]:
        def start_model(*_: object) -> Progress:
            progress.start_model()
            return progress

        figures = _flat(run_once(self.study.config.protocol, run.recipe, run.folder, self.fabric, start_model))
        reported = self.study.config.reported()
        if not set(reported) <= set(figures):
            raise UserError(f"{run.folder}: lacks one of {', '.join(reported)}; remove its summary.json or result.json")
        progress.finish({name: figures[name] for name in reported})
        return figures


def _flat(figures: Figures) -> dict[str, float]:
    """Figures by one name: ``map@r`` of a run, ``separated map@r`` of a Reality Check."""
    return {
        name if kind == "test" else f"{kind} {name}": value
        for kind, metrics in figures.items()
        for name, value in metrics.items()
    }


def _validation_score(path: Path) -> float:
    """What chose the checkpoint of a run; of a Reality Check the mean of its 4 models."""
    return fmean(_best_score(file) for file in _summaries(path))


def _best_score(file: Path) -> float:
    score = Summary.read(file).best_score
    if score is None:  # a study has validation classes
        raise UserError(f"{file}: tells of no best checkpoint; remove it, and the run is scored again")
    return score


def _summaries(path: Path) -> list[Path]:
    return sorted(path.rglob("summary.json"))
