"""The loss `matryoshka`: embeddings that are cut to 32 of 256 dimensions, compared with models trained for each width.

On the glyphs a small network starts from random weights (the recipe and network of `glyphs_claims.yaml`); on the photos
of the Grocery Store data set a head is trained on frozen features of EfficientNet-Lite0 at 160 pixels, half of the
products train it and the others test it. `matryoshka` has 256, 128, 64 and 32 dimensions around Proxy-Anchor, `plain`
is Proxy-Anchor alone. Three seeds; differences are paired by seed, with 95 % intervals by Student's t. `rescored` keeps
one bit of each of 256 coordinates, and orders the 100 nearest again by the full embeddings.

Run: python benchmarks/matryoshka.py PHOTOS. PHOTOS is a folder with one subfolder per product.
"""

import sys
import tempfile
from pathlib import Path

import torch
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.manifolds import Sphere
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.ranking.codec import Codec, Precision, Stored, by_full_points
from dmlkit.metrics.statistics import paired_runs, t_interval
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import load_model

RECIPES = Path(__file__).parent.parent / "recipes"
SEEDS = (0, 1, 2)
METRICS = ("recall@1", "recall@10", "map@r")
WIDE, NARROW = 256, 32
KINDS = {
    "plain, 256": (f"embedding_dim={WIDE}",),
    "plain, 32": (f"embedding_dim={NARROW}",),
    "matryoshka": (
        f"embedding_dim={WIDE}",
        "loss={name: matryoshka, dims: [256, 128, 64, 32], loss: {name: proxy_anchor}}",
    ),
}
FORMS: dict[str, tuple[str, int | None, Precision, str]] = {  # kind, dims, precision, and the row to subtract
    "plain, 256 dimensions": ("plain, 256", None, "fp32", ""),
    "matryoshka, all 256 dimensions": ("matryoshka", None, "fp32", "plain, 256 dimensions"),
    "plain, 32 dimensions": ("plain, 32", None, "fp32", ""),
    "matryoshka, cut to 32": ("matryoshka", NARROW, "fp32", "plain, 32 dimensions"),
    "plain of 256, cut to 32": ("plain, 256", NARROW, "fp32", "plain, 32 dimensions"),
    "plain, 256, rescored": ("plain, 256", None, "rescored", "plain, 256 dimensions"),
}


def test_embeddings(recipe: str, common: list[str], folder: Path, changes: tuple[str, ...]) -> Embeddings:
    """Train a recipe, and return the embeddings of its test images."""
    read = read_recipe(RECIPES / recipe, [*common, *changes])
    train(read, folder, device="cpu")
    run, ranks = RunFolder(folder), start_ranks("cpu")
    return split_embeddings(run, load_model(run, ranks), ranks, read.dataset.build("test"), "test")


def scores(embeddings: Embeddings, dims: int | None, precision: Precision) -> dict[str, float]:
    """Score the retrieval of test images among each other, stored in a form."""
    codec = Codec(Sphere(embeddings.points.shape[1]), Stored(dims, precision), embeddings.points)
    decoded, rows = codec.decode(embeddings.points), torch.arange(len(embeddings.points))
    rescore = by_full_points(codec.manifold, embeddings.points, embeddings.points) if precision == "rescored" else None
    side = Labeled(decoded, embeddings.labels, rows)
    return score_retrieval(side, side, codec.space, METRICS, rerank=rescore).values


def rows_of(ground: str, recipe: str, common: list[str], folder: Path) -> list[list[str]]:
    """Train every kind with every seed on one set of images, and compare the forms."""
    embedded = {
        kind: [
            test_embeddings(recipe, [*common, f"seed={seed}"], folder / ground / f"{kind}, {seed}", changes)
            for seed in SEEDS
        ]
        for kind, changes in KINDS.items()
    }
    values = {
        form: [scores(embeddings, dims, precision) for embeddings in embedded[kind]]
        for form, (kind, dims, precision, _) in FORMS.items()
    }
    rows: list[list[str]] = []
    for form, (*_, base) in FORMS.items():
        cells = [ground, form]
        for metric in METRICS:
            form_values = [by_metric[metric] for by_metric in values[form]]
            interval = t_interval(form_values)
            cell = f"{interval.mean:.4f} ± {interval.high - interval.mean:.4f}"
            if base:
                gain = paired_runs([by_metric[metric] for by_metric in values[base]], form_values)
                cell += f"; {gain.difference:+.4f} ({gain.low:+.4f} .. {gain.high:+.4f})"
            cells.append(cell)
        rows.append([*cells, base])
    return rows


def main(photos: str) -> None:
    """Compare on both grounds."""
    glyphs = ["dataset.classes=230", "dataset.validation_fraction=0.26", "backbone.width=16", "training.epochs=8"]
    heads = [f"dataset.root={photos}", "dataset.validation_fraction=0", "transform.size=160", "training.workers=0"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = rows_of("glyphs", "glyphs/proxy_anchor.yaml", [*glyphs, "optimizer.lr=4e-3"], folder)
        cache = f"backbone.tuning.cache={folder / 'features'}"
        rows += rows_of("photos", "start/frozen_lite0.yaml", [*heads, cache], folder)
    write_report("matryoshka", __doc__, ["images", "form", *METRICS, "minus"], rows)


if __name__ == "__main__":
    main(sys.argv[1])
