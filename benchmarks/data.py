"""Reading images and tables: images/s compared with torchvision's ImageFolder, and epoch start with a million rows.

All loaders read the same 2 000 JPEGs of 500 x 375 pixels, with random resized crops to 224 pixels, flips and
normalization, in batches of 64, with as many worker processes as cores. Passes alternate between the loaders; values
are medians over passes. The floor is the decoding by Pillow alone, on all cores. Memory is the peak above the memory of
torch and the other imports.

Run: python benchmarks/data.py [PHOTOS]

PHOTOS is a folder with one subfolder per class; both loaders read it in the same way, as an additional row.

`--augment` measures `transform.augment` alone (data_augment.md): CPU time of one process per image, for 64 of these
images, decoded, cropped, augmented and normalized by dmlkit and by torchvision's v2 transforms of the same names on
tensors. Passes alternate; medians of 3 after a first.
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
from typing import Any

import numpy as np
import torch
from PIL import Image
from report import write_report
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from dmlkit.distributed.launch import keep_freed_memory
from dmlkit.loading.batches import TrainingBatches, make_loader
from dmlkit.loading.inputs import TransformedImages
from dmlkit.model import Normalization
from dmlkit.recipe.schema import Recipe

IMAGES, CLASSES, BATCH, PASSES = 2000, 20, 64, 3
WORKERS = os.cpu_count() or 1
ROWS, LABELS = 1_000_000, 10_000


def write_photo(photo: tuple[str, int]) -> None:
    """A JPEG of about the detail of a photograph: noise at several scales."""
    path, seed = photo
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


def recipe(root: Path, augment: list[dict[str, Any]] | None = None) -> Recipe:
    return Recipe.model_validate(
        {
            "dataset": {"name": "folder", "root": str(root), "validation_fraction": 0.0},
            "transform": {"name": "imagenet", "augment": tuple(augment or ())},
            "loss": {"name": "proxy_anchor"},
            "sampler": {"name": "random", "batch_size": BATCH},
        }
    )


AUGMENTED: dict[str, tuple[list[dict[str, Any]], list[v2.Transform]]] = {
    "crop and flip": ([], []),
    "trivial_augment, random_erasing": (
        [{"name": "trivial_augment"}, {"name": "random_erasing"}],
        [v2.TrivialAugmentWide(), v2.RandomErasing()],
    ),
    "color_jitter": (
        [{"name": "color_jitter", "brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1}],
        [v2.ColorJitter(0.4, 0.4, 0.4, 0.1)],
    ),
}


def augmented_speeds(root: Path) -> list[list[str]]:
    """CPU milliseconds per image of one process, with each augmentation."""
    rows: list[list[str]] = []
    for name, (augment, theirs) in AUGMENTED.items():
        normalize = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        cut = [v2.PILToTensor(), v2.RandomResizedCrop(224)]
        whole = v2.Compose([*cut, v2.RandomHorizontalFlip(), *theirs, v2.ToDtype(torch.float32, scale=True), normalize])
        passes = {
            "torchvision": torchvision_loader(root / "train", whole, 0),
            "dmlkit": ours(root, augment=augment, workers=0),
        }
        milliseconds: dict[str, list[float]] = {peer: [] for peer in passes}
        for _ in range(4):
            for peer, run in passes.items():
                started = time.process_time()
                count = run()
                milliseconds[peer].append(1000 * (time.process_time() - started) / count)
        medians_of = {peer: statistics.median(values[1:]) for peer, values in milliseconds.items()}
        rows += [
            [name, peer, f"{value:.2f} ms", f"{value / medians_of['torchvision']:.2f}"]
            for peer, value in medians_of.items()
        ]
    return rows


def image_folder(train: Path) -> Callable[[], int]:
    cut = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    return torchvision_loader(train, transforms.Compose([*cut, normalize]), WORKERS)


def torchvision_loader(train: Path, transform: Callable[[Any], Tensor], workers: int) -> Callable[[], int]:
    loader = DataLoader(
        ImageFolder(str(train), transform),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda: sum(len(batch) for batch, _ in loader)


def ours(root: Path, *, augment: list[dict[str, Any]] | None = None, workers: int = WORKERS) -> Callable[[], int]:
    settings = recipe(root, augment)
    dataset, transform = settings.dataset.build("train"), settings.transform
    assert transform is not None  # a recipe of images has one
    batches = TrainingBatches(settings.sampler.build(dataset.labels, 0), 0)
    images = TransformedImages(dataset, transform, training=True)
    loader = make_loader(images, batches, workers=workers, pin_memory=False)
    normalize = Normalization(transform.mean, transform.std)
    return lambda: sum(len(normalize(batch.inputs)) for batch in loader)


def medians(loaders: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Images/s of each; passes take turns."""
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for round_number in range(PASSES + 1):
        for name, run in loaders.items():
            started = time.perf_counter()
            count = run()
            if round_number:  # the first pass starts the workers
                rates[name].append(count / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in rates.items()}


def relative_to_first(speed_of: dict[str, float]) -> list[list[str]]:
    peer = next(iter(speed_of.values()))
    return [[name, f"{speed:.0f} images/s", f"{speed / peer:.2f}"] for name, speed in speed_of.items()]


def photo_speeds(photos: Path) -> list[list[str]]:
    loaders = {"PHOTOS, torchvision": image_folder(photos), "PHOTOS, dmlkit": ours(photos)}
    return relative_to_first(medians(loaders))


def speeds(root: Path) -> list[list[str]]:
    loaders = {"torchvision ImageFolder + DataLoader": image_folder(root / "train"), "dmlkit": ours(root)}
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
    for file, sampler in (("table.csv", "random"), ("table.csv", "class_balanced"), ("table.parquet", "random")):
        command = [sys.executable, "-c", START, str(folder / file), sampler]
        runs = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)
        ]
        seconds = statistics.median(run["seconds"] for run in runs)
        peak, base = (statistics.median(run[key] for run in runs) for key in ("peak", "base"))
        title = f"epoch start, {ROWS:,} rows, {file.split('.')[1]}, {sampler}"
        rows.append([title, f"{seconds:.2f} s, {peak:.0f} MB", f"{base:.0f} MB for imports"])
    return rows


def write_photos(folder: Path, images: int) -> None:
    photos = [
        (str(folder / part / str(label) / f"{index}.jpg"), label * 1000 + index)
        for part, count in (("train", images), ("test", 2 * CLASSES))
        for label in range(0 if part == "train" else CLASSES, CLASSES if part == "train" else 2 * CLASSES)
        for index in range(count // CLASSES)
    ]
    with ProcessPoolExecutor(WORKERS) as pool:
        list(pool.map(write_photo, photos, chunksize=50))


def main() -> None:
    keep_freed_memory()  # as every command does on a CPU; the peer has it too
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if sys.argv[1:] == ["--augment"]:
            write_photos(folder, 80)
            rows = augmented_speeds(folder)
            write_report("data_augment", __doc__, ["augment", "library", "CPU time per image", "ratio"], rows)
            return
        write_photos(folder, IMAGES)
        rows = [*speeds(folder), *starts(folder)]
    rows += [row for photos in sys.argv[1:] for row in photo_speeds(Path(photos))]
    write_report("data", __doc__, ["what", "median", "ratio to torchvision, or baseline"], rows)


if __name__ == "__main__":
    main()
