"""Times of `dmlkit serve`: how much it adds to the model, to `dmlkit embed` and to a search, and whether it grows.

The model is EfficientNet-Lite0 at 224 pixels with a head; clients are threads of this process that send one photo per
request and wait for the answer, on the same processors as the server. The model alone is `dmlkit.load(RUN).embed` with
one photo, decoding included. Requests and calls alternate; a search in a large gallery, with and without an index,
alternates with the same search in a small one.

The threads of this process wait as those of commands do, so that they leave the processors to the server's. The speed
of `dmlkit embed` counts its start too.

Run: OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=20000 python benchmarks/serve.py PHOTOS
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from embed import OVERRIDES, some_of
from gallery import gallery_on_disk
from PIL import Image
from report import write_report

import dmlkit
from dmlkit.distributed.launch import start_ranks
from dmlkit.files.image_file import image_files
from dmlkit.gallery.change import create_gallery
from dmlkit.gallery.files import IndexKind
from dmlkit.gallery.index import index_gallery
from dmlkit.recipe.file import read_recipe
from dmlkit.training.train import train
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.run import embed

SOAK = """Growth of `dmlkit serve`: 4 clients send requests without a pause.

The model is EfficientNet-Lite0 at 224 pixels with a head; clients are threads of another process that send one photo
per request to `POST /v1/identify` and wait for the answer. They start a tenth of the time earlier, since the buffers of
the allocator grow at first. Memory is that of the server's process.

