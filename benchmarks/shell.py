"""Seconds of commands that answer at once: start of Python, imports and the answer, and `dmlkit train` until it trains.

A run of EfficientNet-Lite0 at 160 pixels and a gallery of 288 photos are made first. Every command is a process of its
own and reads a photo that no other command has read. The commands take turns, and with several trees of dmlkit the
trees do. Medians, and the range of the wall time; CPU seconds are those of all threads.

Run: python benchmarks/shell.py PHOTOS [TURNS [TREE ...]]

PHOTOS is a folder with at least 24 subfolders of 13 photos or more, one per class; 5 turns of one tree take 4 minutes
on 2 cores. Columns are named by the commits of the trees; the default is the one of this file.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from report import write_report

CLASSES, IMAGES, ROWS = 24, 12, 5000
DMLKIT = (sys.executable, "-m", "dmlkit")
UNTIL_FIRST_STEP = (
    "import os; from torch.optim.optimizer import register_optimizer_step_post_hook as hook; "
    "hook(lambda *_: os._exit(0)); from dmlkit.cli.app import main; main()"
)
SIZE = ("--set", "transform.size=160")
Cost = tuple[float, float]


def cost(tree: Path, work_folder: Path, words: tuple[str, ...], expected: int = 0) -> Cost:
    """Wall and CPU seconds of a command of a tree; compiled files and the cache are kept, as in an installation."""
    variables = {
        "PYTHONPATH": str(tree),
        "PYTHONPYCACHEPREFIX": str(work_folder / "compiled"),
        "XDG_CACHE_HOME": str(work_folder / "cache"),
    }
    unset = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | variables
    started = time.perf_counter()
    with (work_folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, cwd=work_folder)
        _, status, usage = os.wait4(process.pid, 0)
    wall, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    if process.returncode != expected:
        sys.exit(f"{tree}: {' '.join(words)}\n{(work_folder / 'log.txt').read_text()[-2000:]}")
    return wall, usage.ru_utime + usage.ru_stime


def prepare(tree: Path, work_folder: Path, photos: dict[str, list[Path]]) -> None:
    """Make a run, a gallery and their thresholds, and run what has to run once for each model."""
    for label, paths in [*photos.items()][:CLASSES]:
        (work_folder / "images" / label).mkdir(parents=True)
        for path in paths[:IMAGES]:
            (work_folder / "images" / label / path.name).symlink_to(path)
    rows = [f"{label}/{path.name},{label}" for label, paths in photos.items() for path in paths]
    (work_folder / "photos.csv").write_text("\n".join(["path,label", *rows[:ROWS]]) + "\n")
    dataset = ("--set", f"dataset={{name: folder, root: {work_folder / 'images'}}}")
    few = ("--set", "training={epochs: 1, workers: 0}", "--set", "sampler.batch_size=40")
    for words in (
        ("train", "start/full_lite0", "-o", "run", *dataset, *SIZE, *few),
        ("calibrate", "run"),
        ("eval", "run"),
        ("gallery", "create", "run", "images", "-o", "gallery"),
        ("calibrate", "gallery"),
        ("identify", "gallery", "images", "--device", "cpu+onnxruntime"),
    ):
        cost(tree, work_folder, (*DMLKIT, *words))


def commands(new: Iterator[Path], photos: Path, turn: int) -> dict[str, tuple[str, ...]]:
    """The commands of one turn, by what the table calls them; each reads the next photo."""
    a, b, c, d, e, f = (str(next(new)) for _ in range(6))
    answers = {
        "identify GALLERY one.jpg": ("identify", "gallery", a),
        "identify GALLERY one.jpg --device cpu+onnxruntime": ("identify", "gallery", b, "--device", "cpu+onnxruntime"),
        "search GALLERY one.jpg": ("search", "gallery", c),
        "verify RUN a.jpg b.jpg": ("verify", "run", d, e),
        "embed RUN one.jpg": ("embed", "run", f, "-o", f"one-{turn}"),
        "eval RUN, embedded before": ("eval", "run"),
        "--help": ("--help",),
        "list": ("list",),
        "schema": ("schema",),
        "eval of a path that does not exist": ("eval", "no/such/run"),
    }
    first = (sys.executable, "-c", UNTIL_FIRST_STEP, "train")
    table = ("start/full_lite0", *SIZE, "--set", f"dataset={{name: table, file: photos.csv, root: {photos}}}")
    trainings = {
        "train glyphs/proxy_anchor, until its first step": ("glyphs/proxy_anchor", "-o", f"glyphs-{turn}"),
        f"train a table of {ROWS:,} photos, until its first step": (*table, "-o", f"table-{turn}"),
    }
    return {
        **{name: (*DMLKIT, *words) for name, words in answers.items()},
        **{name: (*first, *words) for name, words in trainings.items()},
    }


def name_of(tree: Path) -> str:
    words = ("git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude=*")
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("expected: python benchmarks/shell.py PHOTOS [TURNS [TREE ...]]")
    turns = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    trees = [Path(tree).resolve() for tree in sys.argv[3:]] or [Path(__file__).resolve().parent.parent]
    folders = sorted(path.resolve() for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    photos = {path.name: sorted(path.iterdir()) for path in folders}
    costs: dict[str, dict[Path, list[Cost]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as name:
        work_folders = {tree: Path(name) / str(index) for index, tree in enumerate(trees)}
        unread = {
            tree: cycle([path for paths in [*photos.values()][:CLASSES] for path in paths[IMAGES:]]) for tree in trees
        }
        for tree, work_folder in work_folders.items():
            prepare(tree, work_folder, photos)
        for turn in range(turns):
            for tree, work_folder in work_folders.items():
                for title, words in commands(unread[tree], Path(sys.argv[1]).resolve(), turn).items():
                    expected = 2 if "does not exist" in title else 0
                    costs[title][tree].append(cost(tree, work_folder, words, expected))
    header, rows = ["command"], list[list[str]]()
    for tree in trees:
        header += [f"{name_of(tree)}: wall s", "range", "CPU s"]
    for title, by_tree in costs.items():
        cells: list[str] = [title]
        for tree in trees:
            walls, cpus = zip(*by_tree[tree], strict=True)
            cells += [f"{statistics.median(walls):.2f}", f"{min(walls):.2f} .. {max(walls):.2f}"]
            cells.append(f"{statistics.median(cpus):.2f}")
        rows.append(cells)
    write_report("shell", f"{(__doc__ or '').strip()}\n\n{turns} turn{'s' if turns > 1 else ''}.", header, rows)


if __name__ == "__main__":
    main()
