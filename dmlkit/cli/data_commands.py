"""What ``dmlkit data`` does between reading its arguments and printing its result."""

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from dmlkit.cli.progress import image_progress
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.table import TableConfig
from dmlkit.errors import UserError
from dmlkit.loading.cache_writer import images_to_cache, write_cache
from dmlkit.loading.check import Report, check_files, check_images
from dmlkit.recipe.file import read_recipe

FAULTY = 1  # the exit code of data that was checked and has faults


def check_command(target: Path, dataset: str | None, overrides: list[str]) -> None:
    """``dmlkit data check``."""
    config = dataset_of(target, dataset, overrides)
    console = Console()
    listing, report = check_files(config)
    with image_progress(console, "checking images", len(listing.labels)) as advance:
        check_images(listing, report, is_published=config.published is not None, advance=advance)
    print_report(report, f"{config.name}: {target}", console)
    if not report.sound:
        raise typer.Exit(FAULTY)


def dataset_of(target: Path, dataset: str | None, overrides: list[str]) -> DatasetConfig:
    """The dataset of a recipe, or the one that a folder or table holds.

    Raises:
        UserError: there is no such folder, with where to get each benchmark.
    """
    if target.suffix in (".yaml", ".yml"):
        return read_recipe(target, overrides).dataset
    if overrides:
        raise UserError("--set changes a recipe; give one instead of a folder")
    published = {name: kind.published for name, kind in DatasetConfig.variants.items() if kind.published is not None}
    if dataset is not None:
        if dataset not in (*published, "folder"):
            raise UserError(f"--dataset: got {dataset!r}, expected {', '.join([*sorted(published), 'folder'])}")
        return DatasetConfig.variants[dataset](root=str(target))
    if target.suffix.lower() in (".csv", ".parquet"):
        return TableConfig(file=str(target))
    if not target.is_dir():
        lines = [line for benchmark in published.values() for line in benchmark.instructions(target)]
        raise UserError("\n".join([f"{target}: no such folder", *lines]))
    signs = {sign: name for name, benchmark in published.items() for sign in benchmark.signs}
    name = next((name for sign, name in signs.items() if (target / sign).exists()), "folder")
    return DatasetConfig.variants[name](root=str(target))


def print_report(report: Report, title: str, console: Console) -> None:
    """The table, then every fault and every note on a line of its own."""
    table = Table("check", "expected", "found", "verdict", title=title, title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for row in report.rows:
        table.add_row(*row, style="red" if row.verdict == "fault" else None)
    console.print(table)
    for kind, lines in (("fault", report.faults), ("note", report.notes)):
        for line in lines:
            console.print(f"{kind}: {line}", style="red" if kind == "fault" else None, highlight=False, soft_wrap=True)
    count = len(report.faults) + sum(row.verdict == "fault" for row in report.rows)
    console.print("sound" if report.sound else f"not sound: {count} faults", highlight=False)


def cache_command(path: Path, output: Path, overrides: list[str], overwrite: bool) -> None:
    """``dmlkit data cache``."""
    recipe = read_recipe(path, overrides)
    dataset = images_to_cache(recipe)
    console = Console()
    with image_progress(console, "caching images", len(dataset)) as advance:
        manifest = write_cache(recipe, dataset, output, overwrite=overwrite, advance=advance)
    size = f"{manifest['images']} images, {manifest['bytes'] / 1e9:.2f} GB"
    console.print(
        f"{size}, resized to {manifest['resizing']}, in {output}",
        highlight=False,
        soft_wrap=True,
    )
    if manifest["skipped"]:
        console.print(f"{len(manifest['skipped'])} images could not be read; {output / 'manifest.json'} lists them")
    console.print(f"use it with --set dataset.cache={output}", highlight=False, soft_wrap=True)
