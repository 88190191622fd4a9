"""Local scores on photos: metrics with matches of patches, and their time per query.

The model is EfficientNet-Lite0 with ImageNet weights at 160 pixels, without training, on the photos of the Grocery
Store data set: half of the classes are test classes, and a quarter of the others choose the weight. The 100 nearest
images of each query are matched.

Patches are the 10 x 10 cells of the last map of at least 64 cells, as for `dmlkit eval --with local`; the score is the
mean cosine of mutual nearest neighbors.

Differences from the cosine alone are paired, with 95 % intervals over test classes. Validation is the map@r on
validation classes, without and with the scores. Time is that of the processor for the candidates and their matches.

Run: python benchmarks/local.py PHOTOS. PHOTOS is a folder with one subfolder per product.
"""

import sys
from pathlib import Path
from time import process_time

import torch
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation.second import local_features, weigh_scores
from dmlkit.manifolds import Sphere
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.statistics import paired_differences
from dmlkit.model import backbone_alone, build_model
from dmlkit.nearest.rescore import CANDIDATES, Rescorer, match_scores
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.in_memory import embed_images
from dmlkit.vectors.progress_bar import no_bar
from dmlkit.vectors.trained import TrainedModel

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
    """Choose the weights on validation classes, and measure on test classes."""
    ranks, (recipe, space, trained) = start_ranks("cpu"), untrained(photos)
    share, known = 0.0, list[str]()
    for split in ("validation", "test"):
        images = recipe.dataset.build(split)
        embeddings = embed_images(trained, ranks, images, split)
        features, _ = local_features(trained, ranks, images, embeddings, no_bar)
        rescorer = Rescorer(match_scores(features.__getitem__), share, CANDIDATES)
        if split == "validation":
            weights, share, alone, together = weigh_scores(
                embeddings, images.groups_of(embeddings.indices), space, rescorer
            )
            known = [f"{share:.3f} ({weights})", f"{alone or 0:.4f} -> {together or 0:.4f}"]
    labeled = Labeled(embeddings.points, embeddings.labels)
    plain, start = score_retrieval(labeled, manifold=space, metrics=METRICS), process_time()
    rescored = score_retrieval(labeled, None, space, METRICS, rerank=rescorer)
    time = f"{1e3 * (process_time() - start) / len(embeddings.points):.0f} ms"
    changes = paired_differences(plain.per_query, rescored.per_query, embeddings.labels[plain.queries])
    figures = [
        f"{plain.values[name]:.4f} -> {rescored.values[name]:.4f} "
        f"({change.difference:+.4f}, {change.low:+.4f} .. {change.high:+.4f})"
        for name, change in changes.items()
    ]
    header = ["local score", "share", "validation", *METRICS, "time per query"]
    write_report("local", __doc__, header, [["patches", *known, *figures, time]])


if __name__ == "__main__":
    main(sys.argv[1])
