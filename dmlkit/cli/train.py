"""``dmlkit train`` and ``dmlkit final``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmlkit.cli.console import Output, bars, counted, ranks_of, say, say_metrics, say_prose
from dmlkit.cli.options import Device, DryRun, RecipePath, RunPath, Set, SetDataset, command, stem_of
from dmlkit.errors import UserError
from dmlkit.files.escape import command_word
from dmlkit.files.source import require_review

if TYPE_CHECKING:
    from torch import nn

    from dmlkit.datasets.files.dataset import Dataset
    from dmlkit.recipe.schema import Recipe
    from dmlkit.run_folder.documents import Basis, Summary
    from dmlkit.run_folder.folder import RunFolder

Resume = Annotated[bool, "Resume the run in the folder."]
Overwrite = Annotated[bool, "Replace the run in the folder and everything computed with it."]
KEPT = ("levels", "on_bad_image")  # keys of a recipe's dataset that hold for any images, also those of a review


@command(
    "dmlkit train glyphs/proxy_anchor",
    "dmlkit train recipe.yaml --set training.epochs=3 -o runs/short",
    "dmlkit train start/frozen_lite0 --review reviews/june -o runs/june",
)
def train(
    recipe: RecipePath,
    /,
    output: Annotated[
        Path | None, "FOLDER", "Run folder to write. Default: runs/ and the name of the recipe, or of the review."
    ] = None,
    overrides: Set = None,
    review: Annotated[
        Path | None,
        "FOLDER",
        "Train on the labels of this review and of its gallery, instead of the recipe's dataset, and compare with the "
        "gallery's model on answers that are held out.",
        require_review,
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    device: Device = "auto",
) -> None:
    """Train a recipe and write a run folder: weights, curves, metrics on unseen classes."""
    from dmlkit.recipe.overrides import read_tree

    if review is not None and dry_run:
        raise UserError(f"--dry-run: does not apply with --review {review}, whose table is written first")
    read_tree(recipe)  # a wrong path is refused before torch is imported
    from dmlkit.run_folder.folder import RunFolder, check_one_way

    folder = output or Path("runs") / stem_of(review or recipe)
    check_one_way(resume=resume, overwrite=overwrite)
    if not dry_run:
        RunFolder(folder).check_startable(resume=resume, overwrite=overwrite)

    from dmlkit.recipe.file import read_recipe

    if review is not None:
        from dmlkit.distributed.launch import is_first_rank

        Output.console.quiet = not is_first_rank()
        kept = kept_keys(recipe, overrides or [])
        overrides = [table_of_review(review, folder, kept, resume=resume), *(overrides or [])]
    resolved = read_recipe(recipe, overrides or [])
    if dry_run:
        print_experiment(resolved, RunFolder(folder), device, resume=resume)
        return
    is_compared = review is not None and has_held_out(review, resolved)
    train_and_print(resolved, folder, device, resume=resume, overwrite=overwrite, has_next=review is None)
    if review is not None:
        print_comparison(review, folder, device, is_compared=is_compared)


@command("dmlkit final runs/demo")
def final(
    run: RunPath,
    /,
    output: Annotated[Path | None, "FOLDER", "Run folder to write. Default: RUN-final."] = None,
    overrides: SetDataset = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    device: Device = "auto",
) -> None:
    """Train the recipe of a finished run on every class, for as many epochs as validation chose.

    No class is left to test this model on: report the results of RUN for it.
    """
    from dmlkit.run_folder.folder import RunFolder, final_place

    output = final_place(run, output)
    RunFolder(output).check_startable(resume=resume, overwrite=overwrite)

    from dmlkit.training.summary import final_recipe

    recipe, basis = final_recipe(run, overrides or [])
    train_and_print(recipe, output, device, resume=resume, overwrite=overwrite, basis=basis)


def kept_keys(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the keys `KEPT` of a recipe's dataset with their values."""
    from dmlkit.recipe.overrides import apply_overrides, read_tree

    tree = read_tree(recipe)
    apply_overrides(tree, overrides)
    dataset: Any = tree.data.get("dataset") if isinstance(tree.data, dict) else None
    return {key: dataset[key] for key in KEPT if key in dataset} if isinstance(dataset, dict) else {}


