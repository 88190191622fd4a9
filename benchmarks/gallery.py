"""Search in stored embeddings: folders and galleries compared with FAISS.

Points are unit vectors in random clusters, and queries are drawn in the same way. Values are medians; the tools run in
turn in one process, and files are in the page cache.

    python benchmarks/gallery.py [SHARE]

A SHARE below 1 reduces all sizes by this factor and writes no report: 0.02 takes a minute on 2 cores.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import faiss
import numpy as np
import pyarrow as pa
import torch
from evaluation import SOP, embeddings, peak_memory, product, timed
from PIL import Image
from pyarrow import parquet
from report import write_report
from torch import Tensor
from torch.nn.functional import normalize

from dmlkit.distributed.launch import start_ranks
from dmlkit.gallery.change import add_images, create_gallery
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.images import LabelledImage
from dmlkit.gallery.index import ApproximateGallery, index_gallery
from dmlkit.gallery.manifest import changing, commit, new_rows
from dmlkit.metrics import retrieval_metrics
from dmlkit.nearest.search import StoredGallery
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.manifest import Manifest
from dmlkit.vectors.store import VectorStore, keys_of, write_part
from dmlkit.vectors.trained import describe, load_model

RECIPE = """\
dataset: {{name: glyphs, classes: 12, images_per_class: 6, size: 16, validation_fraction: 0}}
transform: {{name: plain, size: 16}}
backbone: {{name: small_cnn, width: 4}}
embedding_dim: {dim}
loss: {{name: proxy_anchor}}
sampler: {{name: random, batch_size: 8}}
optimizer: {{name: adamw, lr: 0.003}}
training: {{epochs: 1, workers: 0}}
"""
BLOCK = 50_000
QUERIES, K = 1000, 10
Rows = list[list[str]]


def blocks(count: int, dim: int, seed: int = 0) -> Iterator[Tensor]:
    """Unit vectors in random clusters of about 1 000."""
    centers = torch.randn(max(10, count // 1000), dim, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, count, BLOCK):
        rows = min(BLOCK, count - start)
        chosen = centers[torch.randint(len(centers), (rows,), generator=generator)]
        yield normalize(chosen + 0.5 * torch.randn(rows, dim, generator=generator), dim=1)


def trained_run(folder: Path, dim: int) -> Path:
    run = folder / f"run-{dim}"
    if not run.exists():
        train(parse_recipe(RECIPE.format(dim=dim), "benchmarks/gallery.py"), run, device=start_ranks("cpu"))
    return run


def embeddings_on_disk(folder: Path, count: int, dim: int) -> EmbeddingFolder:
    path = folder / f"embeddings-{count}-{dim}"
    path.mkdir()
    trained = load_model(RunFolder(trained_run(folder, dim)), start_ranks("cpu"))
    manifest = Manifest(**dict(describe(trained)), source="clusters", count=count, skipped=())
    points = np.lib.format.open_memmap(path / "embeddings.npy", "w+", np.dtype("<f4"), (count, dim))
    for start, block in zip(range(0, count, BLOCK), blocks(count, dim), strict=True):
        points[start : start + len(block)] = block.numpy()
    points.flush()
    ids = pa.array(range(count))
    paths = pa.array([f"{row}.jpg" for row in range(count)])
    parquet.write_table(pa.table({"id": ids, "path": paths, "label": paths}), path / "items.parquet")
    manifest.write(path / "manifest.json")
    return EmbeddingFolder(path)


def gallery_on_disk(folder: Path, count: int, dim: int) -> Path:
    path = folder / f"gallery-{count}-{dim}"
    create_gallery(trained_run(folder, dim), None, path, model=ModelChoice(device="cpu"))
    names = [f"{row:032x}" for row in range(count)]
    images = {name: LabelledImage(f"/none/{name}.jpg", name) for name in names}
    place, keys = path / "vectors" / "made", keys_of([*map(bytes.fromhex, names)])
    for start, block in zip(range(0, count, BLOCK), blocks(count, dim), strict=True):
        write_part(place, keys[start : start + BLOCK], block)
    store = VectorStore(place, dim)
    with changing(path) as manifest:
        commit(path, manifest, new_rows(images, store, store.find(keys), 0))
    return path


def opening_rows(path: Path, count: int, runs: int = 5) -> Rows:
    """Time from opening a gallery to its first answer."""
    (queries,) = blocks(1, 512, seed=1)
    opened, answered = list[float](), list[float]()
    for _ in range(runs):
        started = perf_counter()
        gallery = GalleryFolder(path)
        opened.append(perf_counter() - started)
        StoredGallery(gallery.manifold, gallery).search(queries[:1], K)
        answered.append(perf_counter() - started)
    size = f"{count:,} x 512"
    floor = float(np.median(opened))
    return [
        row(f"open a gallery of {size}", "dmlkit, a gallery", floor, floor),
        row(f"and its first answer, k={K}", "dmlkit, a gallery", float(np.median(answered)), floor),
    ]


def row(title: str, tool: str, seconds: float, floor: float, note: str = "") -> list[str]:
    return [title, tool, f"{1e3 * seconds:.1f} ms", f"{seconds / floor:.2f}", note]


def exact_rows(folder: Path, count: int, runs: int = 5) -> Rows:
    dim = 512
    stored, path = embeddings_on_disk(folder, count, dim), gallery_on_disk(folder, count, dim)
    gallery = GalleryFolder(path)
    (queries,) = blocks(QUERIES, dim, seed=1)
    index = faiss.IndexFlatIP(dim)
    for block in blocks(count, dim):
        index.add(block.numpy())
    seconds = timed(
        {
            "faiss": lambda: index.search(queries.numpy(), K),
            "folder": lambda: StoredGallery(stored.manifold, stored).search(queries, K),
            "gallery": lambda: StoredGallery(gallery.manifold, gallery).search(queries, K),
        },
        runs,
    )
    title = f"{QUERIES} queries in {count:,} x {dim}, k={K}, exact"
    return [
        row(title, "FAISS IndexFlatIP, in memory", seconds["faiss"], seconds["faiss"]),
        row(title, "dmlkit, a folder of embeddings", seconds["folder"], seconds["faiss"]),
        row(title, "dmlkit, a gallery", seconds["gallery"], seconds["faiss"]),
        *opening_rows(path, count),
    ]


def memory_rows(folder: Path, count: int) -> Rows:
    stored = embeddings_on_disk(folder, count, 512)
    (queries,) = blocks(QUERIES, 512, seed=1)
    grown = peak_memory(lambda: StoredGallery(stored.manifold, stored).search(queries, K))
    return [
        [
            f"{QUERIES} queries in {count:,} x 512",
            "dmlkit, a folder of embeddings",
            "",
            "",
            f"{grown:.2f} GB additional",
        ]
    ]


def approximate_rows(path: Path, count: int, runs: int = 3) -> Rows:
    result = index_gallery(path, "ivf_pq", 0.99)
    gallery = GalleryFolder(path)
    (queries,) = blocks(QUERIES, 128, seed=1)
    exact, through = StoredGallery(gallery.manifold, gallery), ApproximateGallery(gallery, result.index)
    seconds = timed({"exact": lambda: exact.search(queries, K), "index": lambda: through.search(queries, K)}, runs)
    right = through.search(queries, K).similarities >= exact.search(queries, K).similarities[:, -1:]
    title = f"{QUERIES} queries in {count:,} x 128, k={K}"
    built = (
        f"recall {right.double().mean():.4f} now, {result.index.recall:.4f} when built, in {result.build_seconds:.0f} s"
    )
    return [
        row(title, "dmlkit, a gallery, exact", seconds["exact"], seconds["exact"]),
        row(title, "dmlkit, index ivf_pq", seconds["index"], seconds["exact"], built),
    ]


def photos(folder: Path, seed: int, count: int = 100) -> Path:
    folder.mkdir()
    generator = np.random.default_rng(seed)
    for number in range(count):
        Image.fromarray(generator.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def written_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def add_rows(folder: Path, galleries: dict[int, Path], runs: int = 5) -> Rows:
    rows: Rows = []
    floor = None
    for count, path in galleries.items():
        taken: list[float] = []
        size = 0
        for turn in range(runs + 1):
            images, before = photos(folder / f"photos-{count}-{turn}", count + turn), written_bytes(path)
            started = perf_counter()
            add_images(path, images, label="new", model=ModelChoice(device="cpu"))
            taken.append(perf_counter() - started)
            size = written_bytes(path) - before
        seconds = float(np.median(taken[1:]))
        floor = floor or seconds
        rows.append(
            row(f"100 images added to {count:,} x 128", "dmlkit gallery add", seconds, floor, f"{size:,} bytes")
        )
    return rows


def pair_rows(images: int, classes: int) -> Rows:
    points, labels = embeddings(images, classes, noise=3.0)
    metrics = ["eer", "tar@far=1e-3"]
    grown = peak_memory(lambda: retrieval_metrics(points, labels, metrics=metrics))
    seconds = timed(
        {
            "product": lambda: product(points, points),
            "pairs": lambda: retrieval_metrics(points, labels, metrics=metrics),
        },
        1,
    )
    title = f"all pairs of {images:,} x 512"
    return [
        row(title, "matrix product alone", seconds["product"], seconds["product"]),
        row(title, "dmlkit, eer and tar@far=1e-3", seconds["pairs"], seconds["product"], f"{grown:.2f} GB additional"),
    ]


def all_rows(folder: Path, share: float) -> Iterator[Rows]:
    large, small = int(1_000_000 * share), int(100_000 * share)
    yield memory_rows(folder, large)  # first: later what others have freed would be used again
    yield pair_rows(int(SOP[0] * share), int(SOP[1] * share))
    yield exact_rows(folder, small)
    galleries = {count: gallery_on_disk(folder, count, 128) for count in (large // 100, large)}
    yield add_rows(folder, galleries)
    yield approximate_rows(galleries[large], large)


if __name__ == "__main__":
    start_ranks("cpu")
    share = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as place:
        rows: Rows = []
        for table in all_rows(Path(place), share):
            for cells in table:
                print(" | ".join(cells), flush=True)
            rows += table
    if share == 1:
        write_report("gallery", __doc__, ["what", "who", "median", "ratio", "note"], rows)
