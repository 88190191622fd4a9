"""How long the commands of the first hour take, from `dmlkit start` to a gallery and plots, each in its own process.

With --other the same commands run with the package of another checkout too, each command by turns, in folders of their
own. Seconds of a processor include those of the processes that a command starts.

Run: python benchmarks/walk.py PHOTOS [--other CHECKOUT] [--epochs 20]
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from report import write_report

HERE = Path(__file__).parent.parent
SUFFIXES = (".jpg", ".jpeg", ".png")


def commands(photos: Path, epochs: int) -> list[str]:
    """Return the command lines; the last class folder is asked for, and two photos of it are compared."""
    asked = max(path for path in photos.iterdir() if path.is_dir())
    one, other = [path for path in sorted(asked.iterdir()) if path.suffix.lower() in SUFFIXES][:2]
    return [
        f"start {photos} -o recipe.yaml",
        f"train recipe.yaml -o run --set training.epochs={epochs}",
        "eval run",
        "eval run",
        "inspect run -o inspection.html",
        "calibrate run --far 0.05",
        f"gallery create run {photos} -o gallery",
        "gallery info gallery",
        f"identify gallery {asked}",
        f"verify run {one} {other}",
        f"search gallery {one}",
        "duplicates run",
        "cluster run --threshold 0.8",
        "plot pca run",
        "plot histogram run",
        "plot retrieval run",
    ]


def measure(words: list[str], checkout: Path, folder: Path) -> tuple[float, float]:
    """Run a command of a checkout in a folder, and return the seconds of the clock and of the processors."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    ran = subprocess.run(
        [sys.executable, "-m", "dmlkit", *words], cwd=folder, env=environment, capture_output=True, text=True
    )
    clock, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ran.returncode:
        sys.exit(f"{checkout}: dmlkit {' '.join(words)}: {ran.stderr.strip()}")
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--other", type=Path, help="another checkout of dmlkit")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    checkouts = [HERE, *([options.other.resolve()] if options.other else [])]
    lines, found = commands(options.photos.resolve(), options.epochs), dict[tuple[int, Path], tuple[float, float]]()
    with TemporaryDirectory() as scratch:
        for number, line in enumerate(lines):
            for place, checkout in enumerate(checkouts):
                folder = Path(scratch, str(place))
                folder.mkdir(exist_ok=True)
                found[number, checkout] = measure(line.split(), checkout, folder)
                print(f"{line.split()[0]}: {found[number, checkout][0]:.1f} s", file=sys.stderr)
    photos = str(options.photos.resolve())
    rows = [
        [
            f"dmlkit {line.replace(photos, 'photos')}",
            *(f"{value:.1f}" for checkout in checkouts for value in found[number, checkout]),
        ]
        for number, line in enumerate(lines)
    ]
    after = range(next(number for number, line in enumerate(lines) if line.startswith("train")) + 1, len(lines))
    totals = [sum(found[number, checkout][kind] for number in after) for checkout in checkouts for kind in (0, 1)]
    rows.append(["all after train", *(f"{total:.1f}" for total in totals)])
    header = ["command", "seconds, clock", "seconds, processors"]
    header += ["other checkout, clock", "other checkout, processors"] if options.other else []
    write_report("walk", __doc__, header, rows)


if __name__ == "__main__":
    main()
