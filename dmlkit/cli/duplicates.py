"""``dmlkit duplicates``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmlkit.cli.console import bars, counted, image_cell, print_table, say, say_prose, say_skipped
from dmlkit.cli.option_groups import SourceOptions
from dmlkit.cli.options import Files, SourcePath, command
from dmlkit.cli.search import write_files, write_pictures
from dmlkit.errors import UserError
from dmlkit.files.source import APPLIES, require_source

if TYPE_CHECKING:
    from dmlkit.identify.duplicates import DuplicateGroups, Matches
    from dmlkit.vectors.points import PointsInMemory

MOST_SHOWN = 10  # groups or pairs printed in the terminal


@command(
    "dmlkit duplicates embeddings/photos",
    "dmlkit duplicates embeddings/photos --threshold 0.95 -o page.html",
    "dmlkit duplicates embeddings/photos embeddings/new --threshold 0.95",
)
def duplicates(
    source: SourcePath,
    other: Annotated[Path | None, "OTHER", "Second source to compare with, of the same model.", require_source] = None,
    /,
    threshold: Annotated[
        float | None, "SIMILARITY", "Minimum similarity of near-duplicates: a cosine, or a negative distance."
    ] = None,
    output: Files = None,
    *,
    points: SourceOptions,
) -> None:
    """Find near-duplicates within a source, or across two sources.

    Without --threshold, print the most similar pairs and propose a threshold.
    """
    from dmlkit.identify.duplicates import DuplicateGroups, duplicate_groups, matches
    from dmlkit.vectors.points import in_memory

    if threshold is None and output:
        raise UserError(
            f"duplicates: --output {output[0]} needs --threshold; run the command without it for a proposal"
        )
    ours = in_memory(options_of(source, points, other or source).open(source))
    theirs = None
    if other is not None:
        theirs = in_memory(replace(options_of(other, points, source), labels=None).open(other))
    skipped = [*dict.fromkeys((*ours.skipped, *(() if theirs is None else theirs.skipped)))]
    if threshold is None:
        print_proposal(ours, theirs)
        say_skipped(skipped)
        return
    if theirs is None:
        result = duplicate_groups(ours, threshold, bar=bars())
    else:
        result = matches(ours, theirs, threshold, bar=bars())
    title = f"near-duplicates of {source}" + ("" if other is None else f" in {other}")
    notes = [f"{ours.manifold.similarity_name.replace('_', ' ')} of at least {threshold:g}"]
    written = write_files(
        output,
        lambda path: write_pictures(path, title, notes, result.shelves(), [source, other or source], "rows"),
        result.write,
    )
    if isinstance(result, DuplicateGroups):
        print_groups(result)
    else:
        (one, another), pairs = result.images, len(result.pairs.first)
        if pairs:
            print_pairs(result, "near-duplicates")
        where = f"{one} of {len(ours)} images in a, {another} of {len(result.other)} in b"
        say(f"{counted(pairs, 'pair')} of near-duplicates: {where}")
        if pairs > MOST_SHOWN:
            say(f"the {MOST_SHOWN} most similar are shown; -o FILE.csv and -o FILE.html contain all")
    say_skipped(skipped)
    for line in written:
        say(line)


def options_of(source: Path, points: SourceOptions, other: Path) -> SourceOptions:
    """Return the options on a source: without those that apply to the kind of the other one alone."""
    own, others = require_source(source), require_source(other)
    names = {"split": "--split", "overrides": "--set", "manifold": "--manifold", "device": "--device"}
    left_out = [name for name, option in names.items() if own not in APPLIES[option] and others in APPLIES[option]]
    return replace(points, **dict.fromkeys(left_out))


def print_groups(result: "DuplicateGroups") -> None:
    """Print the largest groups, and notes on all."""
    collection, least_similarities = result.collection, result.least()
    rows: list[list[str | list[str]]] = [["images", "min similarity", "label", "path"]]
    for group in result.groups[:MOST_SHOWN]:
        labels = sorted({collection.labels[row] or "" for row in group.tolist()} - {""})
        first = int(group[0])
        image = image_cell(collection.paths[first], collection.boxes[first])
        rows.append([str(len(group)), f"{float(least_similarities[group].min()):.4f}", ", ".join(labels), image])
    if result.groups:
        print_table(rows, f"near-duplicates in {collection.source}")
    groups = counted(len(result.groups), "group")
    say(f"{counted(len(collection), 'image')}: {result.images} of them in {groups} of near-duplicates")
    if len(result.groups) > MOST_SHOWN:
        say(f"the largest {MOST_SHOWN} are shown; -o FILE.csv and -o FILE.html contain all")
    if result.mixed:
        say(f"note: {counted(result.mixed, 'group has', 'groups have')} several labels")
    if result.loose:
        pairs = counted(result.loose, "more pair reaches", "more pairs reach")
        say_prose(f"note: {pairs} the threshold across groups; groups are merged only if all their pairs do")


def print_proposal(points: "PointsInMemory", other: "PointsInMemory | None") -> None:
    """Print the most similar pairs, and a threshold that they suggest."""
    from dmlkit.identify.duplicates import most_similar_pairs

    matches, proposal = most_similar_pairs(points, other, MOST_SHOWN, bar=bars())
    print_pairs(matches, "most similar pairs")
    if proposal is None:
        reason = "half of the images or more are equally similar to their nearest neighbor"
        say_prose(f"no threshold is proposed: {reason}")
    else:
        say(f"proposal: --threshold {proposal.threshold:.6g}; {proposal.images} of {len(points)} images reach it")
        gap = f"{proposal.below:.6g} to {proposal.above:.6g}"
        where = "the upper half of the similarities of images to their nearest neighbor"
        say_prose(f"it is the middle of the largest gap ({gap}) in {where}; check the pairs above")


def print_pairs(matches: "Matches", title: str) -> None:
    """Print the most similar of some pairs."""
    rows: list[list[str | list[str]]] = [["similarity", "a", "b"]]
    for index in matches.pairs.similarities.argsort(descending=True, stable=True)[:MOST_SHOWN].tolist():
        one, other = int(matches.pairs.first[index]), int(matches.pairs.second[index])
        ends = ((matches.one, one), (matches.other, other))
        images = [image_cell(points.paths[row], points.boxes[row]) for points, row in ends]
        rows.append([f"{float(matches.pairs.similarities[index]):.4f}", *images])
    a, b = matches.one, matches.other
    print_table(rows, title + (f" in {a.source}" if a is b else f": a in {a.source}, b in {b.source}"))
