"""``dmlkit study``, ``dmlkit report`` and ``dmlkit status``."""

import shlex
from collections.abc import Iterable
from itertools import groupby
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from dmlkit.cli.console import cells, counted, print_table, print_tables, ranks_of, say, say_json, show_table
from dmlkit.cli.options import Device, DryRun, Json, Set, Writes, command, each, stem_of
from dmlkit.errors import UserError
from dmlkit.files.escape import near_path
from dmlkit.files.outputs import check_file, check_folder
from dmlkit.files.source import STUDY_MARK, require_study, require_study_file

if TYPE_CHECKING:
    from dmlkit.study.definition.config import Study
    from dmlkit.study.status import RunStatus, StudyStatus
    from dmlkit.study.verdicts import StudyResults

BUDGET_USED = 75  # EX_TEMPFAIL of sysexits.h: try again


@command("dmlkit study recipes/study/mpa.yaml -o runs/study/mpa")
def study(
    study: Annotated[Path, "STUDY", "YAML file of a study.", require_study_file],
    /,
    output: Annotated[
        Path | None, "FOLDER", "Study folder to write. Default: runs/study/ and the name of the file."
    ] = None,
    overrides: Set = None,
    workers: Annotated[
        int, "COUNT", "Number of runs at a time, each on its own GPU or an equal share of the CPU cores.", {"min": 1}
    ] = 1,
    device: Device = "auto",
    budget: Annotated[
        str | None, "TIME", "Stop after this time, e.g. 90m or 1h30m, with the results of the finished runs."
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Test a claim: train variants of a recipe with several seeds and compare them.

    If it is interrupted, the same command resumes.
    """
    output = output or Path("runs") / "study" / stem_of(study)
    check_folder(output, "a study", STUDY_MARK, "runs")  # runs that train wrote

    from dmlkit.cli.study_progress import RunsProgress
    from dmlkit.distributed.stopping import STOPPED, TrainingStoppedError
    from dmlkit.recipe.plugin import plugin_files
    from dmlkit.study.definition.file import read_study
    from dmlkit.study.runs.run_study import BudgetUsedError, run_study
    from dmlkit.study.status import parse_duration

    seconds = inf if budget is None else parse_duration(budget, "--budget")
    read = read_study(study, overrides or [])
    if dry_run:
        describe(read, output)
        return
    ranks = ranks_of(device, read.variants[0].candidates[0].recipe.training.precision)
    if workers > 1 and ranks.world_size > 1:
        why = "does not work under torchrun, whose ranks train one run together"
        raise UserError(f"--workers {workers} {why}; start dmlkit without torchrun")
    sets = [word for override in overrides or [] for word in ("--set", override)]
    files = [word for file in plugin_files() for word in ("--plugin", near_path(str(file)))]  # as they were typed
    command = shlex.join(["dmlkit", "study", str(study), "-o", str(output), *sets, *files])
    progress = RunsProgress()
    is_cut_off = False
    try:
        with progress:
            results = run_study(read, output, ranks, progress, command, workers=workers, budget=seconds)
    except BudgetUsedError as stopped:
        results, is_cut_off = stopped.results, True
    except TrainingStoppedError as stopped:
        done = f"{progress.finished} of {progress.runs} runs are finished"
        where = f"{stopped} ({progress.names()})" if progress.training else f"{stopped}"
        say(f"{where}; {done}; rerun the same command to resume")
        raise typer.Exit(STOPPED) from None
    if results and ranks.is_global_zero:
        print_results(results, output)
    if is_cut_off:
        if not results:
            say("no results: no variant is finished yet")
        done = f"{progress.finished} of {progress.runs} runs are finished"
        say(f"the time of --budget is used up: {done}; rerun the same command to resume")
        raise typer.Exit(BUDGET_USED)
    if results and results.missing:
        failed = counted(len(results.failed), "run")
        raise UserError(f"{output}: {failed} failed with the errors above; rerun the same command to try again")


def print_results(results: "StudyResults", output: Path) -> None:
    """Write the results as Markdown, and print them."""
    from dmlkit.study.report import missing_lines, write_section
    from dmlkit.study.tables import figure_rows, verdict_rows

    written = write_section(results, output)
    say(results.claim)
    print_tables(figure_rows(results), names=2)
    for statement, metric, verdict, difference, interval, *_ in verdict_rows(results)[1:]:
        say(f"{statement}, {metric}: {difference} ({interval}), {verdict}")
    for line in missing_lines(results):
        say(line)
    say(f"written to {written}, results.json and results.png")


def describe(study: "Study", output: Path) -> None:
    """Print what differs between variants, what would run and what is finished (``--dry-run``)."""
    from dmlkit.files.document import differences
    from dmlkit.recipe.file import plain
    from dmlkit.study.definition.file import study_notes
    from dmlkit.study.runs.plan import check_components

    notes = study_notes(study, check_components(study, output))
    first = plain(study.variants[0].candidates[0].recipe)
    table = Table(show_lines=True)
    for name in cells(["variant", f"differs from {study.variants[0].name} by", "values to tune"]):
        table.add_column(name)
    for variant in study.variants:
        labels = [candidate.label for candidate in variant.candidates if candidate.label]
        table.add_row(*cells([variant.name, [*differences("", first, plain(variant.candidates[0].recipe))], labels]))
    say(study.config.claim)
    show_table(table)
    complete = len(list((output / "runs").rglob("summary.json")))
    models = study.num_runs * study.config.models_per_run
    for note in notes:
        say(f"note: {note}")
    if study.most_added_runs:
        say(f"up to {study.most_added_runs} more runs, for values beyond the edges of grids and for added seeds")
    finished = f"{counted(complete, 'model')} in {output} {'is' if complete == 1 else 'are'} finished"
    made = f"{counted(models, 'model')}, {counted(study.num_epochs, 'epoch')}"
    say(f"{counted(study.num_runs, 'run')}: {made}; {finished}")
    say("dry run: nothing was trained or written")


@command(
    "dmlkit report runs/study/mpa runs/study/mpa_proxies -o docs/results.md",
    "dmlkit report runs/study/mpa -o tables.tex",
)
def report(
    folders: Annotated[list[Path], "STUDY", "One or more study folders, written by study.", each(require_study)],
    /,
    output: Annotated[
        Path,
        "FILE",
        "File to write: .md (page with plots; your own text in it is kept) or .tex (LaTeX tables).",
        Writes(check_file, (".md", ".tex")),
    ],
    paper: Annotated[
        str | None, "NAME", "Report only the statements of this paper (key paper in the study file)."
    ] = None,
) -> None:
    """Write the results of studies as one document: claims, metrics, verdicts and commands."""
    from dmlkit.study.report import report as write_report

    for folder in write_report(folders, output, paper=paper):
        say(f"note: {folder} has no statement of {paper} and is left out")
    plots = f" and the plots in {output.parent / output.stem}" if output.suffix.lower() == ".md" else ""
    say(f"wrote {output}{plots}")


@command("dmlkit status runs/study/mpa")
def status(
    folder: Annotated[Path, "STUDY", "Study folder, written by study.", require_study], /, json: Json = False
) -> None:
    """Print the progress of a study: its runs, the best scores so far, the time spent and left."""
    from dmlkit.study.record import StudyFailures
    from dmlkit.study.status import format_duration, status_of

    state = status_of(folder)
    if json:
        say_json(state.model_dump(mode="json"))
        return
    say(state.claim)
    rows = [["variant", "seeds", "validation", "spent"]]
    groups = [(key, list(runs)) for key, runs in groupby(state.runs, key=lambda run: (run.variant, run.choice))]
    for (variant, choice), runs in groups:
        seeds = [{run.seed for run in tried} for (of, value), tried in groups if of == variant and value is not None]
        compared = set.intersection(*seeds)  # the best value has later seeds too, which chose nothing
        name = f"{variant} {choice}" if choice else variant
        if choice is None:
            name += " (not chosen yet)"
        elif choice and choice == state.best.get(variant):
            name += " (best)"
        scores = [run.score for run in runs if run.score is not None and run.seed in compared]
        seconds = sum(run.seconds for run in runs)
        rows.append([name, seeds_of(runs), f"{fmean(scores):.4f}" if scores else "", format_duration(seconds)])
    print_table(rows)
    failed = {run.folder: run.reason for run in state.runs if run.folder and run.reason}
    for line in StudyFailures(failed=failed).lines():
        say(f"failed: {line}")
    say(totals(state))
    if state.count("done") < len(state.runs) and not state.is_running:
        say(f"no run is in progress; to resume: {state.command}")


def seeds_of(runs: Iterable["RunStatus"]) -> str:
    """Return the seeds of runs, grouped by state: ``0 1 done, 2 running (epoch 3 of 5), 3 4 waiting``."""

    def far(run: "RunStatus") -> str:
        progress = f" (epoch {run.epochs} of {run.of_epochs})" if run.state in ("running", "stopped") else ""
        return f"{run.state}{progress}"

    return ", ".join(f"{' '.join(str(run.seed) for run in group)} {text}" for text, group in groupby(runs, key=far))


def totals(study: "StudyStatus") -> str:
    """Return counts and times on one line."""
    from dmlkit.study.status import format_duration

    counts = [f"{study.count('done')} of {len(study.runs)} runs done"]
    counts += [f"{study.count(state)} {state}" for state in ("running", "stopped", "failed") if study.count(state)]
    times = [f"{format_duration(study.seconds)} of training"]
    if study.seconds_left:
        times.append(f"about {format_duration(study.seconds_left)} left if runs train one after another")
        if study.count("running") > 1:
            times.append(f"{format_duration(study.seconds_left / study.count('running'))} with as many at once as now")
    return f"{', '.join(counts)}; {', '.join(times)}"
