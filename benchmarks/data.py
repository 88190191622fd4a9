"""Reading images and tables: images/s compared with torchvision's ImageFolder, and epoch start with a million rows.

All loaders read the same 2 000 JPEGs of 500 x 375 pixels, with random resized crops to 224 pixels, flips and
normalization, in batches of 64, with as many worker processes as cores. Passes alternate between the loaders; values
are medians over passes. With `training.augment_on=device` the loader only crops boxes; resizing, flipping and
normalization are done by a GPU and are not included. The floor is the decoding by Pillow alone, on all cores. Memory is
the peak above the memory of torch and the other imports.

Run: python benchmarks/data.py [PHOTOS]

PHOTOS is a folder with one subfolder per class; both loaders read it in the same way, as an additional row.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from report import write_report
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from dmlkit.distributed.launch import keep_freed_memory
from dmlkit.loading.batches import TrainingBatches, make_loader
from dmlkit.loading.cache import images_of_split
from dmlkit.loading.cache_writer import images_to_cache, write_cache
from dmlkit.loading.inputs import TransformedImages
from dmlkit.model import Normalization
from dmlkit.recipe.schema import Recipe

IMAGES, CLASSES, BATCH, PASSES = 2000, 20, 64, 3
WORKERS = os.cpu_count() or 1
ROWS, LABELS = 1_000_000, 10_000


def write_photo(place: tuple[str, int]) -> None:
    """A JPEG of about the detail of a photograph: noise at several scales."""
    path, seed = place
    generator = np.random.default_rng(seed)
    image = np.zeros((375, 500, 3))
    for side in (4, 16, 64, 256):
        noise = Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8))
        image += np.asarray(noise.resize((500, 375), Image.Resampling.BICUBIC)) / 4
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.astype(np.uint8)).save(path, quality=90)


def decode(path: str) -> None:
    with Image.open(path) as image:
        image.convert("RGB")


def recipe(root: Path, cache: Path | None) -> Recipe:
    dataset = {"name": "folder", "root": str(root), "validation_fraction": 0.0, "cache": str(cache) if cache else None}
    return Recipe.model_validate(
        {
            "dataset": dataset,
            "transform": {"name": "imagenet"},
            "loss": {"name": "proxy_anchor"},
            "sampler": {"name": "random", "batch_size": BATCH},
        }
    )


def image_folder(train: Path) -> Callable[[], int]:
    cut = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    images = ImageFolder(str(train), transforms.Compose([*cut, normalize]))
    loader = DataLoader(images, BATCH, shuffle=True, drop_last=True, num_workers=WORKERS, persistent_workers=True)
    return lambda: sum(len(batch) for batch, _ in loader)


def ours(root: Path, cache: Path | None = None, *, on_device: bool = False) -> Callable[[], int]:
    settings = recipe(root, cache)
    dataset, transform = images_of_split(settings.dataset, "train"), settings.transform
    assert transform is not None  # a recipe of images has one
    batches = TrainingBatches(settings.sampler.build(dataset.labels, 0), 0)
    images = TransformedImages(dataset, transform, training=True, on_device=on_device)
    loader = make_loader(images, batches, workers=WORKERS, pin_memory=False)
    if on_device:  # the rest is the GPU's
        return lambda: sum(len(batch.inputs) for batch in loader)
    normalize = Normalization(transform.mean, transform.std)
    return lambda: sum(len(normalize(batch.inputs)) for batch in loader)


def medians(loaders: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Images/s of each; passes take turns."""
    seen: dict[str, list[float]] = {name: [] for name in loaders}
    for round_number in range(PASSES + 1):
        for name, run in loaders.items():
            started = time.perf_counter()
            count = run()
            if round_number:  # the first pass starts the workers
                seen[name].append(count / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in seen.items()}


def relative_to_first(speed_of: dict[str, float]) -> list[list[str]]:
    peer = next(iter(speed_of.values()))
    return [[name, f"{speed:.0f} images/s", f"{speed / peer:.2f}"] for name, speed in speed_of.items()]


