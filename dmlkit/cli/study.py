"""``dmlkit study`` and ``dmlkit report``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dmlkit.cli.options import Debug, Device, DryRun, Plugins, Set
from dmlkit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.study.definition.config import Study
    from dmlkit.study.findings.results import StudyResults

BUDGET_USED = 75  # EX_TEMPFAIL of sysexits.h: try again

app = typer.Typer()


@app.command(epilog="Example:  dmlkit study recipes/study/mpa.yaml -o runs/study/mpa")
def study(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="YAML study.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Study folder; by default runs/study/ and the study's name.")
    ] = None,
    overrides: Set = None,
    device: Device = "auto",
    jobs: Annotated[
        int, typer.Option(min=1, help="Runs at once, each on a GPU of its own or with its share of the CPU's cores.")
    ] = 1,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where runs train: on this machine, or on a Ray cluster that reaches the study's folder."),
    ] = "local",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Stop after so long, e.g. 90m or 1h30m, with the results of what is complete.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRun = False,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Hold a claim against runs: variants of a recipe with several seeds; the same command continues it."""
    import shlex
    from math import inf

    from rich.console import Console

    from dmlkit.cli.console import counted, say
    from dmlkit.cli.study_progress import RunsProgress
    from dmlkit.distributed.launch import start_fabric
    from dmlkit.distributed.stopping import STOPPED, TrainingStoppedError
    from dmlkit.study.definition.file import read_study
    from dmlkit.study.reports.tables import parse_duration
    from dmlkit.study.runs.run_study import BudgetUsedError, run_study

    console, output = Console(), output or Path("runs") / "study" / study.stem
    seconds = inf if budget is None else parse_duration(budget, "--budget")
    read = read_study(study, overrides or [])
    if dry_run:
        describe(read, output, console)
        return
    precision = read.variants[0].candidates[0].recipe.training.precision
    fabric = start_fabric("cpu") if engine == "ray" else start_fabric(device, precision)  # Ray's tasks need the device
    if (jobs > 1 or engine == "ray") and fabric.world_size > 1:
        asked = "--engine ray" if engine == "ray" else f"--jobs {jobs}"
        raise UserError(f"{asked}: under torchrun all ranks train one run together; start dmlkit without torchrun")
    if jobs > 1 and engine == "ray":
        raise UserError(f"--jobs {jobs}: Ray trains as many runs at once as its cluster has room for; leave --jobs out")
    console.quiet = not fabric.is_global_zero
    sets = [word for override in overrides or [] for word in ("--set", override)]
    files = [word for file in plugins or [] for word in ("--plugin", str(file))]
    command = shlex.join(["dmlkit", "study", str(study), "-o", str(output), *sets, *files])
    progress = RunsProgress(console)
    is_cut_off = False
    try:
        with progress:
            results = run_study(
                read, output, fabric, progress, command, jobs=jobs, engine=engine, device=device, budget=seconds
            )
    except BudgetUsedError as stopped:
        results, is_cut_off = stopped.results, True
    except TrainingStoppedError as stopped:
        done = f"{progress.finished} of {progress.runs} runs are complete"
        where = f"{stopped} ({progress.names()})" if progress.training else f"{stopped}"
        say(console, f"{where}; {done}; continue with the same command")
        raise typer.Exit(STOPPED) from None
    if results and fabric.is_global_zero:
        tell(results, output, console)
    if is_cut_off:
        if not results:
            say(console, "no variant is complete yet, so there are no results")
        done = f"{progress.finished} of {progress.runs} runs done"
        say(console, f"budget used up: {done}; the same command goes on")
        raise typer.Exit(BUDGET_USED)
    if results and results.missing:
        failed = counted(len(results.failed), "run", "runs")
        raise UserError(f"{output}: {failed} failed, as told above; the same command tries again")


def tell(results: "StudyResults", output: Path, console: "Console") -> None:
    """Write the results for people too, and show them."""
    from dmlkit.cli.console import print_table, say
    from dmlkit.study.reports.report import missing_lines, write_section
    from dmlkit.study.reports.tables import figure_rows, verdict_lines

    written = write_section(results, output)
    say(console, results.claim)
    print_table(figure_rows(results), console)
    for line in (*verdict_lines(results), *missing_lines(results)):
        say(console, line)
    say(console, f"written to {written}, results.json and results.png")


def describe(study: "Study", output: Path, console: "Console") -> None:
    """``--dry-run``: what differs, what would run, and what is complete."""
    from rich.table import Table
    from rich.text import Text

    from dmlkit.cli.console import cells, say, show_table
    from dmlkit.files.document import differences
    from dmlkit.recipe.file import plain
    from dmlkit.study.definition.file import study_notes
    from dmlkit.study.runs.plan import check_components

    notes = study_notes(study, check_components(study, output))
    first = plain(study.variants[0].candidates[0].recipe)
    head = cells(["variant", f"differs from {study.variants[0].name} by", "to choose from"])
    table = Table(show_lines=True)
    for name in head:
        table.add_column(name)
    for variant in study.variants:
        changes = list(differences("", first, plain(variant.candidates[0].recipe)))
        labels = [candidate.label for candidate in variant.candidates if candidate.label]
        table.add_row(*cells([variant.name]), *(Text("\n").join(cells(lines)) for lines in (changes, labels)))
    say(console, study.config.claim)
    show_table(table, console)
    complete = len(list((output / "runs").rglob("summary.json")))
    models = study.num_runs * study.models_per_run
    for note in notes:
        say(console, f"note: {note}")
    if study.most_added_runs:
        say(console, f"up to {study.most_added_runs} runs more, beyond the edges of grids and with added seeds")
    say(console, f"{study.num_runs} runs: {models} models, {study.num_epochs} epochs; {complete} models are complete")
    say(console, "dry run: nothing was trained or written")


@app.command(epilog="Example:  dmlkit report runs/study/mpa runs/study/mpa_proxies -o docs/results.md")
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="STUDY...", help="Folders that study wrote.", show_default=False)
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Markdown file to write; of one that is there, only the block that report wrote.",
            show_default=False,
        ),
    ],
    paper: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Only statements of this paper, as the studies' files name it under expect.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the results of studies as one document: claims, figures, verdicts and commands."""
    from rich.console import Console

    from dmlkit.cli.console import say
    from dmlkit.study.reports.overview import report as write_report

    console = Console()
    for folder in write_report(folders, output, paper=paper):
        say(console, f"note: {folder} has no statement of {paper}; nothing of it is told")
    say(console, f"wrote {output} and the plots in {output.parent / output.stem}")