def table_of_review(review: Path, run: Path, kept: dict[str, Any], *, resume: bool) -> str:
    """Return the dataset of a run that is trained on a review, as an override; its table is written, unless it resumes.

    A run that resumes keeps its table, also if there are more answers since, and its own values of `KEPT`.
    """
    from dmlkit.datasets.table import TableConfig
    from dmlkit.review.retraining import override_of, write_training_table
    from dmlkit.run_folder.folder import RunFolder

    if resume and RunFolder(run).holds_run():
        dataset = RunFolder(run).recipe().dataset
        if not isinstance(dataset, TableConfig):
            raise UserError(f"--review {review}: {run} was not trained on a table; leave out this option")
        return override_of(Path(dataset.file), dataset.root, dataset.model_dump(include=set(KEPT)))
    levels = kept.get("levels")
    levels = list(map(str, levels)) if isinstance(levels, list) else []
    table = write_training_table(review, run.name, levels=levels, bar=bars())
    say(f"{counted(table.images, 'image')} to train on: {table.file}; {counted(table.held_out, 'answer')} held out")
    if table.left_out:
        say(f"{counted(table.left_out, 'image')} left out: the file is missing or has changed, or the image is a box")
    return override_of(table.file, table.root, kept)


def has_held_out(review: Path, recipe: "Recipe") -> bool:
    """Return whether answers are held out to compare the new model with the gallery's; if not, print that."""
    from dmlkit.review.folder import ReviewFolder
    from dmlkit.review.retraining import NONE_HELD_OUT, held_out_answers

    if held_out_answers(ReviewFolder(review), recipe.dataset.build(recipe.dataset.default_split)):
        return True
    say_prose(f"{review}: {NONE_HELD_OUT}; the model is trained and not compared")
    return False


def print_comparison(review: Path, run: Path, device: str, *, is_compared: bool) -> None:
    """Compare a run with the model of the review's gallery, if answers are held out, and print whether it pays."""
    from dmlkit.review.retraining import compare_on_answers
    from dmlkit.run_folder.folder import RunFolder

    ranks = ranks_of(device)
    if is_compared:
        say_prose(compare_on_answers(review, RunFolder(run), ranks, bar=bars()).line(str(run)))
    table = RunFolder(run).recipe().dataset.model_dump()
    images = command_word(table["file"])
    images += "" if table["root"] is None else f" --root {command_word(table['root'])}"
    say(f"next: dmlkit gallery create {command_word(run)} {images} -o GALLERY")


def train_and_print(
    recipe: "Recipe",
    output: Path,
    device: str,
    *,
    resume: bool,
    overwrite: bool,
    basis: "Basis | None" = None,
    has_next: bool = True,
) -> None:
    """Train a recipe and print the epochs, the figures of the checkpoints and the costs; see `dmlkit.train`."""
    from dmlkit.cli.progress import training_progress
    from dmlkit.distributed.stopping import STOPPED, TrainingStoppedError
    from dmlkit.run_folder.folder import RunFolder
    from dmlkit.training.train import train as train_recipe

    ranks = ranks_of(device, recipe.training.precision)
    environment = RunFolder(output).environment_path  # a new run writes it, and takes the place of an old one with it
    before = environment.exists() and environment.stat().st_mtime_ns
    try:
        with training_progress(recipe, output if resume else None) as progress:
            summary = train_recipe(
                recipe, output, device=ranks, progress=progress, resume=resume, overwrite=overwrite, basis=basis
            )
    except (TrainingStoppedError, KeyboardInterrupt) as stopped:  # the latter before the first step
        way = f"to resume, rerun the same command with --resume{' instead of --overwrite' if overwrite else ''}"
        if overwrite and before == (environment.exists() and environment.stat().st_mtime_ns):
            way = "nothing was replaced: rerun the same command"
        say(f"{str(stopped) or 'stopped'}; {way}")
        raise typer.Exit(STOPPED) from None
    print_figures(summary, recipe.training.select_by)
    for line in filter(None, costs_of(summary, recipe)):
        say_prose(line)
    if summary.skipped_images:
        say(f"{counted(len(summary.skipped_images), 'image')} could not be read; summary.json lists them")
    say(f"run folder: {output}")
    if not has_next:
        return
    place = command_word(output)
    use = f"eval {place}" if summary.last.test else f"gallery create {place} IMAGES -o GALLERY"
    say(f"next: dmlkit {use}")


