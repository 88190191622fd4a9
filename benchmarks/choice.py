"""Whether `dmlkit start` chooses the better of two pretrained models: ten random splits of the classes into halves.

Each model embeds all photos once. The first half of the classes chooses as `start` does: at most 1 000 of its photos
are scored, and the slower model is taken only if its map@r is higher beyond chance. The other half says which one
is better.

Run: python benchmarks/choice.py PHOTOS FASTER SLOWER. PHOTOS is a folder with one subfolder per class; the models are
names of timm with a size, e.g. tf_efficientnet_lite0:160.
"""

import json
import sys
from pathlib import Path

import torch
from report import write_report
from torch import Tensor

from dmlkit.datasets.base import Dataset
from dmlkit.datasets.files.dataset import PickedSamples
from dmlkit.distributed.launch import start_ranks
from dmlkit.manifolds import Sphere
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.statistics import paired_comparison
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.pretrained import backbone_keys
from dmlkit.training.start import some_photos
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import pretrained_model

SPLITS = 10


def embed(photos: str, name: str) -> tuple[Embeddings, Dataset]:
    """Embed all photos by a model at a size."""
    model, size = name.split(":")
    settings = {
        "dataset": {"name": "folder", "root": photos, "split": "all"},
        "backbone": {**backbone_keys(f"timm:{model}"), "tuning": {"name": "none"}},
        "transform": {"name": "pretrained", "size": int(size)},
        "loss": {"name": "proxy_anchor"},
    }
    recipe, ranks = parse_recipe(json.dumps(settings), "recipe"), start_ranks("cpu")
    trained, run = pretrained_model(recipe, None, ranks), RunFolder(Path(f"timm:{model}"))
    dataset = recipe.dataset.build("train")
    return split_embeddings(run, trained, ranks, dataset, "train"), dataset


def values(embeddings: Embeddings, rows: Tensor) -> Tensor:
    """Return the map@r of some photos among themselves."""
    labeled = Labeled(embeddings.points[rows], embeddings.labels[rows])
    return score_retrieval(labeled, None, Sphere(embeddings.points.shape[1]), ["map@r"]).per_query["map@r"]


def main(photos: str, faster: str, slower: str) -> None:
    """Choose by one half of the classes, and judge by the other."""
    (first, dataset), (second, _) = (embed(photos, name) for name in (faster, slower))
    table, right = list[list[str]](), 0
    for seed in range(SPLITS):
        order = torch.randperm(len(dataset.class_names), generator=torch.Generator().manual_seed(seed))
        is_first = torch.isin(dataset.labels, order[: len(order) // 2])
        half, others = is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0]
        rows = half[some_photos(PickedSamples(dataset, half, dataset.labels[half])).rows]
        gain = paired_comparison(values(first, rows), values(second, rows), dataset.labels[rows])
        truth = (values(second, others) - values(first, others)).mean().item()
        takes_slower = gain.low > 0
        right += takes_slower == (truth > 0)
        interval = f"{gain.difference:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"
        table.append([str(seed), interval, slower if takes_slower else faster, f"{truth:+.3f}"])
    about = (
        f"{(__doc__ or '').partition('Run:')[0].strip()}\n\nThe better one was chosen in {right} of {SPLITS} splits."
    )
    header = ["split", f"map@r of {slower} minus {faster}, choosing half", "chosen", "the same, other half"]
    write_report(f"choice_{Path(photos).name}", about, header, table)


if __name__ == "__main__":
    main(*sys.argv[1:])
