"""``dmlkit align``: a new model with older embeddings."""

from pathlib import Path
from typing import Annotated

from dmlkit.cli.console import bars, print_table, say, say_json, say_prose, say_skipped
from dmlkit.cli.options import Checkpoint, Device, Json, command
from dmlkit.files.escape import command_word
from dmlkit.files.source import require_images, require_run, require_source


@command("dmlkit align galleries/birds runs/new photos -o runs/new-aligned")
def align(
    older: Annotated[Path, "OLDER", "Gallery or embeddings folder of the older model.", require_source],
    run: Annotated[Path, "RUN", "Run of the newer model.", require_run],
    images: Annotated[Path, "IMAGES", "Images that OLDER has: a folder or a table.", require_images],
    /,
    output: Annotated[Path | None, "FOLDER", "Run to write. Default: RUN-aligned."] = None,
    checkpoint: Checkpoint = None,
    json: Json = False,
    device: Device = "auto",
) -> None:
    """Map a newer model into the space of older embeddings, so that it searches among them.

    Writes a run with the map in its head. Maps are fitted to half of the images,
    the best one is chosen on a quarter, and measured on the last quarter.
    """
    from dmlkit.run_folder.folder import aligned_place

    output = aligned_place(run, output)

    from dmlkit.look.align import align as align_run

    alignment, place = align_run(older, run, images, output, checkpoint=checkpoint, device=device, bar=bars())
    if json:
        say_json(alignment.stamped())
        return
    chosen = alignment.map if alignment.shrinkage is None else f"{alignment.map} {alignment.shrinkage:g}"
    others = ", ".join(f"{name} {error:.3g}" for name, error in alignment.errors.items() if name != chosen)
    say(f"{chosen} map: mean squared distance {alignment.errors[chosen]:.3g} on images that chose it")
    say_prose(f"  others: {others}")
    has_ends = any(any(figures.intervals.values()) for figures in alignment.figures)  # fewer than 5 labels have none
    columns = [column for name in alignment.figures[0].metrics for column in (name, *(["95 %"] if has_ends else []))]
    rows = [["asked by", "among", *columns]]
    for figures in alignment.figures:
        cells: list[str] = []
        for name, value in figures.metrics.items():
            ends = figures.intervals[name]
            cells += [f"{value:.3f}", *([f"{ends[0]:.3f} .. {ends[1]:.3f}" if ends else ""] if has_ends else [])]
        rows.append([figures.queries, figures.gallery, *cells])
    finds = "another image of its label" if alignment.finds == "label" else "the older point of the same image"
    unseen = ", all of labels that the map has not seen" if alignment.held_out == "labels" else ""
    say(f"measured on {alignment.measured} other images{unseen}; each has to find {finds}")
    print_table(rows)
    for name, gain in alignment.gain.items():
        ends = "" if gain.low is None or gain.high is None else f" [{gain.low:+.3f}, {gain.high:+.3f}]"
        say_prose(f"{name} of new among old minus old among old: {gain.difference:+.3f}{ends}, p = {gain.p_value:.3g}")
    say_skipped(alignment.skipped)
    say(f"wrote {place}: its embeddings may be compared with {older}, e.g.")
    say(f"  dmlkit search {command_word(older)} QUERIES --run {command_word(place)}")
