"""Overhead of `dmlkit embed`: photos/s compared with a bare loop over the same model.

The model is EfficientNet-Lite0 at 224 pixels with a head. Both read the model and start the same loader. The bare loop
then keeps the output of the model; `dmlkit embed` checks the embeddings and writes them in parts from which a killed
process resumes, together with the table of items and the manifest. The two alternate; values are medians over passes
of every fifth photo.

Run: python benchmarks/embed.py PHOTOS [engines]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from report import write_report

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.loading.batches import evaluation_loader
from dmlkit.model import build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.vectors.fill import FillJob, PartEmbedder
from dmlkit.vectors.images import dataset_of
from dmlkit.vectors.in_memory import embed_images
from dmlkit.vectors.run import embed
from dmlkit.vectors.store import BATCH_IMAGES, image_keys, stored_model
from dmlkit.vectors.trained import TrainedModel, computed_by, load_model

ROUNDS, EVERY = 5, 5
ENGINES = """Photos/s of the runtimes of `dmlkit embed` compared with a bare eager PyTorch loop, decoding included.

Weights are random; a photo is resized to 224 pixels by the same loader in this process. The bare loop computes the
model in float32 with contiguous tensors; dmlkit's own torch uses channels-last tensors. The loops alternate in one
process over 64 evenly spaced photos; the better of two passes. Agreement with torch on 64 photos: least cosine, and of
how many photos the 10 nearest are the same; with random weights it says little about trained ones.

Run: python benchmarks/embed.py PHOTOS engines
"""
BACKBONES = {
    "EfficientNet-Lite0": ("tf_efficientnet_lite0", ("onnxruntime", "bf16")),
    "ResNet-50": ("resnet50", ("bf16",)),
    "ViT-S/16": ("vit_small_patch16_224", ("bf16",)),
    "ConvNeXt-T": ("convnext_tiny", ("bf16",)),
}
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
    ranks = start_ranks("cpu")
    trained = load_model(RunFolder(run), ranks)
    dataset = dataset_of(photos, "test", trained.recipe)
    job = FillJob(dataset, image_keys(dataset), output, stored_model(trained), missing=np.arange(len(dataset)))
    embedder = PartEmbedder(job, trained, ranks, workers=None)
    embedder.batches.numbers = job.numbers()
    torch.cat([trained.model(batch.inputs) for batch in embedder.loaders[0][1]])


def engines(photos: Path) -> None:
    """Time every backbone with its engines in turns."""
    rows: list[list[str]] = []
    for title, (name, ways) in BACKBONES.items():
        overrides = [
            f"dataset={{name: folder, root: {photos}}}",
            f"backbone={{name: timm, model: {name}, weights: null, tuning: {{name: none}}}}",
        ]
        recipe = read_recipe(Path("start/frozen_lite0"), overrides)
        torch.manual_seed(0)
        model = build_model(recipe).eval()
        bare = deepcopy(model).to(memory_format=torch.contiguous_format)
        images = SomeImages(recipe.dataset.build("train"))
        torch_model = TrainedModel.of(recipe, model)
        models = {"bare eager loop": TrainedModel.of(recipe, bare), "dmlkit torch": torch_model}
        models |= {f"dmlkit {way}": computed_by(torch_model, Ranks(torch.device("cpu"), way)) for way in ways}
        seconds: dict[str, list[float]] = {loop: [] for loop in models}
        for _ in range(2):
            for loop, trained in models.items():
                started = time.perf_counter()
                if loop == "bare eager loop":
                    eager(bare, recipe, images)
                else:
                    embed_images(trained, Ranks(torch.device("cpu")), images, str(photos))
                seconds[loop].append(time.perf_counter() - started)
        slow = min(seconds["bare eager loop"])
        for loop, times in seconds.items():
            computation = models[loop].computation
            agreement = (
                f"{computation.cosine:.6f}, {computation.same_nearest} of {computation.images}" if computation else ""
            )
            rows.append([title, loop, f"{len(images) / min(times):.1f}", f"{slow / min(times):.2f}", agreement])
        print(*rows[-len(models) :], sep="\n", flush=True)
    header = ["backbone", "loop", "photos/s", "ratio to the bare loop", "cosine, same 10 nearest"]
    write_report("embed_engines", ENGINES, header, rows)


@torch.inference_mode()
def eager(model: torch.nn.Module, recipe: Recipe, images: Dataset) -> None:
    """Keep what the model makes of contiguous batches."""
    loader = evaluation_loader(images, recipe.transform, batch_size=BATCH_IMAGES, workers=0)
    torch.cat([model(batch.inputs.contiguous()) for batch in loader])


class SomeImages(Dataset):
    """64 evenly spaced images of a dataset."""

    def __init__(self, whole: Dataset) -> None:
        self.whole, self.rows = whole, [int(row) for row in torch.linspace(0, len(whole) - 1, 64)]
        names = [str(whole.paths[row]) for row in self.rows]
        super().__init__(torch.zeros(len(names), dtype=torch.int64), ("",), names)

    def sample(self, index: int) -> torch.Tensor:
        return self.whole.sample(self.rows[index])


def main() -> None:
    if sys.argv[2:]:
        engines(Path(sys.argv[1]))
        return
    (photos,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = some_of(Path(photos), folder / "photos")
        train(read_recipe(Path("start/frozen_lite0"), OVERRIDES), folder / "run", device=start_ranks("cpu"))
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
    medians = {loop: statistics.median(values) for loop, values in speeds.items()}
    bare = medians["bare loop of the model"]
    rows = [
        [loop, f"{speed:.0f}", f"{max(speeds[loop]):.0f}", f"{speed / bare:.3f}"] for loop, speed in medians.items()
    ]
    write_report("embed", __doc__, ["loop", "photos/s, median", "photos/s, best", "ratio of medians"], rows)


if __name__ == "__main__":
    main()
