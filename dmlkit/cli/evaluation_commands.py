"""What ``eval``, ``compare`` and ``protocol`` do between reading their arguments and printing their result."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console

from dmlkit.cli.console import print_table
from dmlkit.cli.progress import TrainingProgress, image_progress
from dmlkit.datasets.base import Split
from dmlkit.datasets.folder import FolderConfig
from dmlkit.distributed.launch import start_fabric
from dmlkit.distributed.stopping import STOPPED, TrainingStoppedError
from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.evaluation.arrays import evaluate_arrays, evaluate_folder
from dmlkit.evaluation.compare import compare_runs, evaluation_path
from dmlkit.evaluation.evaluate import evaluate
from dmlkit.evaluation.result import Evaluation, save_evaluation
from dmlkit.evaluation.tables import as_latex, as_markdown, comparison_rows, metric_rows, protocol_rows
from dmlkit.files.atomic import atomic_write
from dmlkit.loading.cache import images_of_split
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.ranking.rankings import Ties
from dmlkit.metrics.scoring.names import metric_configs
from dmlkit.metrics.scoring.retrieval import DEFAULT_METRICS
from dmlkit.recipe.file import dump_recipe, parse_recipe, read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder import CheckpointName, RunFolder
from dmlkit.study.protocol import ProtocolName, run_protocol


@dataclass(frozen=True)
class Scoring:
    """How to score and what to print, whatever is evaluated."""

    metrics: list[str]
    ties: Ties
    per_class: Path | None
    as_json: bool

    def tell(self, evaluation: Evaluation, report: dict[str, Any], title: str, console: Console) -> None:
        """Print a report, and write the table of classes where one is asked for."""
        if self.per_class is not None:
            evaluation.save_classes(self.per_class)
        if self.as_json:
            typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
            return
        title = f"{title}: {report['queries']} queries, {report['classes']} classes"
        print_table(metric_rows(report, evaluation.scores.definitions), console, title)
        for score in report["worst_classes"][:3]:
            figure = list(score["metrics"].items())[-1]
            _say(console, f"worst: {score['class']}, {figure[0]} {figure[1]:.4f} over {score['queries']} queries")
        for pair in report["confusions"][:3]:
            times = f"{pair['queries']} queries, {pair['share']:.0%} of its own"
            _say(console, f"confused: {pair['class']} taken for {pair['taken_for']} by {times}")
        for note in report["notes"]:
            _say(console, f"note: {note}")
        if report["skipped"]:
            _say(console, f"{len(report['skipped'])} images could not be read and were left out")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def evaluate_run_command(
    path: Path,
    split: Split | None,
    checkpoint: CheckpointName | None,
    dataset_root: Path | None,
    overrides: list[str],
    device: str,
    scoring: Scoring,
) -> None:
    """``dmlkit eval RUN``."""
    run = RunFolder(path)
    fabric = start_fabric(device)
    trained = load_model(run, fabric, checkpoint)
    recipe = parse_recipe(dump_recipe(trained.recipe), str(run.recipe_path), overrides)
    recipe = _with_metrics(recipe, scoring.metrics)
    if dataset_root is not None:
        folder = FolderConfig(root=str(dataset_root), on_bad_image=recipe.dataset.on_bad_image)
        recipe = recipe.model_copy(update={"dataset": folder})
    split = split or ("all" if dataset_root is not None else "test")
    dataset = images_of_split(recipe.dataset, split)
    console = Console(stderr=scoring.as_json)
    console.quiet = not fabric.is_global_zero
    with image_progress(console, f"embedding {split}", len(dataset)) as advance:
        evaluation = evaluate(fabric, trained.model, dataset, recipe, split=split, advance=advance, ties=scoring.ties)
    if not fabric.is_global_zero:
        return
    name = split if dataset_root is None else f"{dataset_root.resolve().name}-{split}"
    target = evaluation_path(path, name, trained.checkpoint)
    described = recipe.dataset.model_dump(mode="json")
    report = save_evaluation(target, evaluation, trained, split, described, ties=scoring.ties)
    title = f"{split} split of {recipe.dataset.name}, {trained.checkpoint} checkpoint, epoch {trained.epoch}"
    scoring.tell(evaluation, report, title, console)
    if not scoring.as_json:
        _say(console, f"written to {target}")


def _with_metrics(recipe: Recipe, names: list[str]) -> Recipe:
    return recipe.model_copy(update={"metrics": _configs(names)}) if names else recipe


def _configs(names: list[str]) -> tuple[MetricConfig, ...]:
    try:
        return tuple(metric_configs(names))
    except ValueError as error:
        raise UserError(f"--metric: {str(error).removeprefix('metrics: ')}") from None


def evaluate_folder_command(path: Path, scoring: Scoring) -> None:
    """``dmlkit eval EMBEDDINGS``."""
    metrics = _configs(scoring.metrics or list(DEFAULT_METRICS))
    evaluation = evaluate_folder(EmbeddingFolder(path), metrics, scoring.ties)
    _tell_of_arrays(evaluation, str(path), scoring)


def evaluate_arrays_command(
    embeddings: Path, labels: Path, gallery: tuple[Path, Path] | None, manifold: str, scoring: Scoring
) -> None:
    """``dmlkit eval --embeddings X.npy --labels Y.npy``."""
    metrics = _configs(scoring.metrics or list(DEFAULT_METRICS))
    evaluation = evaluate_arrays(embeddings, labels, gallery, manifold, metrics, scoring.ties)
    _tell_of_arrays(evaluation, str(embeddings), scoring)


def _tell_of_arrays(evaluation: Evaluation, source: str, scoring: Scoring) -> None:
    report = {**evaluation.figures("all"), **evaluation.details(), "ties": scoring.ties, "source": source}
    scoring.tell(evaluation, report, source, Console())


def compare_command(
    paths: list[Path],
    style: Literal["table", "markdown", "json", "latex"],
    checkpoint: CheckpointName | None,
    device: str,
) -> None:
    """``dmlkit compare``."""
    fabric = start_fabric(device)
    results, differences = compare_runs(paths, fabric, checkpoint=checkpoint)
    if not fabric.is_global_zero:
        return
    console = Console(stderr=style != "table")
    if style == "json":
        runs: list[dict[str, Any]] = [{"run": result.name, **result.report} for result in results]
        for run, changes in zip(runs[1:], differences, strict=True):
            run["difference_to_first"] = {name: change.as_dict() for name, change in changes.items()}
        typer.echo(json.dumps({"runs": runs}, indent=2, ensure_ascii=False))
    elif style == "table":
        print_table(comparison_rows(results, differences), console)
    else:
        rows = comparison_rows(results, differences)
        typer.echo(as_markdown(rows) if style == "markdown" else as_latex(rows))
    for result, changes in zip(results[1:], differences, strict=True):
        if not changes:
            _say(console, f"note: {result.name} was tested on other images than {results[0].name}: no differences")


def protocol_command(
    name: ProtocolName, path: Path, output: Path, repeats: int, overrides: list[str], device: str, as_json: bool
) -> None:
    """``dmlkit protocol``."""
    recipe = read_recipe(path, overrides)
    fabric = start_fabric(device, recipe.training.precision)
    console = Console(stderr=as_json)
    console.quiet = not fabric.is_global_zero

    def progress(folder: str, run: Recipe) -> TrainingProgress:
        _say(console, f"{folder}  seed {run.seed}")
        return TrainingProgress(console, run.training.epochs)

    try:
        results = run_protocol(name, recipe, output, fabric, repeats=repeats, progress=progress)
    except TrainingStoppedError as stopped:
        _say(console, f"{stopped}; continue with the same command")
        raise typer.Exit(STOPPED) from None
    if not fabric.is_global_zero:
        return
    rows = protocol_rows(results)
    with atomic_write(output / "results.md") as partial:
        partial.write_text(as_markdown(rows) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    print_table(rows, console, f"{name}: {path.stem}, {repeats} repeats")
    _say(console, f"written to {output / 'results.md'} and results.json; the runs are beside them")
