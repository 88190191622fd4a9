"""Options that several commands share, declared once."""

from pathlib import Path
from typing import Annotated, Literal

import typer

SplitName = Literal["train", "validation", "test", "all"]

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe, e.g. loss.margin=0.2. Repeatable."),
]
SetDataset = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of a run's dataset, e.g. dataset.root=PATH. Repeatable."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
RunDevice = Annotated[
    str | None,
    typer.Option("--device", help="Of a run: auto (the default), cpu, cuda, cuda:N or mps.", show_default=False),
]
RunSplit = Annotated[
    SplitName | None, typer.Option("--split", help="Of a run's dataset; test by default.", show_default=False)
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Build everything, say what would run, write nothing.")]


def load_plugins(files: list[Path] | None) -> list[Path] | None:
    """Load the files of ``--plugin``, before the command reads anything that may name their members."""
    if files:
        from importlib import import_module

        from dmlkit.recipe.plugin import load_file

        import_module("dmlkit.recipe.schema")  # loads what is installed, whose names a file must not take
        for file in files:
            load_file(file)
    return files


Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="Load a Python file whose losses, datasets, ... recipes may name. Repeatable.",
        callback=load_plugins,
        show_default=False,
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that train wrote.", show_default=False)]
SourcePath = Annotated[
    Path, typer.Argument(metavar="RUN|EMBEDDINGS", help="Folder that train or embed wrote.", show_default=False)
]
RecipePath = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="YAML recipe, or the name of one of dmlkit's.", show_default=False)
]
Checkpoint = Annotated[
    Literal["best", "last"] | None,
    typer.Option(help="Which weights; by default the best on validation classes, else the last."),
]