def photo_speeds(photos: Path) -> list[list[str]]:
    loaders = {"PHOTOS, torchvision": image_folder(photos), "PHOTOS, dmlkit": ours(photos)}
    return relative_to_first(medians(loaders))


def speeds(root: Path, cache: Path) -> list[list[str]]:
    loaders = {
        "torchvision ImageFolder + DataLoader": image_folder(root / "train"),
        "dmlkit": ours(root),
        "dmlkit, with its cache": ours(root, cache),
        "dmlkit, with its cache and augment_on=device, loader only": ours(root, cache, on_device=True),
    }
    speed_of = medians(loaders)
    paths = [str(path) for path in sorted((root / "train").rglob("*.jpg"))[:500]]
    with ProcessPoolExecutor(WORKERS) as pool:
        list(pool.map(decode, paths[:50]))
        started = time.perf_counter()
        list(pool.map(decode, paths, chunksize=25))
        floor = len(paths) / (time.perf_counter() - started)
    return relative_to_first(speed_of | {"Pillow decoding alone": floor})


START = """
import json, re, sys, time
import torch, pyarrow.csv, pyarrow.parquet
from dmlkit.datasets import TableConfig
from dmlkit.samplers import ClassBalanced, Random
def megabytes(of):  # getrusage would count the process that started this one
    return int(re.search(of + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
open("/proc/self/clear_refs", "w").write("5")  # the imports' own peak is over
base = megabytes("VmRSS")
started = time.perf_counter()
dataset = TableConfig(file=sys.argv[1]).build("train")
balanced = sys.argv[2] == "class_balanced"
config = ClassBalanced.Config(classes_per_batch=32) if balanced else Random.Config(batch_size=128)
sampler = config.build(dataset.labels, 0)
first = sampler.batches(0)[0]
dataset.paths[first[0]]
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "peak": megabytes("VmHWM") - base, "base": base}))
"""


def starts(folder: Path) -> list[list[str]]:
    import pyarrow as pa
    from pyarrow import csv, parquet

    order = np.random.default_rng(0).permutation(ROWS)
    table = pa.table(
        {
            "path": [f"images/{index % 1000:03}/{index:08}.jpg" for index in range(ROWS)],
            "label": [f"product-{index % LABELS:05}" for index in order.tolist()],
            "split": ["train" if index % LABELS < LABELS // 2 else "test" for index in order.tolist()],
        }
    )
    csv.write_csv(table, folder / "table.csv")
    parquet.write_table(table, folder / "table.parquet")
    rows: list[list[str]] = []
    for file, sampler in (
        ("table.csv", "random"),
        ("table.csv", "class_balanced"),
        ("table.parquet", "random"),
    ):
        command = [sys.executable, "-c", START, str(folder / file), sampler]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)
        ]
        seconds = statistics.median(run["seconds"] for run in runs)
        peak, base = (statistics.median(run[key] for run in runs) for key in ("peak", "base"))
        what = f"epoch start, {ROWS:,} rows, {file.split('.')[1]}, {sampler}"
        rows.append([what, f"{seconds:.2f} s, {peak:.0f} MB", f"{base:.0f} MB for imports"])
    return rows


def main() -> None:
    keep_freed_memory()  # as every command does on a CPU; the peer has it too
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = [
            (str(folder / part / str(label) / f"{index}.jpg"), label * 1000 + index)
            for part, count in (("train", IMAGES), ("test", 2 * CLASSES))
            for label in range(0 if part == "train" else CLASSES, CLASSES if part == "train" else 2 * CLASSES)
            for index in range(count // CLASSES)
        ]
        with ProcessPoolExecutor(WORKERS) as pool:
            list(pool.map(write_photo, places, chunksize=50))
        settings = recipe(folder, None)
        write_cache(settings, images_to_cache(settings), folder / "cache", overwrite=False, advance=lambda _: None)
        rows = [*speeds(folder, folder / "cache"), *starts(folder)]
    rows += [row for photos in sys.argv[1:] for row in photo_speeds(Path(photos))]
    write_report("data", __doc__, ["what", "median", "ratio to torchvision, or baseline"], rows)


if __name__ == "__main__":
    main()