def print_figures(summary: "Summary", metric: str) -> None:
    """Print the test metrics of the checkpoints, and first of all that training lost, if validation says so."""
    from dmlkit.evaluation.compare import gain_message
    from dmlkit.run_folder.documents import technique_name

    if summary.loss_message:
        say_prose(summary.loss_message)
    for name, checkpoint in (("last", summary.last), ("best", summary.best)):
        if checkpoint and checkpoint.test:
            say_metrics(f"{name} (epoch {checkpoint.epoch})  test", checkpoint.test)
    if chosen := summary.techniques:
        name = technique_name(chosen.tta, chosen.rerank)
        known = [f"{name} {value:.3f}" for name, value in (chosen.validation or {}).items()]
        why = f"{metric} on validation: {', '.join(known)}" if known else "without validation classes"
        say_prose(f"at test time: {name} ({why})")
        if chosen.test and (chosen.tta or chosen.rerank):
            say_metrics(f"{name}  test", chosen.test)
    if not summary.last.test:
        figures = f"; {summary.basis.line()}" if summary.basis else ""
        say_prose(f"trained on every class, so it has no test metrics of its own{figures}")
    if summary.pretrained and summary.chosen.test:
        say_metrics("pretrained  test", summary.pretrained.test)
        change, units = summary.pretrained.difference.get(metric), f"{summary.pretrained.classes} classes"
        ends = (change.low, change.high) if change and change.low is not None and change.high is not None else None
        values = summary.chosen.test[metric], summary.pretrained.test[metric]
        say_prose(gain_message(metric, *values, ends, units, epoch=summary.chosen.epoch, epochs=summary.last.epoch))


def costs_of(summary: "Summary", recipe: "Recipe") -> tuple[str, str]:
    """Return the time and memory of a run, as far as known; and a license of its weights that has conditions."""
    from dmlkit.backbones.weights import FREE, UNKNOWN, license_words

    time, memory, name = summary.seconds_per_epoch, summary.peak_memory_bytes, recipe.backbone.license()
    parts = [] if time is None else [f"{time:,.1f} s per epoch"]
    parts += [] if memory is None else [f"at most {memory / 1e9:.2f} GB of memory"]
    limits = "" if name in (None, UNKNOWN, *FREE) else f"its pretrained weights have the {license_words(name)}"
    return ", ".join(parts), limits


def print_experiment(recipe: "Recipe", run: "RunFolder", device: str, *, resume: bool) -> None:
    """Print the resolved recipe, and the sizes of data, model, loss and stored features (``--dry-run``)."""
    from dmlkit.backbones.weights import license_words
    from dmlkit.recipe.file import dump_recipe
    from dmlkit.training.data import check_disk, feature_jobs, keeps_features
    from dmlkit.training.experiment import assemble

    ranks, experiment = ranks_of(device, recipe.training.precision), assemble(recipe)
    validation = experiment.validation
    together = f"each of {recipe.training.accumulate} " if recipe.training.accumulate > 1 else ""
    sizes = {
        "training": size_of(experiment.train),
        "validation": size_of(validation) if validation else "none",
        "steps": f"{experiment.steps:,} per epoch, {counted(recipe.training.trained_epochs, 'epoch')}, "
        f"{together}batches of {counted(experiment.sampler.batch_size, 'image')}",
        "model": parameters_of(experiment.model),
        "loss": parameters_of(experiment.objective),
    }
    if name := recipe.backbone.license():
        sizes["weights"] = license_words(name)
    if needed := check_disk(recipe, feature_jobs(experiment, ranks), run, resume=resume):
        until = "" if keeps_features(recipe) else " until training ends"
        sizes["on disk"] = f"{needed / 1e6:,.3g} MB of stored features{until}"
    for line in dump_recipe(recipe).splitlines():
        say(line)
    for name, text in sizes.items():
        say(f"{name + ':':12}{text}")
    say("dry run: nothing was trained or written")


def parameters_of(module: "nn.Module") -> str:
    """Return the number of parameters, and that of the trained ones if some are frozen."""
    count = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    return f"{count:,} parameters" + (f", of which {trained:,} are trained" if trained < count else "")


def size_of(dataset: "Dataset") -> str:
    """Return the numbers of images and classes."""
    return f"{counted(len(dataset), 'image')} of {counted(len(dataset.class_names), 'class', 'classes')}"
