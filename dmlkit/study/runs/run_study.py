"""Running a study: every variant is trained with every seed, and the results are summarized."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Protocol

from dmlkit.distributed.launch import Ranks
from dmlkit.distributed.stopping import TrainingStoppedError, stop_signals
from dmlkit.errors import UserError, reason_of, warn
from dmlkit.evaluation.run import evaluate_scope
from dmlkit.files.outputs import check_place
from dmlkit.run_folder.documents import Metrics, Summary
from dmlkit.study.definition.config import Study
from dmlkit.study.definition.file import study_notes
from dmlkit.study.protocol import RealityCheckFigures, is_complete, run_once
from dmlkit.study.record import FAILURES, ProtocolName, StudyFailures, open_study
from dmlkit.study.runs.plan import Plan, check_components
from dmlkit.study.runs.workers import Happening, Run, train_at_once
from dmlkit.study.verdicts import Cost, StudyResults, VariantResults, summarize_study
from dmlkit.training.progress import Progress


class RunProgress(Progress, Protocol):
    """Receiver of the events of one run, in addition to those of its trainings."""

    def start_model(self) -> Progress:
        """Report that a model of the run is about to be trained or resumed, and return the receiver of its events."""
        ...

    def finish(self, figures: dict[str, float]) -> None:
        """Report that the run is complete, with the figures of the study."""

    def fail(self, reason: str) -> None:
        """Report that the run failed."""


class StudyProgress(Protocol):
    """Receiver of the events of a study."""

    def note(self, line: str) -> None:
        """Report a weakness of the study before its first run, or before the first one with chosen values."""

    def expect(self, runs: int, epochs: int) -> None:
        """Report the total number of runs and epochs, before the first run and whenever more are known."""

    def start_run(self, name: str, epochs: int) -> RunProgress:
        """Report the start of a run with its number of epochs, also of a run that is complete."""
        ...


class BudgetUsedError(Exception):
    """The time budget is used up; every run stopped after a checkpoint. The results are of the complete ones."""

    def __init__(self, results: StudyResults | None) -> None:
        super().__init__("budget used up")
        self.results = results


def run_study(
    study: Study,
    folder: Path,
    ranks: Ranks,
    progress: StudyProgress,
    command: str,
    *,
    workers: int = 1,
    budget: float = inf,
) -> StudyResults:
    """Train the missing runs of a study, and judge its claim by the figures of all; see `summarize_study`.

    `Plan` names the runs and their folders. Complete runs are never repeated, and interrupted runs are resumed. A run
    that fails is reported, and the other runs continue, unless none has succeeded and all fail for the same reason.

    Args:
        command: command that repeats the study, for reports.
        workers: number of concurrent runs on this machine, see `train_at_once`.
        budget: seconds after which every run stops after a checkpoint, and no other run starts.
    """
    deadline = monotonic() + budget
    recipes = [candidate.recipe for variant in study.variants for candidate in variant.candidates]
    check_place(folder, {recipe.dataset.data_root for recipe in recipes})
    with open_study(study.record(command), folder, ranks), stop_signals(deadline) as stop_requested:
        runs = _Runs(Plan(study, folder), ranks, progress, stop_requested, workers)
        for line in study_notes(study, check_components(study, folder)):
            progress.note(line)
        interruption = None
        try:
            runs.train_all()
        except TrainingStoppedError as stopped:
            if monotonic() < deadline:
                raise
            interruption = stopped
        results = runs.results(command)
        if results and ranks.is_global_zero:
            results.write(folder / "results.json")
    if interruption:
        raise BudgetUsedError(results) from interruption
    if results is None:
        failed = StudyFailures(failed=runs.failures).lines()
        raise UserError("\n".join([f"{folder}: no results, since no variant has a complete run", *failed]))
    return results


@dataclass
class _Runs:
    """Trainer of the missing runs of a study."""

    plan: Plan
    ranks: Ranks
    progress: StudyProgress
    stop_requested: Callable[[Ranks], bool]
    workers: int
    failures: dict[str, str] = field(default_factory=dict[str, str])  # reasons of failures, by run

    def train_all(self) -> None:
        """Train round by round; runs that failed in an earlier session are tried again."""
        if self.ranks.is_global_zero:
            (self.plan.folder / FAILURES).unlink(missing_ok=True)
        noted_edges = False
        for runs in self.plan.rounds():
            self.progress.expect(self.plan.num_runs, self.plan.num_epochs)
            left = [run for run in runs if not is_complete(self.plan.study.config.protocol, run.folder)]
            if left and self.plan.chosen and not noted_edges:
                noted_edges = True  # before hours of runs with values that may not be the best ones
                for name, text in self.plan.edges().items():
                    chosen = self.plan.chosen[name].label
                    self.progress.note(f"{name} chose {chosen}: {text}; to try more, stop and increase extend")
            for run in runs:  # first, so that a budget that ends does not leave them out of the results
                if run not in left:
                    self._take(run, self._start(run))  # a damaged run ends the study, and earlier results stay
            if left and self.workers > 1:
                self._check_stop()
                self._train_at_once(left)
                continue
            for run in left:
                self._check_stop()
                self._finish(run, self._start(run))

    def results(self, command: str) -> StudyResults | None:
        """Return the results of the complete runs; None if no variant has one."""
        variants = {name: self._with_extra_figures(name, variant) for name, variant in self.plan.results().items()}
        if not variants:
            return None
        cost = Cost.of([path.parent for path in summaries(self.plan.folder / "runs")])
        return summarize_study(self.plan.study, variants, cost, command, self.failures)

    def _with_extra_figures(self, name: str, variant: VariantResults) -> VariantResults:
        """Add the figures of a variant after all epochs, and those of its checkpoint ``pretrained``.

        Training has recorded the latter for pretrained weights; a network with random weights is evaluated here.
        """
        config, chosen = self.plan.study.config, self.plan.chosen[name]
        folder = self.plan.folder / "runs" / name / chosen.label
        models = {seed: summaries(folder / f"seed-{seed}") for seed in variant.runs}
        first = next(iter(models.values()))[0]
        before = Summary.read(first).pretrained
        pretrained = before.test if before else None
        if not chosen.recipe.backbone.is_pretrained:
            try:
                evaluated = evaluate_scope(first.parent, self.ranks, checkpoint="pretrained", keep=True)
                pretrained = evaluated.report.metrics
            except (UserError, OSError) as error:  # for example, the images are only on the machines of a cluster
                warn(f"{name}: no figures before training: {reason_of(error)}")
        if pretrained and config.protocol == "reality_check":  # all models start from the same weights
            pretrained = RealityCheckFigures(separated=pretrained, concatenated=pretrained).flat()

        def kept(figures: Metrics) -> Metrics:
            return {metric: figures[metric] for metric in config.metrics if metric in figures}

        last = {seed: kept(_last(config.protocol, map(Summary.read, paths))) for seed, paths in models.items()}
        return variant.model_copy(update={"last": last, "pretrained": pretrained and kept(pretrained)})

    def _check_stop(self) -> None:
        if self.stop_requested(self.ranks):
            raise TrainingStoppedError("stopped between two runs")

    def _train_at_once(self, runs: Sequence[Run]) -> None:
        named = {run.name: run for run in runs}
        started: dict[str, RunProgress] = {}

        def notify(name: str, happening: Happening, values: Mapping[str, Any]) -> None:
            if name not in started:
                started[name] = self._start(named[name])
            run, progress = named[name], started[name]
            if happening == "finish":
                self._finish(run, progress)
            elif happening == "fail":
                self._fail(run, progress, **values)
            else:
                getattr(progress, happening)(**values)

        train_at_once(runs, self.plan.study.config.protocol, self.workers, self.ranks, self.stop_requested, notify)

    def _start(self, run: Run) -> RunProgress:
        return self.progress.start_run(run.name, self.plan.study.epochs_per_run(run.recipe))

    def _finish(self, run: Run, progress: RunProgress) -> None:
        """Train a run if it is not complete, and take its figures; an error is reported, and ends this run alone."""
        try:
            self._take(run, progress)
        except (UserError, OSError) as error:
            if self.ranks.world_size > 1:  # ranks that did not fail would wait for this one
                raise UserError(f"{run.name}: {reason_of(error)}") from error
            self._fail(run, progress, reason_of(error))

    def _take(self, run: Run, progress: RunProgress) -> None:
        config = self.plan.study.config
        figures = run_once(config.protocol, run.recipe, run.folder, self.ranks, progress.start_model)
        self.ranks.barrier()  # the first rank has written the summary
        if not set(config.metrics) <= set(figures):
            raise UserError(
                f"{run.folder}: expected {', '.join(config.metrics)}; remove its summary.json or result.json and rerun"
            )
        scores: list[float] = []
        for path in summaries(run.folder):  # 4 for a Reality Check
            score = Summary.read(path).best_score
            if score is None:  # a study has validation classes
                raise UserError(f"{path}: has no best checkpoint; remove the file and rerun to score the run again")
            scores.append(score)
        self.plan.scores[run.name] = fmean(scores)
        self.plan.figures[run.name] = {name: figures[name] for name in config.metrics}
        progress.finish(self.plan.figures[run.name])

    def _fail(self, run: Run, progress: RunProgress, reason: str) -> None:
        self.failures[run.name] = reason
        progress.fail(reason)  # first: a full disk may not take the file
        failures, path = StudyFailures(failed=self.failures), self.plan.folder / FAILURES
        try:
            failures.write(path)
        except OSError as error:
            warn(f"{path}: cannot write the failed runs: {error.strerror or error}")
        variants = {name.split("/")[0] for name in self.failures}
        is_common = len(set(self.failures.values())) == 1 and len(variants) > 1  # not one variant's learning rate
        if is_common and not self.plan.figures and len(self.failures) >= MIN_COMMON_FAILURES:
            raise UserError(f"{failures.lines()[0]}; no run has succeeded, so no other one was tried")


MIN_COMMON_FAILURES = 8  # to stop a study: one with a wrong folder of features failed all its 873 runs


def summaries(folder: Path) -> list[Path]:
    """Return the summaries of all finished trainings in a folder."""
    return sorted(folder.rglob("summary.json"))


def _last(protocol: ProtocolName, models: Iterable[Summary]) -> Metrics:
    """Return the figures after all epochs.

    The Reality Check concatenates only the best checkpoints: the last ones would need 4 more embeddings per image.
    """
    kind = "separated " if protocol == "reality_check" else ""
    tests = [model.last.test or {} for model in models]
    return {f"{kind}{name}": fmean(test[name] for test in tests) for name in tests[0]}
