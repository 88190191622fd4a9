"""``dmlkit status``."""

from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from dmlkit.cli.options import RESEARCH, Debug, Json, checked, examples
from dmlkit.files.source import require_study

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dmlkit.study.status import RunStatus, StudyStatus

app = typer.Typer()


@app.command(rich_help_panel=RESEARCH, epilog=examples("dmlkit status runs/study/mpa"))
def status(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="STUDY",
            help="Study folder, written by study.",
            callback=checked(require_study),
            show_default=False,
        ),
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the progress of a study: its runs, the best scores so far, the time spent and left."""
    from rich.console import Console

    from dmlkit.cli.console import print_table, say, say_json
    from dmlkit.study.record import StudyFailures
    from dmlkit.study.status import status_of

    found = status_of(folder)
    if json:
        say_json(found.model_dump(mode="json"))
        return
    console = Console()
    say(console, found.claim)
    print_table(rows_of(found), console)
    failed = {run.folder: run.reason for run in found.runs if run.folder and run.reason}
    for line in StudyFailures(failed=failed).lines():
        say(console, f"failed: {line}")
    say(console, totals(found))
    if found.count("done") < len(found.runs) and not found.is_running:
        say(console, f"no run is in progress; to resume: {found.command}")


def rows_of(found: "StudyStatus") -> list[list[str]]:
    """Return one row per variant, or one per value that is tried for it."""
    from dmlkit.study.duration import format_duration

    rows = [["variant", "seeds", "validation", "spent"]]
    for (variant, choice), group in groupby(found.runs, key=lambda run: (run.variant, run.choice)):
        runs = list(group)
        name = f"{variant} {choice}" if choice else variant
        if choice is None:
            name += " (not chosen yet)"
        elif choice and choice == found.best.get(variant):
            name += " (best)"
        scores = [run.score for run in runs if run.score is not None]  # the value with the best mean is chosen
        seconds = sum(run.seconds for run in runs)
        rows.append([name, seeds_of(runs), f"{fmean(scores):.4f}" if scores else "", format_duration(seconds)])
    return rows


def seeds_of(runs: "Iterable[RunStatus]") -> str:
    """Return the seeds of runs, grouped by state: ``0 1 done, 2 running (epoch 3 of 5), 3 4 waiting``."""

    def far(run: "RunStatus") -> str:
        at = f" (epoch {run.epochs} of {run.of_epochs})" if run.state in ("running", "stopped") else ""
        return f"{run.state}{at}"

    return ", ".join(f"{' '.join(str(run.seed) for run in group)} {text}" for text, group in groupby(runs, key=far))


def totals(found: "StudyStatus") -> str:
    """Return counts and times on one line."""
    from dmlkit.study.duration import format_duration

    counts = [f"{found.count('done')} of {len(found.runs)} runs done"]
    counts += [f"{found.count(state)} {state}" for state in ("running", "stopped", "failed") if found.count(state)]
    times = [f"{format_duration(found.seconds)} of training"]
    if found.seconds_left:
        times.append(f"about {format_duration(found.seconds_left)} left if runs train one after another")
        if found.count("running") > 1:
            times.append(f"{format_duration(found.seconds_left / found.count('running'))} with as many at once as now")
    return f"{', '.join(counts)}; {', '.join(times)}"
