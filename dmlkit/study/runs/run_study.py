"""Study: every variant with every seed, and what that says about a claim."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Literal, Protocol

from lightning_fabric import Fabric

from dmlkit.distributed.stopping import TrainingStoppedError, stop_signals
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_place
from dmlkit.run_folder.documents import Metrics, Summary
from dmlkit.study.definition.config import Study
from dmlkit.study.definition.file import study_notes
from dmlkit.study.findings.extra_figures import extra_figures
from dmlkit.study.findings.results import Cost, StudyResults, summarize_study
from dmlkit.study.protocol import Figures, is_complete, run_once
from dmlkit.study.record import FAILURES, StudyFailures, open_study
from dmlkit.study.runs.plan import Plan, check_components
from dmlkit.study.runs.ray import train_on_ray
from dmlkit.study.runs.workers import Happening, Run, train_at_once
from dmlkit.training.progress import Progress


class RunProgress(Progress, Protocol):
    """What is told of one run, beside what a training tells."""

    def start_model(self) -> None:
        """Before a model of the run is trained or continued."""

    def finish(self, figures: dict[str, float]) -> None:
        """After it, with the figures that the study reports."""

    def fail(self, reason: str) -> None:
        """After one that cannot be trained."""


class StudyProgress(Protocol):
    """What a study tells while it runs."""

    def note(self, line: str) -> None:
        """Before the first run: what is known of the study that a reader should know."""

    def expect(self, runs: int, epochs: int) -> None:
        """Before the first run, and whenever more are known: how many there are in all."""

    def start_run(self, name: str, epochs: int) -> RunProgress:
        """Before a run of so many epochs, also before one that is complete."""
        ...


Engine = Literal["local", "ray"]  # where runs are trained: by this machine, or on a Ray cluster


class BudgetUsedError(Exception):
    """The time is used up; every run stopped after a checkpoint.

    Args:
        results: of what is complete; none where no variant has a complete run.
    """

    def __init__(self, results: StudyResults | None) -> None:
        super().__init__("budget used up")
        self.results = results


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
    budget: float = inf,
) -> StudyResults:
    """Train what is missing of a study, and hold its claim against the figures.

    Which runs that are, and where they lie, says `Plan`. A complete run is never repeated, one that was cut off is
    continued. One that fails is told, and the others go on.

    Args:
        study: what to train and compare.
        folder: of the study; gets ``study.json``, ``runs/``, ``failures.json`` and ``results.json``.
        fabric: device, precision and ranks, launched.
        progress: told of runs, and of their steps and epochs.
        command: that repeats the study; kept for reports.
        jobs: runs at once on this machine, see `train_at_once`.
        engine: ``local``, or ``ray``: as many runs at once as a cluster has room for, see `train_on_ray`.
        device: of a run on Ray; on this machine ``fabric`` has it.
        budget: seconds after which every run stops after a checkpoint, and no other begins.

    Returns:
        What ``results.json`` holds, see `summarize_study`: of the runs that are complete, if some are missing.

    Raises:
        UserError: the folder holds another study, or every run failed.
        BudgetUsedError: the budget is used up; complete runs have their results.
        TrainingStoppedError: by Ctrl-C or SIGTERM, after a checkpoint or between two runs.
    """
    deadline = monotonic() + budget
    recipes = [candidate.recipe for variant in study.variants for candidate in variant.candidates]
    check_place(folder, {recipe.dataset.data_root for recipe in recipes})
    with open_study(study.record(), folder, fabric, command), stop_signals(deadline) as stop_requested:
        runs = _Runs(Plan(study, folder), fabric, progress, stop_requested, jobs, engine, device)
        for line in study_notes(study, check_components(study, folder)):
            progress.note(line)
        cut_off = None
        try:
            runs.train_all()
        except TrainingStoppedError as stopped:
            if monotonic() < deadline:
                raise
            cut_off = stopped
        results = runs.results(command)
        if results and fabric.is_global_zero:
            results.write(folder / "results.json")
    if cut_off:
        raise BudgetUsedError(results) from cut_off
    if results is None:
        failed = StudyFailures(failed=runs.failures).lines()
        raise UserError("\n".join([f"{folder}: no variant has a complete run, so there are no results", *failed]))
    return results


@dataclass
class _Runs:
    """Trains the runs of a study that are missing.

    Args:
        plan: names them.
        failures: reasons, by the name of a run that failed.
    """

    plan: Plan
    fabric: Fabric
    progress: StudyProgress
    stop_requested: Callable[[Fabric], bool]
    jobs: int
    engine: Engine
    device: str
    failures: dict[str, str] = field(default_factory=dict[str, str])

    def train_all(self) -> None:
        """Round by round; what failed in an earlier session is tried again."""
        if self.fabric.is_global_zero:
            (self.plan.folder / FAILURES).unlink(missing_ok=True)
        for runs in self.plan.rounds():
            self.progress.expect(self.plan.num_runs, self.plan.num_epochs)
            at_once = self.jobs > 1 or self.engine == "ray"
            together = [run for run in runs if at_once and not self._is_complete(run)]
            names = {run.name for run in together}
            for run in runs:
                if run.name not in names:
                    self._train(run)
            if together:
                self._check_stop()
                self._train_at_once(together)

    def results(self, command: str) -> StudyResults | None:
        """What the complete runs say; none where no variant has one."""
        choices = self.plan.choices()
        if not choices:
            return None
        study, folder = self.plan.as_tried(), self.plan.folder
        cost = Cost.of([path.parent for path in summaries(folder / "runs")])
        beside = extra_figures(study, choices, folder, self.fabric)
        return summarize_study(study, choices, cost, command, failed=self.failures, beside=beside)

    def _is_complete(self, run: Run) -> bool:
        return is_complete(self.plan.study.config.protocol, run.folder)

    def _check_stop(self) -> None:
        if self.stop_requested(self.fabric):
            raise TrainingStoppedError("stopped between two runs")

    def _train(self, run: Run) -> None:
        if self._is_complete(run):
            self._finish(run, self._begin(run))
            return
        self._check_stop()
        progress = self._begin(run)
        try:
            self._finish(run, progress)
        except UserError as error:
            if self.fabric.world_size > 1:  # the other ranks may not have failed, and would wait for this one
                raise
            self._fail(run, progress, str(error))

    def _train_at_once(self, runs: Sequence[Run]) -> None:
        named = {run.name: run for run in runs}
        begun: dict[str, RunProgress] = {}

        def notify(name: str, happening: Happening, values: Mapping[str, Any]) -> None:
            if name not in begun:
                begun[name] = self._begin(named[name])
            run, progress = named[name], begun[name]
            match happening:
                case "step":
                    progress.step(**values)
                case "epoch":
                    progress.epoch(**values)
                case "start_model":
                    progress.start_model()
                case "finish":
                    self._finish(run, progress)
                case "fail":
                    self._fail(run, progress, **values)

        protocol = self.plan.study.config.protocol
        if self.engine == "ray":
            train_on_ray(runs, protocol, self.device, lambda: self.stop_requested(self.fabric), notify)
        else:
            train_at_once(runs, protocol, self.jobs, self.fabric, self.stop_requested, notify)

    def _begin(self, run: Run) -> RunProgress:
        return self.progress.start_run(run.name, self.plan.study.epochs_per_run(run.recipe))

    def _finish(self, run: Run, progress: RunProgress) -> None:
        def start_model(*_: object) -> Progress:
            progress.start_model()
            return progress

        config = self.plan.study.config
        figures = flat_figures(run_once(config.protocol, run.recipe, run.folder, self.fabric, start_model))
        self.fabric.barrier()  # the first rank has written the summary
        reported = config.reported()
        if not set(reported) <= set(figures):
            raise UserError(f"{run.folder}: lacks one of {', '.join(reported)}; remove its summary.json or result.json")
        self.plan.scores[run.name] = validation_score(run.folder)
        self.plan.figures[run.name] = {name: figures[name] for name in reported}
        progress.finish(self.plan.figures[run.name])

    def _fail(self, run: Run, progress: RunProgress, reason: str) -> None:
        self.failures[run.name] = reason
        StudyFailures(failed=self.failures).write(self.plan.folder / FAILURES)
        progress.fail(reason)


def flat_figures(figures: Figures) -> Metrics:
    """Figures by one name: ``map@r`` of a run, ``separated map@r`` of a Reality Check.

    Example:
        >>> flat_figures({"test": {"map@r": 0.5}}), flat_figures({"separated": {"map@r": 0.4}})
        ({'map@r': 0.5}, {'separated map@r': 0.4})
    """
    return {
        name if kind == "test" else f"{kind} {name}": value
        for kind, metrics in figures.items()
        for name, value in metrics.items()
    }


def validation_score(folder: Path) -> float:
    """What chose the checkpoint of a run; of a Reality Check the mean of its 4 models.

    Raises:
        UserError: a summary tells of no best checkpoint.
    """
    return fmean(_best_score(path) for path in summaries(folder))


def summaries(folder: Path) -> list[Path]:
    """The summaries of all finished trainings in a folder."""
    return sorted(folder.rglob("summary.json"))


def _best_score(path: Path) -> float:
    score = Summary.read(path).best_score
    if score is None:  # a study has validation classes
        raise UserError(f"{path}: tells of no best checkpoint; remove it, and the run is scored again")
    return score
