"""How long the commands of the first hour take, from `dmlkit start` to a gallery and plots, each in its own process.

With --other the same commands run with the package of another checkout too, in folders of their own. Each command runs
in both checkouts at the same time, so that both meet the same load. A command that another version spells differently
is given in that spelling. Seconds of a processor include those of the processes that a command starts, and depend less
on what else the machine does. A command that fails in one of the checkouts is shown as failed, and counts in no total.

Run: python benchmarks/walk.py PHOTOS, and what its --help lists.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from report import write_report

HERE = Path(__file__).parent.parent
SUFFIXES = (".jpg", ".jpeg", ".png")


class Seconds(NamedTuple):
    """Time that a command took."""

    clock: float
    processors: float


def copy_photos(source: Path, target: Path, classes: int | None, images: int | None) -> None:
    """Copy the first images of the first class folders, all of them by default."""
    for folder in sorted(path for path in source.iterdir() if path.is_dir())[:classes]:
        (target / folder.name).mkdir(parents=True)
        for file in [path for path in sorted(folder.iterdir()) if path.suffix.lower() in SUFFIXES][:images]:
            shutil.copy2(file, target / folder.name)


def commands(photos: Path, epochs: int) -> list[tuple[str, ...]]:
    """Return the commands, each in one or two spellings; the last class is asked for, and two photos of it compared."""
    asked = max(path for path in photos.iterdir() if path.is_dir())
    one, other = sorted(asked.iterdir())[:2]
    return [
        (f"start {photos} -o recipe.yaml",),
        (f"train recipe.yaml -o run --set training.epochs={epochs}",),
        ("eval run",),
        ("eval run",),
        ("inspect run -o inspection.html",),
        ("calibrate run --far 0.05",),
        (f"gallery create run {photos} -o gallery",),
        ("gallery info gallery",),
        (f"identify gallery {asked} -o answers.csv",),
        (f"verify run {one} {other}",),
        (f"search gallery {one}",),
        ("duplicates run --threshold 0.9",),
        ("cluster run --threshold 0.8",),
        *((f"plot {kind} run", f"plot run --kind {kind}") for kind in ("pca", "histogram", "retrieval")),
    ]


def measure(spellings: tuple[str, ...], checkout: Path, folder: Path) -> Seconds | None:
    """Run a command of a checkout in a folder, in the first spelling that it takes; None if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    for line in spellings:
        words, errors = [sys.executable, "-m", "dmlkit", *line.split()], folder / "errors.txt"
        with errors.open("w") as file:
            started = time.perf_counter()
            process = subprocess.Popen(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=file)
            _, status, used = os.wait4(process.pid, 0)  # of this process and those that it waited for
            clock, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
        if process.returncode == 0:
            return Seconds(clock, used.ru_utime + used.ru_stime)
        said = f"exit code {process.returncode} {errors.read_text().strip()}"
        print(f"{checkout}: dmlkit {line}: {said}", file=sys.stderr)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--classes", type=int, help="number of class folders; default: all")
    parser.add_argument("--images", type=int, help="number of images per class; default: all")
    parser.add_argument("--other", type=Path, help="another checkout of dmlkit")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    checkouts = [HERE, *([options.other.resolve()] if options.other else [])]
    with TemporaryDirectory() as scratch:
        photos = Path(scratch, "photos")
        copy_photos(options.photos, photos, options.classes, options.images)
        lines, found = commands(photos, options.epochs), list[list[Seconds | None]]()
        folders = [Path(scratch, str(place)) for place in range(len(checkouts))]
        for folder in folders:
            folder.mkdir()
        for spellings in lines:
            with ThreadPoolExecutor() as threads:
                found.append([*threads.map(partial(measure, spellings), checkouts, folders)])
            print(f"dmlkit {spellings[0].replace(scratch + '/', '')}: {found[-1]}", file=sys.stderr, flush=True)
            if spellings[0].startswith("train") and None in found[-1]:
                sys.exit("without a run there is nothing to measure")
    rows = [[f"`dmlkit {spellings[0].replace(scratch + '/', '')}`"] for spellings in lines]
    for row, times in zip(rows, found, strict=True):
        row += [f"{value:.1f}" if one else "failed" for one in times for value in one or (0, 0)]
    trained = next(number for number, spellings in enumerate(lines) if spellings[0].startswith("train"))
    counted = [[one for one in times if one] for times in found[trained + 1 :] if None not in times]
    totals = [sum(one[place][kind] for one in counted) for place in range(len(checkouts)) for kind in (0, 1)]
    rows.append([f"{len(counted)} commands after `train`", *(f"{total:.1f}" for total in totals)])
    header = ["command", "seconds, clock", "seconds, processors"]
    header += ["other checkout, clock", "other checkout, processors"] if options.other else []
    write_report("walk", __doc__, header, rows)


if __name__ == "__main__":
    main()
