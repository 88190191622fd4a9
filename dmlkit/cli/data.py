"""``dmlkit data``: check datasets before training."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from dmlkit.cli.console import bars, cells, counted, say, show_table
from dmlkit.cli.option_groups import TableOptions
from dmlkit.cli.options import APPS, Set, Writes, command, plain_device
from dmlkit.errors import UserError, merged
from dmlkit.files.escape import command_word, printable
from dmlkit.files.outputs import check_file
from dmlkit.files.source import EXPECTED_DATA, require_dataset, require_run

APPS[__name__] = typer.Typer(
    name="data", no_args_is_help=True, help="Check a dataset on disk, or convert it to a table."
)
DATA_ERROR = 1  # exit code of check if it finds errors in the data


@command(
    "dmlkit data check recipe.yaml",
    "dmlkit data check data/ --dataset cub200",
    "dmlkit data check data/ --run runs/demo --threshold 0.95",
)
def check(
    target: Annotated[Path, "RECIPE|ROOT|TABLE", "Recipe, folder of a dataset, or table of images and labels."],
    /,
    columns: TableOptions,
    dataset: Annotated[str | None, "NAME", "Dataset in ROOT, e.g. cub200. Default: recognized by its files."] = None,
    overrides: Set = None,
    run: Annotated[
        Path | None,
        "RUN",
        "Also report near-duplicates in two splits, found by this run; needs --threshold.",
        require_run,
    ] = None,
    threshold: Annotated[float | None, "SIMILARITY", "With --run: minimum similarity of near-duplicates."] = None,
    every: Annotated[bool, "Print every error and note, not one line per kind."] = False,
    device: Annotated[
        str | None, "DEVICE", "With --run: auto, cpu, cuda, cuda:N or mps. Default: auto.", plain_device
    ] = None,
) -> None:
    """Decode every image; report faults, duplicates and classes in two splits; compare numbers with published ones.

    The exit code is 1 if the data have errors.
    """
    if (run is None) != (threshold is None) or (run is None and device is not None):
        needs = "--run RUN needs --threshold SIMILARITY, and --threshold and --device need --run RUN"
        raise UserError(f"data check: {needs}")

    from dmlkit.files.readers.base import reader_of
    from dmlkit.recipe.overrides import is_recipe, read_tree

    if is_recipe(target) and (not target.exists() or reader_of(target) is None):
        read_tree(target)
    elif dataset is None:  # a missing folder of a benchmark gets the advice where to download it
        require_dataset(target, EXPECTED_DATA)

    from dmlkit.loading.check import check_files, check_images, dataset_at

    config = dataset_at(target, dataset, overrides or [], columns=columns.columns(), root=columns.root)
    listing, findings = check_files(config)
    with bars()("checking images", len(listing.labels)) as advance:
        check_images(config, listing, findings, advance)
    if run is not None and threshold is not None:
        from dmlkit.identify.duplicates import check_leaks

        is_published = config.published is not None
        check_leaks(listing, findings, run, threshold, is_published=is_published, device=device or "auto", bar=bars())
    title = Text(printable(f"{config.name}: {target}"))
    table = Table("check", "expected", "found", "verdict", title=title, title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for row in findings.rows:
        is_error = row.verdict == "fault"
        table.add_row(*cells([*row[:3], "error" if is_error else row.verdict]), style="red" if is_error else None)
    show_table(table)
    for kind, lines in (("error", findings.faults), ("note", findings.notes)):
        for line in lines if every else merged(lines):
            say(f"{kind}: {line}", style="red" if kind == "error" else "")
    say(f"{counted(findings.errors, 'error')} found" if findings.errors else "no errors found")
    if findings.errors:
        raise typer.Exit(DATA_ERROR)


@command("dmlkit data convert annotations.json -o table.csv", "dmlkit data convert photos.xlsx -o t.csv")
def convert(
    source: Annotated[Path, "TABLE|FOLDER", "Table or annotations, or folder of labeled images.", require_dataset],
    /,
    columns: TableOptions,
    output: Annotated[Path, "FILE", "Table to write (.csv).", Writes(check_file, (".csv",))],
) -> None:
    """Write the one table that any list of images is read into: path, label, group, box, time, place and others.

    Images that are stored in Parquet or Arrow files are saved in a folder next to the table.
    """
    from dmlkit.files.image_table import lists_images, read_images, write_images

    named, saving = columns.columns(), nullcontext()
    if columns.root is None and (source.is_dir() or source.suffix.lower() == ".parquet"):
        from dmlkit.datasets.hf import saved_images

        saving = saved_images(source, named, output.with_suffix(""))
    with saving as listed:
        if listed is None and (lists_images(source, named) or not source.is_dir()):
            listed = read_images(source, columns.root, named, ("path",))
        if listed is None:
            from dmlkit.vectors.images import folder_table

            listed = folder_table(source)
        root = write_images(listed, output)
    for line in merged([*listed.notes, *(f"left out: {fault}" for fault in listed.faults)]):
        say(f"note: {line}")
    say(f"wrote {output}: {counted(len(listed), 'row')} of {', '.join(listed.table.column_names)}")
    if root == listed.root and root != output.parent:
        say(f"its paths are relative to {root}: read it with --root {command_word(root)}")
