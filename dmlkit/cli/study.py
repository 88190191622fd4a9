"""``dmlkit study`` and ``report``. Heavy imports wait inside the commands."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command(epilog="Example:  dmlkit study recipes/study/mpa.yaml -o runs/study/mpa")
def study(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="YAML study.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Study folder; by default runs/study/ and the study's name.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of every recipe, e.g. training.epochs=3."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = "auto",
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at once, each on a GPU of its own or with its share of the CPU's cores.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, say what would run, write nothing.")
    ] = False,
    debug: Debug = False,  # noqa: ARG001 - main() reads it
) -> None:
    """Hold a claim against runs: variants of a recipe with several seeds; the same command continues it."""
    from dmlkit.cli.study_commands import study_command

    study_command(study, output or Path("runs") / "study" / study.stem, overrides or [], device, jobs, dry_run)


@app.command(epilog="Example:  dmlkit report runs/study/mpa runs/study/mpa_proxies -o docs/results.md")
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="STUDY...", help="Folders that study wrote.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Markdown file to write.", show_default=False)],
    debug: Debug = False,  # noqa: ARG001 - main() reads it
) -> None:
    """Write the results of studies as one document: claims, figures, verdicts and commands."""
    from dmlkit.cli.study_commands import report_command

    report_command(folders, output)
