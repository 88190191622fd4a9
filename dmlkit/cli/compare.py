"""``dmlkit compare``."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dmlkit.cli.console import Output, counted, print_table, ranks_of, say, say_json
from dmlkit.cli.options import Checkpoint, Device, Json, Writes, command, each
from dmlkit.files.escape import as_latex, as_markdown
from dmlkit.files.outputs import check_file, write_output
from dmlkit.files.source import require_run

if TYPE_CHECKING:
    from dmlkit.evaluation.compare import Line, Result


@command("dmlkit compare runs/proxy_anchor runs/triplet -o table.md")
def compare(
    runs: Annotated[list[Path], "RUN", "Two or more run folders; the first is the baseline.", each(require_run)],
    /,
    output: Annotated[
        Path | None,
        "FILE",
        "Write one table of all: .md (Markdown) or .tex (LaTeX, booktabs).",
        Writes(check_file, (".md", ".tex")),
    ] = None,
    json: Json = False,
    by: Annotated[
        Literal["classes", "queries"],
        "UNIT",
        "Unit of intervals and p-values: classes, or queries, which treats the queries of a class as independent.",
    ] = "classes",
    checkpoint: Checkpoint = None,
    overrides: Annotated[
        list[str] | None, "KEY=VALUE", "Override a key that evaluation reads, e.g. dataset.root=PATH. Repeatable."
    ] = None,
    device: Device = "auto",
) -> None:
    """Compare runs on the test classes, with intervals and paired tests against the first run."""
    from dmlkit.evaluation.compare import compare_runs, comparison_rows, lines_of, narrow_rows, short_names

    ranks = ranks_of(device)
    results = compare_runs(runs, checkpoint=checkpoint, overrides=overrides or [], by=by, ranks=ranks)
    if not ranks.is_global_zero:
        return
    metrics = max(len(name) for result in results for name in result.report.metrics)
    room = max(8, Output.console.width - 58 - min(metrics, 12))  # next to the other columns of the wider table
    lines = lines_of(results, None if json else room)
    if output is not None:  # before anything is printed: its reader may end, e.g. head
        rows = comparison_rows(lines_of(results))
        text = as_markdown(rows) if output.suffix.lower() == ".md" else as_latex(rows)
        write_output(output, f"{text}\n")
    if json:
        say_json(as_plain(results, lines, by))
    else:
        values, changes = narrow_rows(lines)
        print_table(values)
        if changes:
            print_table(changes, f"difference from {lines[0].name}")
        for line, name, result in zip(lines, short_names([result.name for result in results]), results, strict=False):
            if line.name != name:
                say(f"{line.name}: {result.name}")
    for note in notes_of(results, lines, with_units=not json):
        say(note)
    if output is not None:
        say(f"wrote {output}")


def notes_of(results: list["Result"], lines: list["Line"], *, with_units: bool) -> Iterator[str]:
    """Yield the lines below the table: units, gains from training, notes of runs, and runs that cannot be compared."""
    first = results[0]
    if with_units and any(result.report.intervals for result in results):
        compared, units = sum(len(line.changes) for line in lines), f"{first.report.queries} queries, as if independent"
        if first.classes is not None:
            units = f"{counted(len(first.classes.unique()), 'class', 'classes')} ({first.report.queries} queries)"
        holm = f"; Holm's p for {compared} comparisons" if compared > 1 else ""
        yield f"intervals and p over {units}{holm}"
    for line, result in zip(lines, results, strict=False):  # lines has pretrained checkpoints after the runs
        if gain := gain_of(result):
            yield f"{line.name}: {gain}"
    for note in dict.fromkeys(note for result in results for note in result.notes):
        yield f"note: {note}"
    for result in results[1:]:
        if result.report.images != first.report.images:
            yield f"note: {result.name} was tested on different images than {first.name}; no differences are computed"
        elif not result.changes:
            yield f"note: {result.name} and {first.name} share no per-query metric; no differences are computed"
        elif _groups(result) != _groups(first):
            yield (
                f"note: {result.name} and {first.name} may leave out different images, those of a query's own group: "
                "their dataset.group or dataset.columns differ"
            )


def _groups(result: "Result") -> tuple[Any, ...]:
    """Return the keys of a run's dataset that say which images are a group; a pattern of any column may take it."""
    dataset = result.report.question.dataset if result.report.question else {}
    columns: dict[str, str] = dataset.get("columns") or {}
    patterns = sorted(pattern for pattern in columns.values() if "(?P<group>" in pattern)
    return dataset.get("group"), columns.get("group"), *patterns


def gain_of(result: "Result") -> str | None:
    """Return a line on the gain from training, by the metric that chooses checkpoints; None if nothing was before."""
    from dmlkit.evaluation.compare import gain_message

    metric, pretrained = result.selected_by, result.pretrained
    if pretrained is None or metric not in result.report.metrics:
        return None
    change = result.gains.get(metric)
    interval = change.ends if change else None
    tuned, before = result.report.metrics[metric], pretrained.report.metrics[metric]
    classes, queries = len(result.classes.unique()) if result.classes is not None else 0, result.report.queries
    units = f"{classes} classes" if classes else f"{queries} queries"
    epoch, split = result.report.epoch or result.epochs, result.report.split
    return gain_message(metric, tuned, before, interval, units, split, epoch=epoch, epochs=result.epochs)


def as_plain(results: list["Result"], lines: list["Line"], by: str) -> dict[str, Any]:
    """Return the reports as JSON, with the differences to the first run and to the pretrained checkpoint."""
    runs: list[dict[str, Any]] = [{"run": result.name, **result.report.plain()} for result in results]
    for run, line in zip(runs[1:], lines[1:], strict=False):  # lines has pretrained checkpoints after the runs
        run["difference_to_first"] = {
            name: {**change.as_dict(), "corrected_p_value": line.corrected[name]}
            for name, change in line.changes.items()
        }
    for run, result in zip(runs, results, strict=True):
        if result.pretrained:
            run["pretrained"] = result.pretrained.report.plain()
            run["difference_to_pretrained"] = {name: change.as_dict() for name, change in result.gains.items()}
    return {"by": by, "runs": runs}
