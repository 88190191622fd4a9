"""What test classes gain by ranking a second time: re-ranking by neighbors, and means of images and their copies.

- `k_reciprocal` compares the sets of images that have each other among their k1 nearest, `expansion` averages each
  image with its n nearest. k1 or n is the one with the highest MAP@R on validation classes; k2 is a third of k1 and
  alpha is 3. Both look at all test images at once.
- `flip` is the mean of each image and its mirror image, `scales` that of each image and of copies of it with 0.71 and
  1.41 times the side.
- `difference` is from the images alone, paired, with its 95 % interval over classes and its p-value.
- `x images` is how many times as many pixels are embedded.

The products are the Grocery Store photos, embedded by FULL; the categories are those of Caltech 101, embedded by
EfficientNet-Lite0 with ImageNet weights at 160 pixels, without training, at most 20 photos of each test class; the
glyphs are embedded by DEMO.

Run: python benchmarks/ranked_again.py FULL CALTECH DEMO. FULL was trained by dmlkit train recipes/start/full_lite0.yaml
--set dataset.root=PHOTOS --set training.epochs=1 --set transform.size=160 --set transform.resize=182, and DEMO by make
demo. CALTECH is a folder with one subfolder per category.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import torch
from local import METRICS, untrained
from report import write_report

from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.evaluation.augmented import Copies, embed_with_copies
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.ranking.rerank import Expansion, KReciprocal, Rerank
from dmlkit.metrics.scoring import Scores
from dmlkit.metrics.statistics import paired_differences
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.in_memory import Embeddings, embed_dataset
from dmlkit.vectors.trained import TrainedModel, load_model

DRAWN = 20
PIXELS = {"flip": "2", "scales": "3.5"}
K1 = 6, 12, 24, 48
N = 2, 5, 10, 20
GRIDS: list[list[Rerank]] = [[KReciprocal(k1, k1 // 3) for k1 in K1], [Expansion(n) for n in N]]


def drawn(labels: torch.Tensor, most: int) -> torch.Tensor:
    """Return rows of at most so many images of each class, drawn at random."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.cat([order[labels[order] == label][:most] for label in labels.unique()])


def scored(points: torch.Tensor, labels: torch.Tensor, manifold: Manifold, rerank: Rerank | None = None) -> Scores:
    return score_retrieval(Labeled(points, labels), manifold=manifold, metrics=METRICS, rerank=rerank)


def changed(
    ranks: Ranks, trained: TrainedModel, test: Embeddings, choosing: Embeddings
) -> Iterator[tuple[str, str, Scores]]:
    """Give the name, the pixels and the scores of each second ranking of test images."""
    for grid in GRIDS:
        options = [
            (scored(choosing.points, choosing.labels, trained.manifold, rerank).values["map@r"], rerank)
            for rerank in grid
        ]
        best = max(options)[1]
        text = f"{best.name}:k1={best.k1},k2={best.k2}" if isinstance(best, KReciprocal) else f"{best.name}:n={best.n}"
        yield text, "1", scored(test.points, test.labels, trained.manifold, best)
    images = trained.recipe.dataset.build("test")
    for copies in get_args(Copies):
        means = embed_with_copies(ranks, trained, images, test, copies)
        yield copies, PIXELS[copies], scored(means.points, test.labels, trained.manifold)


def measure(name: str, trained: TrainedModel, most: int | None) -> list[list[str]]:
    """Return the rows of a dataset, with at most so many images of each class."""
    ranks = start_ranks("cpu")
    embedded: list[Embeddings] = []
    for split in ("test", "validation"):
        images = trained.recipe.dataset.build(split)
        rows = None if most is None else drawn(images.labels, most).sort().values.tolist()
        embedded.append(embed_dataset(ranks, trained.model, images, trained.recipe.transform, indices=rows, workers=0))
    test, choosing = embedded
    alone = scored(test.points, test.labels, trained.manifold)
    table: list[list[str]] = []
    for method, pixels, scores in changed(ranks, trained, test, choosing):
        changes = paired_differences(alone.per_query, scores.per_query, test.labels[alone.queries])
        for metric, change in changes.items():
            values = f"{alone.values[metric]:.4f}", f"{scores.values[metric]:.4f}"
            ends = f"{change.low:+.4f} .. {change.high:+.4f}"
            row = [name, f"{len(test.labels):,}", method, pixels, metric, *values, f"{change.difference:+.4f}"]
            table.append([*row, ends, f"{change.p_value:.4f}"])
    return table


def main(full: str, caltech: str, demo: str) -> None:
    torch.set_num_threads(1)
    trained = load_model(RunFolder(Path(full)), start_ranks("cpu"))
    rows = measure("products", trained, None)
    rows += measure("categories", untrained(caltech)[2], DRAWN)
    rows += measure("glyphs", load_model(RunFolder(Path(demo)), start_ranks("cpu")), None)
    names = ["of", "images", "method", "x images", "metric", "alone", "ranked again", "difference"]
    write_report("ranked_again", __doc__, [*names, "95 % interval", "p"], rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
