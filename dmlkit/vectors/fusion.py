"""Fusion of two models: a weighted mean of their cosines, which is a cosine itself, so that all commands can use it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.files.source import LOCAL, model_name
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.products import unit_vectors
from dmlkit.manifolds.sphere import Sphere
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.vectors.manifest import Fusion, LocalFusion
from dmlkit.vectors.trained import TrainedModel, load_model

COSINES = ("cosine", "origin_cosine")


@dataclass(frozen=True)
class ModelChoice:
    """Which model embeds images, and on which device."""

    run: Path | None = None
    """Its run. Default: that of the points that are searched."""
    checkpoint: CheckpointName | None = None
    """Its checkpoint. Default: best, otherwise last."""
    fusion: Fusion | None = None
    """Second model that embeds too, see `dmlkit.evaluation.second.choose_fusion`, or local features of a new gallery.
    Default: that of the points."""
    device: str | None = None
    """Device, see `start_ranks`. Default: auto."""

    def start(self) -> Ranks:
        """Return the device and ranks on which the model embeds."""
        return start_ranks(self.device or "auto")

    def load(self, run: RunFolder, ranks: Ranks, *, overrides: Sequence[str] = ()) -> TrainedModel:
        """Load the model of a run, with the second one if there is one."""
        trained = load_model(run, ranks, self.checkpoint, overrides=overrides)
        if isinstance(self.fusion, LocalFusion):
            return with_local(trained, self.fusion, str(run.path))
        return fuse(trained, self.fusion, ranks) if self.fusion else trained


OWN_MODEL = ModelChoice()
"""The model that made the points, on the default device."""


def fuse(first: TrainedModel, fusion: Fusion, ranks: Ranks) -> TrainedModel:
    """Return the model that embeds with two runs, see `join`."""
    path = Path(fusion.run)
    if not path.is_dir() and model_name(path) is None:
        raise UserError(
            f"{path}: the second run of this gallery is missing; name it with --with RUN, or put it next to the first"
        )
    second = load_model(RunFolder(path), ranks, fusion.checkpoint)
    check_fusible(first, second, path)
    if second.fingerprint != fusion.fingerprint:
        raise UserError(
            f"--with {path}: its weights have the fingerprint {second.fingerprint[:12]}, expected "
            f"{fusion.fingerprint[:12]}; name the run of this fusion, or create the gallery again"
        )
    computations = (model.computation for model in (first, second) if model.computation)
    identity = f"{first.fingerprint} {second.fingerprint} {fusion.share!r}"
    return replace(
        first,
        manifold=Sphere(first.manifold.point_dim + second.manifold.point_dim).to(first.device),
        saved="",
        recorded=hashlib.sha256(identity.encode()).hexdigest(),
        run=None,
        fusion=fusion,
        members=(first, second),
        computation=min(computations, key=lambda computation: computation.cosine, default=None),
        aligned_to=None,
    )


def with_local(trained: TrainedModel, local: LocalFusion | None, where: str) -> TrainedModel:
    """Return a model that computes local features with its points, for what ``where`` names; with None, no features."""
    if local is None:
        return replace(trained, local=None)
    require_torch(trained)
    if trained.fingerprint != local.fingerprint:
        raise UserError(
            f"{where}: its patches are those of weights {local.fingerprint[:12]}, and cannot be compared with those of "
            f"weights {trained.fingerprint[:12]}; use its own run, or run dmlkit gallery migrate --with {LOCAL}"
        )
    return replace(trained, local=local)


def require_torch(trained: TrainedModel) -> None:
    """Raise a `UserError` unless torch computes a network in float32, whose maps can be read."""
    if trained.computation is not None:
        raise UserError(f"--with {LOCAL}: needs torch in float32; use --device without {trained.computation.option}")


def check_fusible(first: TrainedModel, second: TrainedModel, path: Path) -> None:
    """Raise a `UserError` if models are the same, take other samples, or have a similarity that is not a cosine."""
    if first.fingerprint == second.fingerprint:
        raise UserError(f"--with {path}: has the same weights as the first run; name another run")
    if first.samples.name != second.samples.name:
        raise UserError(f"--with {path}: takes {second.samples.name}s, but the first run {first.samples.name}s")
    for model, name in ((first, "the first run"), (second, str(path))):
        if model.manifold.similarity_name not in COSINES:
            raise UserError(
                f"--with {path}: the similarity of {name} is {model.manifold.similarity_name}; a fusion needs runs "
                f"with {' or '.join(COSINES)}"
            )


def join(manifolds: Sequence[Manifold], points: Sequence[Tensor], share: float) -> Tensor:
    r"""Join points of two models to points on a sphere.

    Their cosine is :math:`(1 - w) \cos_1 + w \cos_2`: the unit vectors are scaled by :math:`\sqrt{1 - w}` and
    :math:`\sqrt{w}` and put one after the other.

    Args:
        points: (N, D_1) and (N, D_2), of the same images.
        share: w in [0, 1], the weight of the second cosine.

    Returns:
        (N, D_1 + D_2) unit vectors.

    Example:
        >>> plane = Sphere(2)
        >>> first, second = torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> points = join([plane, plane], [first, second], 0.25)
        >>> round(float(points[0] @ points[1]), 6)  # 0.75 * 0 + 0.25 * 0.6
        0.15
    """
    vectors = [unit_vectors(manifold.product_vectors(x)) for manifold, x in zip(manifolds, points, strict=True)]
    return unit_vectors(torch.cat([vectors[0] * (1 - share) ** 0.5, vectors[1] * share**0.5], dim=1))
