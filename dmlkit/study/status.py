"""Status of a study, read from its folder while the study runs or after it ended in any way; durations as text."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import BaseModel

from dmlkit.errors import UserError
from dmlkit.files.lock import is_held
from dmlkit.files.source import STUDY_MARK
from dmlkit.run_folder.documents import Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.record import FAILURES, StudyFailures, StudyRecord

State = Literal["done", "running", "stopped", "failed", "waiting"]


class RunStatus(BaseModel, frozen=True, extra="forbid"):
    """Status of one run."""

    variant: str
    choice: str | None  # label of the tuned values; empty if nothing is tuned, null if they are not chosen yet
    seed: int
    folder: str | None = None  # under ``runs/``; null if the values are not chosen yet
    state: State = "waiting"  # ``stopped``: the run has started, and no process trains it now
    epochs: int = 0  # finished
    of_epochs: int  # of all models of the run
    score: float | None = None  # best so far on validation classes; for the Reality Check the mean over models
    seconds: float = 0.0  # of training and validation so far
    reason: str | None = None  # of a failure


class StudyStatus(BaseModel, frozen=True, extra="forbid"):
    """Status of a study."""

    claim: str
    command: str  # continues the study
    is_running: bool  # whether a process works on the study now
    runs: tuple[RunStatus, ...]  # those that are known; extended grids and added seeds may add more
    best: dict[str, str]  # label of the best tuned values so far, by variant, once all of the study's file were tried
    seconds: float  # spent on all runs
    seconds_left: float | None  # estimate for the remaining runs, one after another; null before the first epoch

    def count(self, state: State) -> int:
        """Return the number of runs in a state."""
        return sum(run.state == state for run in self.runs)


def status_of(folder: Path) -> StudyStatus:
    """Return the status of the study in a folder, without changing it."""
    record = StudyRecord.read(folder / STUDY_MARK)
    failures = folder / FAILURES
    reader = _Reader(folder, record, StudyFailures.read(failures).failed if failures.exists() else {})
    runs = [run for variant in record.variants for run in reader.runs_of(variant)]
    return StudyStatus(
        claim=record.claim,
        command=record.command,
        is_running=is_held(folder),
        runs=tuple(runs),
        best=reader.best,
        seconds=round(sum(run.seconds for run in runs), 1),
        seconds_left=_seconds_left(runs),
    )


class _Reader:
    """Reader of the runs of a study."""

    def __init__(self, folder: Path, study: StudyRecord, failed: dict[str, str]) -> None:
        self.folder, self.study, self.failed = folder / "runs", study, failed
        self.is_tuned = any(len(recipes) > 1 for recipes in study.variants.values())
        self.first = study.first_seeds(is_tuned=self.is_tuned)
        self.models = study.models_per_run
        self.best: dict[str, str] = {}  # label of the best value, by variant; see `StudyStatus`

    def runs_of(self, variant: str) -> Iterator[RunStatus]:
        """Yield the runs of all tried values, the best one with its later seeds."""
        recipes = self.study.variants[variant]
        if not self.is_tuned:
            yield from (self._run(variant, "", seed) for seed in self._seeds(variant, "", self.first))
            return
        folders = sorted(path.name for path in (self.folder / variant).glob("*/") if path.name not in recipes)
        labels = [*recipes, *folders]  # folders of values beyond the edge of the grid come last
        tried = {label: [self._run(variant, label, seed) for seed in self.first] for label in labels}
        scores = {
            label: fmean(run.score or 0.0 for run in runs)
            for label, runs in tried.items()
            if all(run.state == "done" for run in runs)
        }
        later = [seed for seed in self.study.seeds if seed not in self.first]
        if scores and all(run.state in ("done", "failed") for runs in tried.values() for run in runs):
            self.best[variant] = max(scores, key=scores.__getitem__)
        for label, runs in tried.items():
            more = later if label == self.best.get(variant) else []
            seeds = self._seeds(variant, label, [*self.first, *more])[len(self.first) :]
            yield from (*runs, *(self._run(variant, label, seed) for seed in seeds))
        if variant not in self.best:
            yield from (self._run(variant, None, seed) for seed in later)

    def _seeds(self, variant: str, label: str, known: Sequence[int]) -> list[int]:
        """Return the seeds of a value: the known ones, and those that have a folder."""
        names = (path.name.removeprefix("seed-") for path in (self.folder / variant / label).glob("seed-*/"))
        return [*known, *sorted({int(name) for name in names if name.isdecimal()} - set(known))]

    def _run(self, variant: str, label: str | None, seed: int) -> RunStatus:
        recipes = self.study.variants[variant]
        training = recipes.get(label or "", next(iter(recipes.values())))["training"]
        of_epochs = (training.get("stop_after") or training["epochs"]) * self.models
        if label is None:
            return RunStatus(variant=variant, choice=None, seed=seed, of_epochs=of_epochs)
        folder = self.folder / variant / label / f"seed-{seed}"
        name = str(folder.relative_to(self.folder))
        folds = [folder / f"fold-{fold}" for fold in range(self.models)]
        models = [RunFolder(path) for path in (folds if self.models > 1 else [folder])]
        progress = [_progress(run, training["select_by"] if self.models == 1 else "map@r") for run in models]
        scores = [score for _, score, _ in progress if score is not None]
        state: State = "waiting"
        if all(run.summary_path.exists() for run in models) and (self.models == 1 or (folder / "result.json").exists()):
            state = "done"
        elif any(is_held(run.path) for run in models):
            state = "running"
        elif name in self.failed:
            state = "failed"
        elif any(run.holds_run() for run in models):
            state = "stopped"
        return RunStatus(
            variant=variant,
            choice=label,
            seed=seed,
            folder=name,
            state=state,
            epochs=sum(epochs for epochs, _, _ in progress),
            of_epochs=of_epochs,
            score=fmean(scores) if scores else None,
            seconds=round(sum(seconds for _, _, seconds in progress), 1),
            reason=self.failed[name] if state == "failed" else None,
        )


def _progress(run: RunFolder, select_by: str) -> tuple[int, float | None, float]:
    """Return the finished epochs, the best score on validation classes, and the seconds so far."""
    rows = run.read_metrics()
    scores = [row.validation[select_by] for row in rows if row.validation and select_by in row.validation]
    if run.summary_path.exists():
        summary = Summary.read(run.summary_path)
        return len(rows), summary.best_score, summary.seconds
    return len(rows), max(scores, default=None), rows[-1].seconds if rows else 0.0


def _seconds_left(runs: Sequence[RunStatus]) -> float | None:
    """Estimate the remaining seconds from epochs of the same variant, or of any variant if it has none yet."""

    def pace(group: Sequence[RunStatus]) -> float | None:
        epochs = sum(run.epochs for run in group)
        return sum(run.seconds for run in group) / epochs if epochs else None

    overall = pace(runs)
    if overall is None:
        return None
    names = dict.fromkeys(run.variant for run in runs)
    paces = {name: pace([run for run in runs if run.variant == name]) or overall for name in names}
    left = [run for run in runs if run.state not in ("done", "failed")]
    return round(sum(paces[run.variant] * (run.of_epochs - run.epochs) for run in left), 1)


WRITTEN = re.compile(r"(?=.)(?:([0-9]{1,5})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,6})s)?")


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units.

    Example:
        >>> format_duration(41.2), format_duration(750), format_duration(12000)
        ('41 s', '12 min 30 s', '3 h 20 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def parse_duration(text: str, option: str) -> int:
    """Parse a duration in hours, minutes and seconds and return it in seconds."""
    match = WRITTEN.fullmatch(text)
    hours, minutes, seconds = (int(number or 0) for number in match.groups()) if match else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise UserError(f"{option} {text!r}: expected hours, minutes and seconds, above 0, e.g. 90m, 2h or 1h30m")
    return total
