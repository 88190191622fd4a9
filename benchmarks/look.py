"""Inspection of embeddings: `dmlkit inspect` and `dmlkit duplicates`, each in its own process.

Time is that of the complete command and memory is the peak of its process; both include the start of Python and torch.
The demo is the run of `make demo`, which is trained here first. The large sets of embeddings are unit vectors in 600
random clusters, without pictures; in the set for `duplicates` every hundredth vector is a copy of the previous one. The
page is usable when headless Chromium has drawn its table and its map. Suspects: 5 % of the labels are changed to wrong
ones, and the value is the share of wrong labels among as many suspects, found in the same way as on the page; for a
run, all splits are used together. PHOTOS_RUN is a run that was trained on photos; without it no report is written.

    python benchmarks/look.py [PHOTOS_RUN]
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from gallery import trained_run
from pyarrow import parquet
from report import write_report
from torch.nn.functional import normalize

from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation.mistakes import NEIGHBORS, planted_precision
from dmlkit.gallery.sources import open_points
from dmlkit.nearest.near_pairs import neighbors_of
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.manifest import Manifest
from dmlkit.vectors.points import in_memory
from dmlkit.vectors.trained import describe, load_model

CLUSTERS, BLOCK, ROUNDS = 600, 50_000, 3
DEMO = Path(__file__).parent.parent / "recipes" / "glyphs" / "proxy_anchor.yaml"
COMMAND = (
    "import sys; from dmlkit.cli.app import main\n"
    "try: main()\n"
    "except SystemExit as end: code = end.code or 0\n"
    "else: code = 0\n"
    "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]\n"
    "print('PEAK', peak); sys.exit(code)"  # getrusage would report the peak of the parent process
)


def run(*words: object) -> tuple[float, float, str]:
    """Seconds, GB at most, and what it said."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", COMMAND, *map(str, words)], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    text, peak = done.stdout.rsplit("PEAK", 1)
    return seconds, int(peak) * 1024 / 1e9, text


def many(folder: Path, count: int, dim: int, *, copies: bool = False) -> Path:
    """A folder of embeddings."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(CLUSTERS, dim, generator=generator)
    points = np.lib.format.open_memmap(folder / "embeddings.npy", "w+", np.dtype("<f4"), (count, dim))
    labels = torch.randint(CLUSTERS, (count,), generator=generator)
    for start in range(0, count, BLOCK):
        block_labels = labels[start : start + BLOCK]
        points[start : start + BLOCK] = normalize(
            centers[block_labels] + 0.7 * torch.randn(len(block_labels), dim, generator=generator), dim=1
        ).numpy()
    if copies:
        points[1::100] = points[0::100]
    points.flush()
    names, paths = [f"class {label}" for label in labels.tolist()], [f"{row}.jpg" for row in range(count)]
    parquet.write_table(pa.table({"id": range(count), "path": paths, "label": names}), folder / "items.parquet")
    trained = load_model(RunFolder(trained_run(folder.parent, dim)), start_ranks("cpu"))
    manifest = Manifest(**dict(describe(trained)), source="clusters", count=count, skipped=())
    manifest.write(folder / "manifest.json")
    return folder


def usable(page: Path) -> float | None:
    """Seconds until headless Chromium shows the table of classes and the map; None without Playwright or Chromium."""
    try:
        from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    taken: list[float] = []
    with sync_playwright() as driver:
        path = shutil.which("chromium") or driver.chromium.executable_path
        if not Path(path).exists():
            return None
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for _ in range(ROUNDS):
            opened = browser.new_page()
            started = time.perf_counter()
            opened.goto(page.absolute().as_uri())
            opened.locator("#class-table tr").nth(1).wait_for()
            opened.locator("#filter").fill("1")
            taken.append(time.perf_counter() - started)
            opened.close()
        browser.close()
    return statistics.median(taken)


def precision(source: Path) -> str:
    points = in_memory(open_points(source, split="all" if (source / "recipe.yaml").exists() else None))
    names, labels = points.class_codes()
    neighbors = neighbors_of(points.manifold, points.points, NEIGHBORS)
    return f"{planted_precision(labels, neighbors.indices):.2f} of {len(points):,} images, {len(names)} classes"


def main(photos_run: Path | None) -> None:
    rows: list[list[str]] = []

    def add_row(title: str, seconds: float | None, peak: float | None, note: str = "") -> None:
        rows.append([title, f"{seconds:.1f} s" if seconds else "", f"{peak:.2f} GB" if peak else "", note])
        print(" | ".join(rows[-1]), flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = folder / "demo"
        run("train", DEMO, "-o", demo)
        taken = [run("inspect", demo, "-o", folder / "demo.html") for _ in range(ROUNDS)]
        add_row("inspect the demo", statistics.median(turn[0] for turn in taken), max(turn[1] for turn in taken))
        add_row("suspects, the demo's glyphs", None, None, precision(demo))
        if photos_run:
            add_row("suspects, photos", None, None, precision(photos_run))
        page = folder / "many.html"
        seconds, peak, _ = run("inspect", many(folder / "many", 60_000, 512), "-o", page)
        add_row("inspect 60,000 x 512", seconds, peak, f"a page of {page.stat().st_size / 1e6:.1f} MB")
        add_row("time until that page is usable", usable(page), None)
        source = many(folder / "copies", 500_000, 128, copies=True)
        seconds, peak, _ = run("duplicates", source, "--threshold", "0.99999", "-o", folder / "found.csv")
        pairs = (folder / "found.csv").read_text().splitlines()
        add_row("duplicates among 500,000 x 128", seconds, peak, f"{len(pairs) - 1:,} of 10,000 images with a copy")
    if photos_run:  # else a whole table would be replaced by one without its photos
        write_report("look", __doc__, ["what", "time", "memory", "note"], rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
