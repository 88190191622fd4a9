"""``dmlkit inspect``."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from dmlkit.cli.console import bars, counted, say, say_prose
from dmlkit.cli.option_groups import SourceOptions
from dmlkit.cli.options import PAGE, SourcePath, SplitName, Writes, command, where_of
from dmlkit.cli.search import why_missing
from dmlkit.files.outputs import check_file
from dmlkit.files.source import kind_of

FILE = f"inspection{PAGE}"


@dataclass(frozen=True)
class InspectOptions(SourceOptions):
    """Options on the inspected points."""

    split: Annotated[
        SplitName | None, "SPLIT", "Split of a run: train, validation, test or all. Default: test; all for timm:NAME."
    ] = None


@command("dmlkit inspect runs/demo", "dmlkit inspect embeddings/photos -o report.html")
def inspect(
    source: SourcePath,
    /,
    output: Annotated[
        Path | None,
        "FILE",
        "HTML page to write. Default: inspection.html in plots/ of a run, otherwise in the current folder.",
        Writes(check_file, (PAGE,)),
    ] = None,
    *,
    points: InspectOptions,
) -> None:
    """Write one HTML page of what the model gets wrong: worst queries, confused classes, suspected wrong labels."""
    from dmlkit.run_folder.folder import RunFolder

    if output is None:
        output = (RunFolder(source).plots if kind_of(source) == "run" else Path()) / FILE
        check_file(output)

    from dmlkit.look.inspection.findings import inspect as look_at
    from dmlkit.look.inspection.page import write_inspection

    bar = bars()
    of_points: dict[str, Any] = {**asdict(points), "overrides": points.overrides or [], "where": where_of(points.where)}
    findings = look_at(source, **of_points, bar=bar)
    gone = write_inspection(findings, output, f"Inspection of {source}", bar=bar)
    for note in findings.notes:
        say_prose(f"note: {note}")
    if gone:
        say(f"note: {counted(gone, 'picture is', 'pictures are')} missing: {why_missing(source)}")
    say(f"wrote {output}, {output.stat().st_size / 1e6:.1f} MB: open it in a browser")