Run: python benchmarks/serve.py PHOTOS soak MINUTES
"""
SINGLE, MANY = 200, 400  # requests of one client and of 16
LARGE, SMALL, DIM = 100_000, 100, 512
METHODS: tuple[IndexKind, ...] = ("int8", "binary")
RECALL = 0.99
SOAK_HEADER = ["minutes", "answers", "failed", "memory before", "growth"]
Rows = list[list[str]]


@contextmanager
def server(source: Path, port: int, *options: str) -> Generator[tuple[dmlkit.Client, int]]:
    """Yield a client of a server in a process of its own, and the number of the process."""
    command = [sys.executable, "-m", "dmlkit", "serve", str(source), "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = dmlkit.Client(f"http://127.0.0.1:{port}")
    try:
        while True:
            try:
                client.info()
                break
            except dmlkit.UserError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.5)
        yield client, process.pid
    finally:
        process.terminate()
        process.wait()


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def percentile(seconds: Sequence[float], share: float) -> float:
    return float(np.quantile(seconds, share))


def milliseconds(title: str, seconds: Sequence[float], floor: Sequence[float]) -> list[str]:
    """A row: p50 and p99, and their ratios to those of the floor."""
    cells = [f"{1e3 * percentile(seconds, share):.1f} ms" for share in (0.5, 0.99)]
    ratios = [percentile(seconds, share) / percentile(floor, 0.5) for share in (0.5, 0.99)]
    return [title, *cells, f"{ratios[0]:.2f}, {ratios[1]:.2f}"]


def single(client: dmlkit.Client, run: Path, photos: Sequence[Path]) -> Rows:
    """One client that waits for each answer, compared with the model in this process."""
    model = dmlkit.load(run, device="cpu")
    ways: dict[str, Callable[[Path], object]] = {
        "one photo by the model alone": lambda photo: model.embed([photo]),
        "one photo by POST /v1/embed": lambda photo: client.embed([photo]),
        "one photo by POST /v1/identify": lambda photo: client.identify([photo]),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for photo in islice(cycle(photos), SINGLE + 10):
        for way, work in ways.items():
            seconds[way].append(seconds_of(lambda work=work, photo=photo: work(photo)))
    warm = {way: times[10:] for way, times in seconds.items()}
    alone = warm["one photo by the model alone"]
    return [milliseconds(way, times, alone) for way, times in warm.items()]


def together(clients: dict[str, dmlkit.Client], run: Path, folder: Path, photos: Sequence[Path]) -> Rows:
    """16 clients of each server, compared with `dmlkit embed` of the same photos."""
    speeds: dict[str, list[float]] = {way: [] for way in ("dmlkit embed", *clients)}
    for turn in range(3):
        output = folder / f"embeddings-{turn}"
        shutil.rmtree(run / "vectors", ignore_errors=True)  # where they are embedded already
        took = seconds_of(lambda output=output: embed(run, folder / "photos", output=output, device="cpu"))
        speeds["dmlkit embed"].append(len(photos) / took)
        for way, client in clients.items():
            took = seconds_of(lambda client=client: embed_by_clients(client, photos))
            speeds[way].append(MANY / took)
    floor = statistics.median(speeds["dmlkit embed"])
    return [
        [way, f"{statistics.median(values):.1f} photos/s", "", f"{statistics.median(values) / floor:.2f}"]
        for way, values in speeds.items()
    ]


def embed_by_clients(client: dmlkit.Client, photos: Sequence[Path]) -> None:
    def ask(photo: Path) -> None:
        client.embed([photo])

    with ThreadPoolExecutor(16) as clients:
        list(clients.map(ask, islice(cycle(photos), MANY)))


def searches(folder: Path) -> Rows:
    """A search in a large gallery, with and without an index, compared with one in a small gallery."""
    picture = folder / "query.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(picture)
    small, large = (gallery_on_disk(folder, count, DIM) for count in (SMALL, LARGE))
    galleries = {f"{SMALL:,} x {DIM}": small, f"{LARGE:,} x {DIM}": large}
    for method in METHODS:
        path = folder / method
        shutil.copytree(large, path)
        indexed = index_gallery(path, method, RECALL)
        galleries[f"{LARGE:,} x {DIM}, --method {method}, recall {indexed.index.recall:.3f}"] = path
    seconds: dict[str, list[float]] = {name: [] for name in galleries}
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(server(path, 8911 + port))[0]
            for port, (name, path) in enumerate(galleries.items())
        }
        for _ in range(SINGLE):
            for name, client in clients.items():
                seconds[name].append(seconds_of(lambda client=client: client.search([picture])))
    warm = {name: times[10:] for name, times in seconds.items()}
    floor = next(iter(warm.values()))
    rows = [milliseconds(f"POST /v1/search in {name}", times, floor) for name, times in warm.items()]
    for row, times in zip(rows, warm.values(), strict=True):
        row.append(f"{1e3 * (percentile(times, 0.5) - percentile(floor, 0.5)):.1f} ms")
    return rows


def memory(process: int) -> float:
    """Return the resident memory of a process in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def soak(client: dmlkit.Client, process: int, photos: Sequence[Path], minutes: float) -> Rows:
    """4 clients that send requests without a pause."""
    failed, answered = 0, 0

    def ask(photo: Path) -> bool:
        try:
            client.identify([photo])
            return True
        except dmlkit.UserError:
            return False

    def run_for(minutes: float) -> None:
        nonlocal failed, answered
        end = time.monotonic() + 60 * minutes
        endless = cycle(photos)
        with ThreadPoolExecutor(4) as clients:
            while time.monotonic() < end:
                for is_answered in clients.map(ask, islice(endless, 64)):
                    failed, answered = failed + (not is_answered), answered + is_answered

    run_for(minutes / 10)  # buffers of the allocator grow at first
    before = memory(process)
    run_for(minutes)
    grown = memory(process) - before
    return [[f"{minutes:g}", f"{answered:,}", f"{failed}", f"{before:.0f} MB", f"{grown:+.0f} MB"]]


def main() -> None:
    match sys.argv[1:]:
        case [source]:
            minutes = 0.0
        case [source, "soak", number]:
            minutes = float(number)
        case _:
            sys.exit("expected: python benchmarks/serve.py PHOTOS [soak MINUTES]")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        some_of(Path(source), folder / "photos")
        photos = [Path(path) for path in image_files(folder / "photos")]
        run, gallery = folder / "run", folder / "gallery"
        train(read_recipe(Path("start/frozen_lite0"), OVERRIDES), run, device=start_ranks("cpu"))
        create_gallery(run, folder / "photos", gallery, model=ModelChoice(device="cpu"))
        with server(gallery, 8910) as (client, process):
            if minutes:
                write_report("serve_soak", SOAK, SOAK_HEADER, soak(client, process, photos, minutes))
                return
            rows = single(client, run, photos)
            with server(gallery, 8909, "--workers", "2") as (other, _):
                title = "16 clients of POST /v1/embed"
                rows += together({title: client, f"{title}, --workers 2": other}, run, folder, photos)
        rows = [[*row, ""] for row in rows] + searches(folder)
    write_report("serve", __doc__, ["what", "p50 or median", "p99", "ratio to the first of its kind", "adds"], rows)


if __name__ == "__main__":
    main()
