"""Local scores on photos: metrics with matches of patches or of keypoints, and their time per query.

The model is EfficientNet-Lite0 with ImageNet weights at 160 pixels, without training, on the photos of the Grocery
Store data set: half of the classes are test classes, and a quarter of the others choose the weight. The 100 nearest
images of each query are matched.

- `patches` are the 10 x 10 cells of the last map of at least 64 cells, as for `dmlkit eval --with local`: the mean
  cosine of mutual nearest neighbors.
- `patches, verified`: of these only those that fit one affine map within 1.5 cells, found by RANSAC.
- `SIFT` keypoints of the photos, at most 128, as for `--with sift`: the logarithm of the number of matches that fit one
  affine map.

Differences from the cosine alone are paired, with 95 % intervals over test classes. Validation is the map@r on
validation classes, without and with the scores. Time is that of the processor for the candidates and their matches.

Run: python benchmarks/local.py PHOTOS. PHOTOS is a folder with one subfolder per product. It needs OpenCV.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time

import torch
from report import write_report

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.evaluation.second import weigh_scores
from dmlkit.manifolds import Sphere
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.statistics import paired_differences
from dmlkit.model import backbone_alone, build_model
from dmlkit.nearest.matches import match_scores, mutual_nearest, verify_affine
from dmlkit.nearest.rescore import CANDIDATES, Rescorer
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.in_memory import Embeddings, embed_images
from dmlkit.vectors.local_features import centered, keypoints_of, maps_of, mean_of
from dmlkit.vectors.trained import TrainedModel

RECIPE = Path(__file__).parent.parent / "recipes/start/frozen_lite0.yaml"
METRICS = ["recall@1", "map@r"]
CELLS = 1.5  # within which a match of patches fits


def untrained(photos: str) -> tuple[Recipe, Sphere, TrainedModel]:
    """Return a recipe of photos, and its network before training with its space."""
    changes = [f"dataset.root={photos}", "dataset.validation_fraction=0.25", "transform.size=160", "training.workers=0"]
    recipe = read_recipe(RECIPE, changes)
    model = build_model(recipe)
    space = Sphere(model.backbone.num_features)
    return recipe, space, TrainedModel.of(recipe, backbone_alone(model, space).eval())


Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def verified_patches(patches: torch.Tensor) -> Scores:
    """Return the scores of matches of patches that fit one affine map."""
    side = round(patches.shape[1] ** 0.5)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()

    def score(query: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        cosines = patches[others].float() @ patches[query].float().T  # (K, cells of the image, cells of the query)
        best, nearest, mutual = mutual_nearest(cosines)
        return (best * verify_affine(places, places[nearest], mutual & (best > 0), CELLS)).mean(1)

    return lambda queries, items: torch.stack([score(*pair) for pair in zip(queries, items, strict=True)]).double()


def scores_of(trained: TrainedModel, ranks: Ranks, images: Dataset, found: Embeddings) -> dict[str, Scores]:
    """Return the local scores by name."""
    maps, keypoints = maps_of(trained, ranks, images, found.indices), keypoints_of(images, found.indices)
    patches = centered(maps, mean_of(maps))
    return {
        "patches": match_scores("local", patches.__getitem__),
        "patches, verified": verified_patches(patches),
        "SIFT": match_scores("sift", keypoints.packed.__getitem__),
    }


@torch.no_grad()
def main(photos: str) -> None:
    """Choose the weights on validation classes, and measure on test classes."""
    ranks, (recipe, space, trained) = start_ranks("cpu"), untrained(photos)
    chosen: dict[str, tuple[float, list[str]]] = {}
    rows: list[list[str]] = []
    for split in ("validation", "test"):
        images = recipe.dataset.build(split)
        found = embed_images(trained, ranks, images, split)
        plain = score_retrieval(Labeled(found.points, found.labels), manifold=space, metrics=METRICS)
        for name, scores in scores_of(trained, ranks, images, found).items():
            rescorer = Rescorer(scores, 0.0, CANDIDATES)
            if split == "validation":
                weights, share, alone, together = weigh_scores(found, space, rescorer)
                known = [f"{share:.3f} ({weights})", f"{alone or 0:.4f} -> {together or 0:.4f}"]
                chosen[name] = share, known
                continue
            share, known = chosen[name]
            side, start = Labeled(found.points, found.labels), process_time()
            both = score_retrieval(side, None, space, METRICS, rerank=replace(rescorer, share=share))
            time = f"{1e3 * (process_time() - start) / len(found.points):.0f} ms"
            changes = paired_differences(plain.per_query, both.per_query, found.labels[plain.queries])
            figures = [
                f"{plain.values[one]:.4f} -> {both.values[one]:.4f} "
                f"({change.difference:+.4f}, {change.low:+.4f} .. {change.high:+.4f})"
                for one, change in changes.items()
            ]
            rows.append([name, *known, *figures, time])
    header = ["local score", "share", "validation", *METRICS, "time per query"]
    write_report("local", __doc__, header, rows)


if __name__ == "__main__":
    main(sys.argv[1])
