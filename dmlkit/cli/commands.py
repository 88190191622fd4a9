"""What each command does between reading its arguments and printing its result."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dmlkit.cli.progress import TrainingProgress, format_metrics, image_progress
from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import lost_ranks, start_fabric
from dmlkit.distributed.stopping import STOPPED, TrainingStoppedError
from dmlkit.embedding.embed import Engine, choose_engine, embed
from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.images import dataset_of
from dmlkit.embedding.job import EmbedJob, PartEmbedder
from dmlkit.embedding.ray import ray_compute
from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.errors import UserError
from dmlkit.export.embeddings import FILE_NAMES as EMBEDDING_FILES
from dmlkit.export.embeddings import export_embeddings
from dmlkit.export.model import FILE_NAMES as MODEL_FILES
from dmlkit.export.model import ModelFormat, export_model
from dmlkit.recipe.file import dump_recipe, first_line, read_recipe
from dmlkit.recipe.headers import find_recipes
from dmlkit.recipe.schema import FAMILIES, Recipe
from dmlkit.run_folder import CheckpointName, RunFolder
from dmlkit.training.experiment import assemble
from dmlkit.training.train import train


def train_command(
    path: Path, output: Path, overrides: list[str], device: str, resume: bool, overwrite: bool, dry_run: bool
) -> None:
    """``dmlkit train``."""
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it; give one of them")
    recipe = read_recipe(path, overrides)
    console = Console()
    if dry_run:
        describe_experiment(recipe, console)
        return
    fabric = start_fabric(device, recipe.training.precision)
    console.quiet = not fabric.is_global_zero
    progress = TrainingProgress(console, recipe.training.epochs)
    try:
        with progress:
            summary = train(recipe, output, fabric, progress, resume=resume, overwrite=overwrite)
    except TrainingStoppedError as stopped:
        console.print(f"{stopped}; continue with the same command and --resume", highlight=False)
        raise typer.Exit(STOPPED) from None
    except RuntimeError as error:
        if fabric.world_size == 1 or not lost_ranks(error):
            raise
        raise UserError(f"another rank ended ({error}); go on with the same command and --resume") from error
    for name in ("last", "best"):
        if summary[name]:
            console.print(
                f"{name} (epoch {summary[name]['epoch']})  test {format_metrics(summary[name]['test'])}",
                highlight=False,
                soft_wrap=True,
            )
    if summary["skipped_images"]:
        console.print(f"{len(summary['skipped_images'])} images could not be read; summary.json lists them")
    console.print(f"run folder: {output}", highlight=False, soft_wrap=True)


def describe_experiment(recipe: Recipe, console: Console) -> None:
    """``dmlkit train --dry-run``: the resolved recipe and the size of everything."""
    experiment = assemble(recipe)
    sizes = {
        "training": f"{len(experiment.train)} images of {len(experiment.train.class_names)} classes",
        "validation": f"{len(experiment.validation)} images of {len(experiment.validation.class_names)} classes"
        if experiment.validation
        else "none",
        "steps": f"{len(experiment.sampler)} an epoch, {recipe.training.epochs} epochs, "
        f"batches of {experiment.sampler.batch_size} images",
        "model": f"{sum(parameter.numel() for parameter in experiment.model.parameters()):,} parameters",
        "loss": f"{sum(parameter.numel() for parameter in experiment.objective.parameters()):,} parameters",
    }
    console.print(dump_recipe(recipe), highlight=False, markup=False, soft_wrap=True)
    for name, text in sizes.items():
        console.print(f"{name + ':':12}{text}", highlight=False)
    console.print("dry run: nothing was trained or written")


def embed_command(
    path: Path,
    images: Path | None,
    split: Split | None,
    output: Path | None,
    checkpoint: CheckpointName | None,
    skip_bad_images: bool,
    device: str,
    engine: Engine | None = None,
) -> None:
    """``dmlkit embed``."""
    if (images is None) == (split is None):
        raise UserError("give either a folder of IMAGES or --split, e.g. dmlkit embed runs/demo --split test")
    engine = choose_engine(engine)
    fabric = start_fabric("cpu" if engine == "ray" else device)  # Ray's workers, not this process, need the device
    trained = load_model(RunFolder(path), fabric, checkpoint)
    dataset, labelled = dataset_of(images, split or "test", trained.recipe)
    job = EmbedJob(
        dataset,
        source=f"{trained.recipe.dataset.name}:{split}" if images is None else str(images),
        labelled=labelled,
        output=output or path / "embeddings" / (images.resolve().name if images else str(split)),
        skip_bad_images=skip_bad_images or trained.recipe.dataset.on_bad_image == "skip",
    )
    if engine == "ray":
        compute = ray_compute(job, path, trained.checkpoint, device)
    else:
        compute = PartEmbedder(job, trained, fabric, workers=trained.recipe.training.workers)
    console = Console(quiet=not fabric.is_global_zero)
    try:
        with image_progress(console, "embedding", len(dataset)) as advance:
            manifest = embed(
                job, trained, fabric, compute, advance=advance, say=partial(console.print, highlight=False)
            )
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on with the parts that are complete", highlight=False)
        raise typer.Exit(STOPPED) from None
    if manifest is None:
        return
    console.print(
        f"{manifest['count']} embeddings of {manifest['dim']} dimensions in {job.output}",
        highlight=False,
        soft_wrap=True,
    )
    if manifest["skipped"]:
        console.print(f"{len(manifest['skipped'])} images could not be read; manifest.json lists them")


def export_command(
    source: Path,
    format: Literal["safetensors", "onnx", "torch-export", "faiss", "parquet", "npz", "tensorboard"],  # noqa: A002
    output: Path | None,
    checkpoint: CheckpointName | None,
) -> None:
    """``dmlkit export``."""
    console = Console()
    if format in get_args(ModelFormat):
        if (source / "manifest.json").exists():
            raise UserError(f"{source}: holds embeddings; --format {format} exports the model of a run")
        fabric = start_fabric("cpu")
        trained: TrainedModel = load_model(RunFolder(source), fabric, checkpoint)
        output = output or source / "exports" / MODEL_FILES[format]  # type: ignore[index]
        manifest = export_model(trained, format, output)  # type: ignore[arg-type]
        parity = manifest["parity"]
        console.print(
            f"{output}: agrees with the run on {parity['images']} images to {parity['largest_difference']:.0e}",
            highlight=False,
            soft_wrap=True,
        )
        return
    if RunFolder(source).holds_run():
        raise UserError(f"{source}: is a run; --format {format} exports embeddings: run dmlkit embed {source} first")
    folder = EmbeddingFolder(source)
    output = output or source / EMBEDDING_FILES[format]  # type: ignore[index]
    for path in export_embeddings(folder, format, output):  # type: ignore[arg-type]
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def list_command(family: str | None, folder: Path | None) -> None:
    """``dmlkit list``."""
    console = Console()
    if folder is not None and family != "recipes":
        raise UserError("list: --root is a folder of recipes; give it with dmlkit list recipes")
    if family == "recipes":
        list_recipes(folder or Path("recipes"), console)
        return
    if family is not None and family not in FAMILIES:
        raise UserError(f"list: unknown family {family!r}; expected recipes or one of {', '.join(FAMILIES)}")
    if family is None:
        table = Table("family", "members")
        for name, root in FAMILIES.items():
            table.add_row(name, ", ".join(sorted(root.variants)))
        console.print(table)
        console.print("dmlkit list FAMILY shows what each member is and its parameters with their defaults")
        console.print("dmlkit list recipes shows the recipes")
        return
    table = Table("name", "what it is", "parameters", show_lines=True)
    for name, variant in sorted(FAMILIES[family].variants.items()):
        parameters = [
            f"{field}: {'required' if info.is_required() else _default(info)}"
            for field, info in variant.model_fields.items()
            if field != "name"
        ]
        table.add_row(name, first_line(variant), "\n".join(parameters))
    console.print(table)


def list_recipes(folder: Path, console: Console) -> None:
    """``dmlkit list recipes``: one table for each folder of recipes, which is a paper."""
    for paper, headers in find_recipes(folder).items():
        table = Table("recipe", "what it is", "published", title=Text(str(paper)), title_justify="left")
        for header in headers:
            table.add_row(Text(header.path.name), Text(header.summary), Text(header.published))
        console.print(table)


def _default(info: Any) -> str:
    default = info.get_default(call_default_factory=True)
    return json.dumps(default.model_dump(mode="json") if hasattr(default, "model_dump") else default)
