"""The proxies that a run's loss has learned, as points beside its embeddings."""

from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.run_folder.documents import TrainingClasses
from dmlkit.run_folder.folder import CheckpointName, RunFolder


class ClassProxies(NamedTuple):
    """Proxies as points of the embeddings' manifold.

    Args:
        points: (P, D) float32.
        labels: (P,) int64, the training class of each, ascending.
        class_names: of the training classes.
    """

    points: Tensor
    labels: Tensor
    class_names: tuple[str, ...]


@torch.no_grad()
def proxies_of(run: RunFolder, checkpoint: CheckpointName, manifold: Manifold) -> ClassProxies | None:
    """The proxies of a run's loss; None where it has none, or they are no points of the embeddings' space.

    Args:
        run: its folder.
        checkpoint: which weights.
        manifold: of the embeddings, with the curvature of that checkpoint.
    """
    objective = run.load_checkpoint(checkpoint)["objective"]
    found = [tensor for name, tensor in objective.items() if name.startswith("loss.") and name.endswith(".proxies")]
    if len(found) != 1 or not run.classes_path.exists():
        return None
    return class_proxies(found[0], manifold, TrainingClasses.read(run.classes_path).training_classes)


def class_proxies(proxies: Tensor, manifold: Manifold, class_names: tuple[str, ...]) -> ClassProxies | None:
    """Learned proxies (C, d) or (C, K, d) as points; None where they are not of that space or of those classes.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> found = class_proxies(torch.randn(2, 3, 8), Sphere(8), ("a", "b"))
        >>> found.points.shape, found.labels.tolist()
        (torch.Size([6, 8]), [0, 0, 0, 1, 1, 1])
        >>> class_proxies(torch.randn(2, 9), Sphere(8), ("a", "b")) is None
        True
    """
    width = manifold.dim if manifold.proxies == "features" else manifold.point_dim
    if proxies.ndim not in (2, 3) or proxies.shape[-1] != width or len(proxies) != len(class_names):
        return None
    points = manifold.proxy_points(proxies.flatten(0, -2).float())
    labels = torch.arange(len(proxies)).repeat_interleave(len(points) // len(proxies))
    return ClassProxies(points, labels, class_names)
