"""``dmlkit compare``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmlkit.cli.options import Checkpoint, Debug, Device, Json, Plugins, Set
from dmlkit.errors import UserError

if TYPE_CHECKING:
    from dmlkit.evaluation.compare import Result
    from dmlkit.evaluation.significance import Comparison

app = typer.Typer()


@app.command(epilog="Example:  dmlkit compare runs/proxy_anchor runs/triplet --markdown")
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Folders that train wrote.", show_default=False)
    ],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table (booktabs).")] = False,
    json: Json = False,
    checkpoint: Checkpoint = None,
    overrides: Set = None,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Compare runs on the test classes: intervals, and paired tests against the first run."""
    if markdown + latex + json > 1:
        raise UserError("compare: give one of --markdown, --latex and --json")

    from rich.console import Console

    from dmlkit.cli.console import print_table, say, say_json
    from dmlkit.distributed.launch import start_fabric
    from dmlkit.evaluation.compare import compare_runs, lines_of
    from dmlkit.evaluation.tables import as_latex, as_markdown, comparison_rows

    fabric = start_fabric(device)
    results, differences = compare_runs(runs, checkpoint=checkpoint, overrides=overrides or [], fabric=fabric)
    if not fabric.is_global_zero:
        return
    lines = lines_of(results, differences)
    console = Console(stderr=markdown or latex or json)
    if json:
        say_json(as_plain(results, differences))
    elif markdown or latex:
        rows = comparison_rows(lines)
        typer.echo(as_markdown(rows) if markdown else as_latex(rows))
    else:
        print_table(comparison_rows(lines), console)
    for line, result in zip(lines, results, strict=False):  # the lines go on with what runs began with
        if gain := gain_of(result):
            say(console, f"{line.name}: {gain}")
    for result in results:
        for note in result.notes:
            say(console, f"note: {note}")
    first = results[0]
    for result, changes in zip(results[1:], differences, strict=True):
        if result.report.images != first.report.images:
            say(console, f"note: {result.name} was tested on other images than {first.name}: no differences")
        elif not changes:
            say(console, f"note: {result.name} has no metric of {first.name} that is made of queries: no differences")


def gain_of(result: "Result") -> str | None:
    """Whether the training of a run paid, by the metric that chooses its checkpoints; none where it has none."""
    from dmlkit.evaluation.untouched import told_gain

    metric, untouched = result.selected_by, result.untouched
    if untouched is None or metric not in result.report.metrics:
        return None
    change = result.gains.get(metric)
    interval = (change.low, change.high) if change else None
    return told_gain(metric, result.report.metrics[metric], untouched.report.metrics[metric], interval)


def as_plain(results: list["Result"], differences: list[dict[str, "Comparison"]]) -> dict[str, Any]:
    """The reports, each with what it differs by from the first, and from the backbone that it began with."""
    runs: list[dict[str, Any]] = [{"run": result.name, **result.report.plain()} for result in results]
    for run, changes in zip(runs[1:], differences, strict=True):
        run["difference_to_first"] = {name: change.as_dict() for name, change in changes.items()}
    for run, result in zip(runs, results, strict=True):
        if result.untouched:
            run["untouched"] = result.untouched.report.plain()
            run["difference_to_untouched"] = {name: change.as_dict() for name, change in result.gains.items()}
    return {"runs": runs}
