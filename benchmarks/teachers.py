"""Heads that learn from another run: a narrow student of a wide teacher, and a model that keeps an older one's space.

The features are those of EfficientNet-Lite0 with ImageNet weights at 160 pixels, frozen, on the photos of the Grocery
Store data set; half of the products train a head, the others test it. The teacher, and older model, is a head of 512
dimensions. Students have 32 dimensions, with and without `distill`; newer models have 512, with and without
`compatible`. All are trained with three seeds; differences are paired by seed, with 95 % intervals by Student's t.
*old* searches among the older model's embeddings of the test photos.

Run: python benchmarks/teachers.py PHOTOS. PHOTOS is a folder with one subfolder per product.
"""

import sys
import tempfile
from pathlib import Path

import torch
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.manifolds import Sphere
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.statistics import paired_runs, t_interval
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import load_model

RECIPE = Path(__file__).parent.parent / "recipes/start/frozen_lite0.yaml"
SEEDS = (1, 2, 3)
METRICS = ("recall@1", "map@r")


def trained(photos: str, folder: Path, name: str, *changes: str) -> Embeddings:
    """Train a head, and return the embeddings of the test photos; those of the training photos are stored."""
    common = [f"dataset.root={photos}", "dataset.validation_fraction=0", "transform.size=160", "training.workers=0"]
    recipe = read_recipe(RECIPE, [*common, f"backbone.tuning.cache={folder / 'features'}", *changes])
    run = RunFolder(folder / name)
    train(recipe, run.path, device="cpu")
    ranks, model = start_ranks("cpu"), load_model(run, start_ranks("cpu"))
    split_embeddings(run, model, ranks, recipe.dataset.build("train"), "train")
    return split_embeddings(run, model, ranks, recipe.dataset.build("test"), "test")


def scores(embeddings: Embeddings, among: Embeddings | None = None) -> dict[str, float]:
    """Score retrieval of test photos, among those of another model if one is given."""
    others = among or embeddings
    rows = torch.arange(len(embeddings.points))
    queries, gallery = (Labeled(side.points, side.labels, rows) for side in (embeddings, others))
    return score_retrieval(queries, gallery, Sphere(embeddings.points.shape[1]), METRICS).values


def main(photos: str) -> None:
    """Train every kind with every seed, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        older = trained(photos, folder, "teacher", "seed=0")
        teacher = folder / "teacher"
        distill = f"name: distill, teacher: {teacher}"
        kinds = {
            "32, plain": ("embedding_dim=32",),
            "32, relational": ("embedding_dim=32", f"regularizers=[{{{distill}, weight: 10.0}}]"),
            "32, similarity": ("embedding_dim=32", f"regularizers=[{{{distill}, kind: similarity, weight: 3000.0}}]"),
            "512, plain": (),
            "512, compatible": (f"regularizers=[{{name: compatible, run: {teacher}}}]",),
        }
        values: dict[str, list[dict[str, float]]] = {}
        for kind, changes in kinds.items():
            for seed in SEEDS:
                embeddings = trained(photos, folder, f"{kind}, {seed}", *changes, f"seed={seed}")
                values.setdefault(kind, []).append(scores(embeddings))
                if embeddings.points.shape == older.points.shape:
                    values.setdefault(f"{kind}, among old", []).append(scores(embeddings, older))
    rows = [["512, teacher and older model", *(f"{scores(older)[metric]:.4f}" for metric in METRICS), "", ""]]
    plain = {"32": "32, plain", "512": "512, plain"}
    for kind, by_seed in values.items():
        baseline = plain[kind.partition(",")[0]] + (", among old" if kind.endswith("old") else "")
        means, changes = [], []
        for metric in METRICS:
            kind_values = [by_metric[metric] for by_metric in by_seed]
            interval = t_interval(kind_values)
            means.append(f"{interval.mean:.4f} ± {interval.high - interval.mean:.4f}")
            gain = paired_runs([by_metric[metric] for by_metric in values[baseline]], kind_values)
            changes.append(f"{gain.difference:+.4f} ({gain.low:+.4f} .. {gain.high:+.4f})" if kind != baseline else "")
        rows.append([kind, *means, *changes])
    header = ["head", *METRICS, *(f"{metric} minus plain" for metric in METRICS)]
    write_report("teachers", __doc__, header, rows)


if __name__ == "__main__":
    main(sys.argv[1])
