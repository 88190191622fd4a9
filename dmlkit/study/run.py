"""Study: every variant with every seed, and what that says about a claim."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from lightning_fabric import Fabric
from pydantic import ValidationError

from dmlkit.distributed.stopping import TrainingStoppedError, stop_signals
from dmlkit.errors import UserError
from dmlkit.files.atomic import write_json
from dmlkit.files.differences import differences
from dmlkit.recipe.schema import Recipe
from dmlkit.study.config import Candidate, Study, Variant
from dmlkit.study.protocol import Figures, fold_recipe, is_complete, run_once
from dmlkit.study.ray import train_on_ray
from dmlkit.study.results import Choice, summarize_study
from dmlkit.study.workers import Run, train_at_once
from dmlkit.training.experiment import assemble
from dmlkit.training.progress import Progress

REWORDED = ("claim", "paper", "table")  # keys that no figure depends on
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
) -> dict[str, Any]:
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
    open_study(study, folder, fabric, command)
    with stop_signals() as stop_requested:
        runs = _Runs(study, folder, fabric, progress, stop_requested, jobs, engine, device)
        check_parts(study, folder)
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
    results = {**summarize_study(study, choices), "cost": _cost(folder), "command": command}
    if fabric.is_global_zero:
        write_json(folder / "results.json", results)
    return results


def with_new_defaults(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without its seed, as an older dmlkit recorded it, with the defaults of keys that are new since."""
    try:
        return Recipe.model_validate_json(json.dumps(recipe)).model_dump(mode="json", exclude={"seed"})
    except ValidationError:  # a key has gone: the difference tells which
        return recipe


def open_study(study: Study, folder: Path, fabric: Fabric, command: str) -> None:
    """Begin a study in a folder, or find it there again; its seeds may have grown and its claim been reworded.

    Raises:
        UserError: the folder holds something else, or a study with other runs.
    """
    path = folder / "study.json"
    record = study.record()
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))["study"]
        kept = record["seeds"][: len(stored["seeds"])]
        same = {name: stored[name] for name in REWORDED} | {"seeds": kept}
        for recipes in stored["variants"].values():
            recipes.update({label: with_new_defaults(recipe) for label, recipe in recipes.items()})
        changes = list(differences("", stored, {**record, **same}))
        if changes:
            raise UserError(
                f"{folder}: the study has changed since it began ({'; '.join(changes)}); undo that, or start anew "
                "with another --output"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists and is not a study; choose another --output")
    fabric.barrier()  # all ranks have looked before the first one writes
    if fabric.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"study": record, "command": command})


def check_parts(study: Study, folder: Path) -> None:
    """Build the parts of every variant that has no run yet: what does not fit is told before anything trains.

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
        progress.finish({name: figures[name] for name in self.study.config.reported()})
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
    summaries = [json.loads(file.read_text(encoding="utf-8")) for file in _summaries(path)]
    return fmean(summary["best"]["validation"][summary["selected_by"]] for summary in summaries)


def _summaries(path: Path) -> list[Path]:
    return sorted(path.rglob("summary.json"))


def _cost(folder: Path) -> dict[str, Any]:
    """How many models were trained, for how long, and on what."""
    summaries = _summaries(folder / "runs")
    environments = [json.loads((file.parent / "environment.json").read_text("utf-8")) for file in summaries]
    return {
        "models": len(summaries),
        "seconds": round(sum(json.loads(file.read_text("utf-8"))["seconds"] for file in summaries), 1),
        "on": sorted({_device(environment) for environment in environments}),
    }


def _device(environment: dict[str, Any]) -> str:
    where = environment["gpu"] or f"{environment['threads']} CPU thread(s)"
    return f"{where}, torch {environment['packages']['torch']}, dmlkit {environment['dmlkit']}"
