"""Local scores on photos: metrics with matches of patches, and their time per query.

The model is EfficientNet-Lite0 with ImageNet weights at 160 pixels, without training, on the photos of the Grocery
Store data set: half of the classes are test classes, and a quarter of the others choose the weight. The patches are the
10 x 10 cells of its last map of at least 64 cells; those of the 100 nearest images are matched. Differences are paired,
with 95 % intervals over test classes. Time is that of the processor for the candidates and their matches.

Run: python benchmarks/local.py PHOTOS. PHOTOS is a folder with one subfolder per product.
"""

import sys
from pathlib import Path
from time import process_time

import torch
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.in_memory import embed_images
from dmlkit.embedding.trained import TrainedModel
from dmlkit.evaluation.local import PairOfScores, patches_of
from dmlkit.loading.cache import images_of_split
from dmlkit.manifolds import Sphere
from dmlkit.metrics.ranking.local import score_candidates
from dmlkit.metrics.scoring import score_retrieval
from dmlkit.metrics.statistics import paired_differences
from dmlkit.model import backbone_alone, build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe

RECIPE = Path(__file__).parent.parent / "recipes/start/frozen_lite0.yaml"
METRICS = ["recall@1", "map@r"]


def untrained(photos: str) -> tuple[Recipe, Sphere, TrainedModel]:
    """Return a recipe of photos, and its network before training with its space."""
    changes = [f"dataset.root={photos}", "dataset.validation_fraction=0.25", "transform.size=160", "training.workers=0"]
    recipe = read_recipe(RECIPE, changes)
    model = build_model(recipe)
    space = Sphere(model.backbone.num_features)
    return recipe, space, TrainedModel.of(recipe, backbone_alone(model, space).eval())


@torch.no_grad()
def main(photos: str) -> None:
    """Choose the weight on validation classes, and measure on test classes."""
    fabric, (recipe, space, trained) = start_ranks("cpu"), untrained(photos)
    rows: list[list[str]] = []
    share, weights = 0.0, ""
    for split in ("validation", "test"):
        images = images_of_split(recipe.dataset, split)
        found = embed_images(trained, fabric, images, split)
        patches = patches_of(trained, fabric, images, found)
        start = process_time()
        local = score_candidates(space, (found.points, found.points), (patches, patches))
        seconds = process_time() - start
        if split == "validation":
            weights, share, *known = PairOfScores(found, space, local).choice()
            rows.append(["map@r on validation classes", *(f"{value or 0:.4f}" for value in known), "", ""])
            continue
        plain = score_retrieval(found.points, found.labels, manifold=space, metrics=METRICS)
        both = score_retrieval(
            found.points, found.labels, manifold=space, metrics=METRICS, rescore=local._replace(share=share)
        )
        changes_of = paired_differences(plain.per_query, both.per_query, found.labels[plain.queries])
        for name, change in changes_of.items():
            ends = f"{change.low:+.4f} .. {change.high:+.4f}"
            figures = [f"{scores.values[name]:.4f}" for scores in (plain, both)]
            rows.append([name, *figures, f"{change.difference:+.4f}", ends])
        time = f"{1e3 * seconds / len(found.points):.1f} ms"
        rows += [["share of the matches", "", f"{share:.3f} ({weights})", "", ""], ["time per query", "", time, "", ""]]
    header = ["test classes", "cosine", "with matches", "difference", "95 % interval"]
    write_report("local", __doc__, header, rows)


if __name__ == "__main__":
    main(sys.argv[1])
