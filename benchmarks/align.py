"""A newer model with older embeddings: recall across models on photos, before and after a map into the older space.

Two pairs of models share EfficientNet-Lite0 with ImageNet weights at 160 pixels, frozen, on the photos of the Grocery
Store data set. *untuned, tuned*: the older embeddings are its pooled features (1280), the newer model has a head (512)
that was trained on half of the products. *two seeds*: both have such heads, with other seeds. The shared images are the
photos of the products that were not trained on; half of these products fit the map, a quarter chooses it, and on the
last quarter every photo asks for another photo of its product. Intervals are over these products.

Run: python benchmarks/align.py PHOTOS. PHOTOS is a folder with one subfolder per product.
"""

import sys
import tempfile
from pathlib import Path

import torch
from report import write_report

from dmlkit.datasets.vectors import VectorFile
from dmlkit.distributed.launch import start_ranks
from dmlkit.look.point_map import SharedImages
from dmlkit.manifolds import Sphere
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import load_model

RECIPE = Path(__file__).parent.parent / "recipes/start/frozen_lite0.yaml"


@torch.no_grad()
def tuned(photos: str, folder: Path, seed: int) -> tuple[torch.Tensor, list[str | None]]:
    """Train a head, and return the points and labels of the photos of test classes."""
    changes = [f"dataset.root={photos}", "dataset.validation_fraction=0", "transform.size=160", "training.workers=0"]
    changes += [f"seed={seed}", f"backbone.tuning.cache={folder / 'features'}"]
    recipe, run = read_recipe(RECIPE, changes), RunFolder(folder / f"seed-{seed}")
    with torch.enable_grad():
        train(recipe, run.path, device="cpu")
    ranks, images = start_ranks("cpu"), recipe.dataset.build("test")
    embeddings = split_embeddings(run, load_model(run, ranks), ranks, images, "test")
    return embeddings.points, images.label_names(embeddings.labels)


def main(photos: str) -> None:
    """Train two heads, and align both pairs."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (first, labels), (second, _) = tuned(photos, folder, 0), tuned(photos, folder, 1)
        features = VectorFile(folder / "features" / "test")
        untuned = torch.stack([torch.from_numpy(features.row(row).copy()) for row in range(len(features))])
    for pair, old in (("untuned, tuned", untuned), ("two seeds", first)):
        spaces = Sphere(second.shape[1]), Sphere(old.shape[1])
        images = SharedImages(second, spaces[1].from_features(old), labels, spaces)
        point_map, parts, chosen = images.choice()
        fields = images.figures(point_map, parts)
        kind = chosen["map"] if chosen["shrinkage"] is None else f"{chosen['map']} {chosen['shrinkage']:g}"
        for figures in fields["figures"]:
            cells: list[str] = []
            for metric, value in figures.metrics.items():
                low, high = figures.intervals[metric] or (float("nan"), float("nan"))
                cells.append(f"{value:.3f} ({low:.3f} .. {high:.3f})")
            rows.append([pair, figures.queries, figures.gallery, *cells, kind if "mapped" in figures.queries else ""])
        gains = [
            f"{gain.difference:+.3f} ({gain.low or 0:+.3f} .. {gain.high or 0:+.3f})"
            for gain in fields["gain"].values()
        ]
        rows.append([pair, "mapped among old, minus old", "", *gains, ""])
        counted = f"{chosen['fitted']} photos fit, {len(parts.measure)} measure"
        rows.append([pair, counted, "", "", "", ", ".join(f"{k} {v:.3f}" for k, v in chosen["errors"].items())])
    header = ["models: older, newer", "asked by", "among", "recall@1", "map@r", "map; mean squared distance"]
    write_report("align", __doc__, header, rows)


if __name__ == "__main__":
    main(sys.argv[1])
