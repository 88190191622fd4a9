"""What ``dmlkit curvature`` and ``dmlkit plot`` do between reading their arguments and printing their result."""

from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.in_memory import embed_dataset
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.geometry.curvature import Hyperbolicity, backbone_features, hyperbolicity
from dmlkit.geometry.plot import Kind, default_kind, plot_embeddings
from dmlkit.loading.batches import refuse_faults
from dmlkit.loading.cache import images_of_split
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.run_folder import CheckpointName, RunFolder


def curvature_command(source: Path, split: Split, sample: int, draws: int, seed: int, device: str) -> None:
    """``dmlkit curvature``."""
    console = Console()
    manifold, points, what = _points_of(source, split, device)
    found = hyperbolicity(manifold, points, sample=sample, draws=draws, seed=seed)
    console.print(f"{len(points)} {what}", highlight=False, soft_wrap=True)
    console.print(
        f"relative delta-hyperbolicity {found.mean:.3f} ± {found.deviation:.3f} "
        f"({draws} draws of {min(sample, len(points))}; 0 is a tree)",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"suggested curvature: {found.curvature:.3f}{_range(found)}", highlight=False, soft_wrap=True)
    console.print(f'try: --set "manifold={{name: poincare, curvature: {found.curvature:.3f}}}"', highlight=False)


def _range(found: Hyperbolicity) -> str:
    if not found.mean > found.deviation > 0:
        return ""
    low, high = (Hyperbolicity([found.mean + sign * found.deviation]).curvature for sign in (-1, 1))
    return f" ({low:.3f} to {high:.3f} within a deviation of delta)"


def _points_of(source: Path, split: Split, device: str) -> tuple[Manifold, Tensor, str]:
    if (source / "manifest.json").exists():
        folder = EmbeddingFolder(source)
        manifold = folder.manifold()
        points = torch.cat([torch.empty(0, manifold.point_dim), *folder.blocks()])
        return manifold, points, f"embeddings of {source}, by the distance of {folder.manifest['manifold']['name']}"
    fabric = start_fabric(device)
    trained = load_model(RunFolder(source), fabric)
    features = backbone_features(trained, fabric, images_of_split(trained.recipe.dataset, split))
    what = f"images of the {split} split, by the Euclidean distance of their features before the head"
    return Euclidean(features.shape[1]), features, what


def plot_command(
    path: Path,
    kind: Kind | None,
    split: Split,
    classes: int,
    output: Path | None,
    checkpoint: CheckpointName | None,
    device: str,
) -> None:
    """``dmlkit plot``."""
    fabric = start_fabric(device)
    trained = load_model(RunFolder(path), fabric, checkpoint)
    manifold = trained.model.manifold.cpu()
    kind = kind or default_kind(manifold)
    output = output or path / "plots" / f"{split}-{kind}.png"
    if output.suffix not in (".png", ".svg"):
        raise UserError(f"{output}: expected a file name that ends in .png or .svg")
    dataset = images_of_split(trained.recipe.dataset, split)
    embeddings = embed_dataset(fabric, trained.model.to(fabric.device), dataset, trained.recipe.transform)
    refuse_faults(embeddings.faults, trained.recipe.dataset.on_bad_image)
    present = embeddings.labels.unique()
    chosen = present[torch.linspace(0, len(present) - 1, min(classes, len(present))).round().long()]
    shown = torch.isin(embeddings.labels, chosen)
    points, labels = embeddings.points[shown], embeddings.labels[shown]
    plot_embeddings(manifold.cpu(), points, labels, dataset.class_names, kind, output)
    Console().print(f"wrote {output}: {len(points)} images of {len(chosen)} classes", highlight=False, soft_wrap=True)
