"""What ``study`` and ``report`` do between reading their arguments and printing their result."""

import shlex
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from dmlkit.cli.console import print_table
from dmlkit.cli.study_progress import RunsProgress
from dmlkit.distributed.launch import start_fabric
from dmlkit.distributed.stopping import STOPPED, TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.differences import differences
from dmlkit.study.config import Study
from dmlkit.study.file import read_study
from dmlkit.study.plot import plot_study
from dmlkit.study.report import EXPLANATION, PLOT, figure_rows, report, study_section, verdict_lines, write_text
from dmlkit.study.run import check_parts, run_study


def study_command(path: Path, output: Path, overrides: list[str], device: str, jobs: int, dry_run: bool) -> None:
    """``dmlkit study``."""
    study = read_study(path, overrides)
    console = Console()
    if dry_run:
        describe_study(study, output, console)
        return
    fabric = start_fabric(device, study.variants[0].candidates[0].recipe.training.precision)
    if jobs > 1 and fabric.world_size > 1:
        raise UserError(
            f"--jobs {jobs}: under torchrun all ranks train one run together; start dmlkit without torchrun"
        )
    console.quiet = not fabric.is_global_zero
    progress = RunsProgress(console, study.num_runs, study.num_epochs)
    sets = [part for override in overrides for part in ("--set", override)]
    command = shlex.join(["dmlkit", "study", str(path), "-o", str(output), *sets])
    try:
        with progress:
            results = run_study(study, output, fabric, progress, command, jobs=jobs)
    except TrainingStoppedError as stopped:
        done = f"{progress.finished} of {progress.runs} runs are complete"
        where = f"{stopped} ({progress.names()})" if progress.training else f"{stopped}"
        console.print(f"{where}; {done}; continue with the same command", highlight=False)
        raise typer.Exit(STOPPED) from None
    if not fabric.is_global_zero:
        return
    with atomic_write(output / PLOT) as partial:
        plot_study(results, partial)
    write_text(output / "results.md", f"{study_section(results, PLOT, heading='#')}\n\n{EXPLANATION}")
    console.print(study.config.claim, highlight=False, soft_wrap=True)
    print_table(figure_rows(results), console)
    for line in verdict_lines(results):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"written to {output / 'results.md'}, results.json and {PLOT}", highlight=False, soft_wrap=True)


def describe_study(study: Study, output: Path, console: Console) -> None:
    """``dmlkit study --dry-run``: what differs, what would run, and what is complete."""
    check_parts(study, output)
    first = study.variants[0].candidates[0].recipe.model_dump(mode="json")
    table = Table("variant", f"differs from {study.variants[0].name} by", "to choose from", show_lines=True)
    for variant in study.variants:
        recipe = variant.candidates[0].recipe.model_dump(mode="json")
        labels = [candidate.label for candidate in variant.candidates if candidate.label]
        table.add_row(variant.name, "\n".join(differences("", first, recipe)), "\n".join(labels))
    console.print(study.config.claim, highlight=False, soft_wrap=True)
    console.print(table)
    complete = len(list((output / "runs").rglob("summary.json")))
    models = study.num_runs * study.models_per_run
    console.print(f"{study.num_runs} runs: {models} models, {study.num_epochs} epochs; {complete} models are complete")
    console.print("dry run: nothing was trained or written")


def report_command(folders: list[Path], output: Path) -> None:
    """``dmlkit report``."""
    report(folders, output)
    typer.echo(f"wrote {output} and the plots in {output.parent / output.stem}")
