"""Overhead of `dmlkit embed`: photos/s compared with a bare loop over the same model.

The model is EfficientNet-Lite0 at 224 pixels with a head. Both read the model and start the same loader. The bare loop
then keeps the output of the model; `dmlkit embed` checks the embeddings and writes them in parts from which a killed
process resumes, together with the table of items and the manifest. The two alternate; values are medians over passes
of every fifth photo.

Run: python benchmarks/embed.py PHOTOS
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import write_report

from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.images import dataset_of
from dmlkit.embedding.job import EmbedJob, PartEmbedder
from dmlkit.embedding.run import embed
from dmlkit.embedding.trained import load_model
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train

ROUNDS, EVERY = 5, 5
OVERRIDES = ["dataset={name: glyphs, classes: 20, images_per_class: 8}", "training.epochs=1", "sampler.batch_size=32"]


def some_of(photos: Path, folder: Path) -> int:
    """Links to every fifth photo of each class; how many."""
    count = 0
    for label in sorted(path for path in photos.iterdir() if path.is_dir()):
        (folder / label.name).mkdir(parents=True)
        for photo in sorted(label.iterdir())[::EVERY]:
            (folder / label.name / photo.name).symlink_to(photo.resolve())
            count += 1
    return count


@torch.inference_mode()
def bare_loop(run: Path, photos: Path, output: Path) -> None:
    """Read the model, start the loader, and keep what the model makes of its batches."""
    fabric = start_fabric("cpu")
    trained = load_model(RunFolder(run), fabric)
    dataset = dataset_of(photos, "test", trained.recipe)
    job = EmbedJob(dataset, source="bare", output=output, skip_bad_images=False)
    embedder = PartEmbedder(job, trained, fabric, workers=None)
    embedder.batches.numbers = [*range(len(job.parts))]
    torch.cat([trained.model(batch.inputs) for batch in embedder.loaders[0][1]])


def main() -> None:
    (given,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = some_of(Path(given), folder / "photos")
        train(read_recipe(Path("start/frozen_lite0"), OVERRIDES), folder / "run", device=start_fabric("cpu"))
        outputs = iter(folder / f"embeddings-{number}" for number in range(ROUNDS + 1))
        loops: dict[str, Callable[[], object]] = {
            "bare loop of the model": lambda: bare_loop(folder / "run", folder / "photos", folder / "bare"),
            "dmlkit embed": lambda: embed(folder / "run", folder / "photos", output=next(outputs)),
        }
        speeds: dict[str, list[float]] = {loop: [] for loop in loops}
        for _ in range(ROUNDS):
            for loop, run in loops.items():
                started = time.perf_counter()
                run()
                speeds[loop].append(count / (time.perf_counter() - started))
    medians = {loop: statistics.median(found) for loop, found in speeds.items()}
    bare = medians["bare loop of the model"]
    rows = [
        [loop, f"{speed:.0f}", f"{max(speeds[loop]):.0f}", f"{speed / bare:.3f}"] for loop, speed in medians.items()
    ]
    write_report("embed", __doc__, ["loop", "photos/s, median", "photos/s, best", "ratio of medians"], rows)


if __name__ == "__main__":
    main()
