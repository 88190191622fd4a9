"""``dmlkit identify``."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmlkit.cli.console import Output, bars, counted, percent, print_table, say, say_prose, say_skipped, wrapped
from dmlkit.cli.option_groups import BoxOptions, FusedModelOptions
from dmlkit.cli.options import PAGE, ArrayLabels, ArrayManifold, Conditions, QueryPath, SourcePath, Writes, command
from dmlkit.cli.search import pictures_of, write_pictures
from dmlkit.files.escape import printable
from dmlkit.files.outputs import check_file
from dmlkit.identify.rule import LabelRule

if TYPE_CHECKING:
    from dmlkit.identify.answers import Answer, Identified

MOST_SHOWN = 10  # images printed in the terminal


@command(
    "dmlkit identify galleries/birds photos",
    "dmlkit identify galleries/birds photos -o answers.csv --threshold 0.6",
    "dmlkit identify galleries/birds bursts --by folder",
)
def identify(
    source: SourcePath,
    images: QueryPath,
    /,
    output: Annotated[
        list[Path] | None,
        "FILE",
        "Write all answers: a .csv table, a .json file or an .html page with pictures. Repeatable. For images of "
        "Camtrap DP, observations.csv has its observations with the labels; for boxes of MegaDetector, .json has its "
        "boxes with the labels; for tracks, .txt is MOT text.",
        Writes(check_file, (".csv", ".json", ".txt", PAGE)),
    ] = None,
    *,
    rule: LabelRule,
    where: Conditions = None,
    boxes: BoxOptions,
    chosen: FusedModelOptions,
    labels: ArrayLabels = None,
    manifold: ArrayManifold = None,
) -> None:
    """Label images by the most similar labeled images, e.g. of a gallery, or report them as unknown.

    It prints the 10 most doubtful images, each with the best guess and its probability.
    """
    from dmlkit.identify.exchange import write_exchange, writer_of
    from dmlkit.identify.identify import identify as identify_images

    read = boxes.read(where)
    writers = {path: None if path.suffix.lower() == PAGE else writer_of(path, images, read) for path in output or []}
    rule.check()  # before images are embedded to choose a weight
    model = chosen.choose(source, images)
    identified = identify_images(
        source, images, rule=rule, boxes=read, model=model, labels=labels, manifold=manifold, bar=bars()
    )
    written: list[str] = []  # before anything is printed: its reader may end, e.g. head
    for path, write in writers.items():
        if path.suffix.lower() == PAGE:
            written += write_answers_page(identified, path, (images, source))
        elif write is None:
            identified.write(path)
            written.append(f"wrote {path}")
        else:
            text = f"wrote {path}: {write_exchange(identified, path, images, read, write)}"
            written += wrapped(printable(text), Output.console.width)
    print_answers(identified, images, is_kept=bool(output))
    size = len(identified.neighbors.searched)
    if rule.k is not None and rule.k > size:
        say(f"note: -k {rule.k} is reduced to {size}, the number of images in {source}")
    for line in written:
        say(line)


def print_answers(identified: "Identified", images: Path, *, is_kept: bool) -> None:
    """Print the most doubtful answers, and counts and notes on all, which may be kept in a file."""
    from dmlkit.files.labels import UNKNOWN

    doubtful = identified.most_doubtful_first()
    one, many = unit_of(identified)
    rows: list[list[str | list[str]]] = [[identified.unit[0], "best guess", "nearest"]]
    shown = zip(doubtful.answers, doubtful.neighbors.boxes, doubtful.neighbors.neighbors(), strict=True)
    for answer, box, (path, neighbors) in islice(shown, MOST_SHOWN):
        guess = [answer.guess if answer.probability is None else f"{percent(answer.probability)} {answer.guess}"]
        guess += [f"unknown, score {answer.score:.4f}"] if answer.label == UNKNOWN else []
        guess += [] if answer.known in (None, answer.guess) else [f"known: {answer.known}"]
        nearest = [f"{similarity:.4f} {item.label}" for _, similarity, item in neighbors]
        below = [counted(answer.images, "image")] if one == "group" else [box.sides] if box else []
        rows.append([[within(path, images), *below], guess, nearest])
    count = len(identified.answers)
    if count:
        title = f"the {MOST_SHOWN} most doubtful of {count} {many}" if count > MOST_SHOWN else "most doubtful first"
        print_table(rows, title)
    unknown = sum(answer.label == UNKNOWN for answer in identified.answers)
    say(f"{counted(count, one, many)}, {unknown} unknown{floor_of(identified)}")
    if right := identified.accuracy:
        counts = f"{right.right} right, {right.unknown} unknown, {right.images - right.right - right.unknown} wrong"
        checked = counted(right.images, f"{one} with a known label", f"{many} with known labels")
        say(f"accuracy {right.right / right.images:.3f} over {checked}: {counts}")
        say(f"the best guess is correct for {right.guessed} of {right.images}")
        others = [answer.label != UNKNOWN for answer in identified.answers if answer.known is None]
        if others:
            without = f"{counted(len(others), one, many)} without a known label of the gallery"
            say(f"{without}: {len(others) - sum(others)} unknown, {sum(others)} with a label")
    if in_source := identified.in_source:
        themselves = counted(in_source, f"of these {many} is", f"of these {many} are")
        say_prose(f"note: {themselves} in the source, and found there; identify others for an accuracy")
    if count > MOST_SHOWN and not is_kept:
        say(f"-o FILE.csv and -o FILE.html contain all {count}")
    if identified.note:
        say_prose(f"note: {identified.note}")
    if any(answer.probability is None for answer in identified.answers):
        needed = "2 labels or more, and 10 images of labels with several images"
        say_prose(f"note: no probabilities: they need {needed}")
    say_skipped(identified.neighbors.skipped)


def unit_of(identified: "Identified") -> tuple[str, str]:
    """Return what each answer is on, singular and plural: boxes, if none is on a full image or a group."""
    boxes = identified.neighbors.boxes
    return ("box", "boxes") if identified.unit[0] == "image" and boxes and all(boxes) else identified.unit


def floor_of(identified: "Identified") -> str:
    """Return below which probability or score images are unknown, in parentheses; sizes of groups have their own."""
    floors = sorted({answer.least_probability for answer in identified.answers if answer.least_probability is not None})
    if floors:
        ends = " to ".join(dict.fromkeys(percent(floor) for floor in (floors[0], floors[-1])))
        return f" (probability below {ends})"
    return "" if identified.threshold is None else f" (score below {identified.threshold:g})"


def within(path: str, folder: Path) -> str:
    """Return a path relative to a folder that contains it; leave another path unchanged."""
    place = Path(path)
    return str(place.relative_to(folder)) if place != folder and place.is_relative_to(folder) else path


def write_answers_page(identified: "Identified", path: Path, read: tuple[Path, Path]) -> list[str]:
    """Write the page of the answers, the most doubtful first; return what to print, see `write_pictures`."""
    from dmlkit.files.labels import UNKNOWN
    from dmlkit.identify.page import Picture, Shelf

    doubtful = identified.most_doubtful_first()
    nearest = doubtful.neighbors
    shelves = (
        Shelf(
            Picture(picture, lines_of(answer, path if picture != path else None), is_right=answer.is_right, box=box),
            pictures_of(neighbors),
        )
        for answer, picture, box, (path, neighbors) in zip(
            doubtful.answers, nearest.pictures, nearest.boxes, nearest.neighbors(), strict=True
        )
    )
    unknown = sum(answer.label == UNKNOWN for answer in identified.answers)
    many = unit_of(identified)[1]
    notes = [f"{len(identified.answers)} {many}, {unknown} unknown{floor_of(identified)}; the most doubtful first"]
    if right := identified.accuracy:
        notes.append(f"accuracy {right.right / right.images:.3f} over {right.images} {many} with known labels")
    return write_pictures(path, f"{read[0]} in {read[1]}", notes, shelves, read)


def lines_of(answer: "Answer", group: str | None) -> list[str]:
    """Return the lines below the picture of a query, which is the first one of a group."""
    lines = [] if group is None else [f"{group}, {answer.images} images"]
    lines += [answer.label, *([f"best guess {answer.guess}"] if answer.label != answer.guess else [])]
    lines += [] if answer.known in (None, answer.label) else [f"known {answer.known}"]
    lines += [] if answer.probability is None else [f"probability {percent(answer.probability)}"]
    margin = "none" if answer.margin is None else f"{answer.margin:.4f}"
    return [*lines, f"score {answer.score:.4f}", f"margin {margin}"]
