"""What computes a network: torch in float32, or a faster runtime, compared with it before it is used.

A device names it: ``cpu`` is torch in float32, ``cpu+onnxruntime``, ``cpu+bf16`` and ``cpu+fastest`` are the others.
The first use of a model compares the embeddings of 64 training images of the run with torch's. The answer is kept in
the user's cache with the ONNX graph, for these weights, versions of packages, and processor. A recipe may name one for
the features of training images.
"""

import hashlib
import json
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from dmlkit.errors import UserError, warn
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import Document
from dmlkit.files.regular import cache_folder, file_checksum
from dmlkit.loading.batches import collate
from dmlkit.loading.inputs import inputs_of
from dmlkit.model import EmbeddingModel
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.graphs import (
    NotExportableError,
    import_runtime,
    onnx_program,
    onnx_session,
    traced,
)
from dmlkit.vectors.manifest import NEAREST, Computation

IMAGES = 64  # training images that are compared
BATCH = 32  # of them at a time
KEPT = 8  # ONNX graphs in the user's cache, each of the size of the weights
WAYS = "leave it out, or use bf16"
Session = Callable[[Path], Callable[[Tensor], Tensor]]
"""Opens an ONNX graph, and returns a function that maps inputs to points."""


class EngineComparison(Document, frozen=True, strict=True):
    """Comparison of an engine with torch on this machine, in the user's cache."""

    kind: ClassVar[str] = "comparison of an engine with torch"

    computation: Computation
    """Agreement of the embeddings."""
    checksum: NonNegativeInt = 0
    """CRC-32 of the ONNX graph."""


class ComputedModel(EmbeddingModel):
    """Embedding model in evaluation mode whose points another program computes; it shares the weights.

    Args:
        compute: maps inputs as of the model to points (B, D) float32.
    """

    def __init__(self, model: EmbeddingModel, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__(model.normalization, model.backbone, model.head, model.samples)
        self.compute = compute
        self.eval()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map RGB images (B, 3, H, W) uint8, or vectors (B, F) float32, to points (B, D) float32."""
        return self.compute(inputs)


def accelerate(
    model: EmbeddingModel, recipe: Recipe, engine: str, option: str
) -> tuple[EmbeddingModel, Computation | None]:
    """Return a model as an engine computes it, and how far it agrees with torch in float32.

    Args:
        engine: ``bf16``, ``onnxruntime``, or ``fastest``: the first of ``onnxruntime``, on a CPU, and ``bf16``, unless
            it is emulated, whose embeddings agree: every cosine is at least 0.9999, and all 10 nearest images are the
            same.

    Returns:
        The model and the comparison; the given model and None if ``fastest`` found none that agrees.
    """
    if engine != "fastest":
        return _prepare(model, recipe, engine, option)
    # on 2 CPU cores ONNX Runtime was 3.3 (Lite0), 1.9 (ResNet-50), 1.6 (ViT-S/16) and 1.5 (ConvNeXt-T) times as fast
    candidates = ["onnxruntime"] if model.device.type == "cpu" else []
    candidates += ["bf16"] if _computes_bf16(model.device) else []
    for candidate in candidates:
        try:
            computed, agreement = _prepare(model, recipe, candidate, f"{option}: {candidate}")
        except UserError as error:
            warn(f"{error}; not used")
            continue
        if agreement.agrees:
            return computed, agreement
        warn(f"{option}: {candidate} is not used: {agreement}")
    return model, None


def _computes_bf16(device: torch.device) -> bool:
    """Return whether a device computes in bfloat16; without AVX-512 it is emulated, 18 times as slow for Lite0."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _prepare(model: EmbeddingModel, recipe: Recipe, engine: str, option: str) -> tuple[EmbeddingModel, Computation]:
    """Return the model as an engine computes it, and the comparison, from the user's cache if it has them."""
    session = _session_of(model, engine, option)
    place = _place(model, recipe, engine)
    graph = place.with_suffix(".onnx")
    stored = _stored(place, graph if session else None)
    if stored is not None:
        return _computed(model, session, graph), stored.computation
    inputs = training_inputs(recipe, option).to(model.device)
    warn(f"{option}: compared with torch on {len(inputs)} training images, once for this model and machine")
    place.parent.mkdir(parents=True, exist_ok=True)
    if session:
        _write_graph(model, inputs, graph, option)
    computed = _computed(model, session, graph)
    of_engine = {"precision": "bf16"} if engine == "bf16" else {"engine": engine}
    agreement = compare(model, computed, inputs).model_copy(update=of_engine)
    EngineComparison(computation=agreement, checksum=file_checksum(graph) if session else 0).write(place)
    return computed, agreement


def _computed(model: EmbeddingModel, session: Session | None, graph: Path) -> EmbeddingModel:
    return ComputedModel(model, session(graph) if session else _bf16(model))


def _stored(place: Path, graph: Path | None) -> EngineComparison | None:
    try:
        found = EngineComparison.read(place)
        return found if graph is None or file_checksum(graph) == found.checksum else None
    except (UserError, OSError):  # there is none, or it is damaged
        return None


def _place(model: EmbeddingModel, recipe: Recipe, engine: str) -> Path:
    """Return the file of a comparison in the user's cache."""
    packages = ("torch",) if engine == "bf16" else ("torch", engine, "onnxscript")
    network = recipe.model_dump_json(include={"backbone", "head", "manifold", "embedding_dim", "transform"})
    device = model.device
    processor = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    machine = [platform.machine(), processor, str(torch.get_num_threads())]
    depends = json.dumps([model.fingerprint(), network, *machine, *map(version, packages)])
    return cache_folder() / f"engine-{hashlib.sha256(depends.encode()).hexdigest()[:16]}-{engine}.json"


def training_inputs(recipe: Recipe, option: str) -> Tensor:
    """Return evenly spaced training images as inputs of the model: test classes choose nothing."""
    try:
        dataset = recipe.dataset.build("train")
    except UserError as error:
        raise UserError(f"{option}: needs training images of the run to compare with torch: {error}") from None
    inputs = inputs_of(dataset, recipe.transform, training=False)
    rows = sorted({int(row) for row in torch.linspace(0, len(dataset) - 1, IMAGES).round()})
    batch = collate([inputs[row, 0] for row in rows])
    if len(batch.labels) <= NEAREST:
        reason = batch.faults[0] if batch.faults else f"there are {len(batch.labels)}"
        raise UserError(
            f"{option}: needs more than {NEAREST} training images of the run to compare with torch: {reason}"
        )
    return batch.inputs


@torch.inference_mode()
def compare(model: EmbeddingModel, computed: EmbeddingModel, inputs: Tensor) -> Computation:
    """Return how far the points of two models agree; engine and precision are those of torch in float32."""
    points, theirs = (torch.cat([each(part).float() for part in inputs.split(BATCH)]) for each in (model, computed))
    return Computation(
        engine="torch",
        precision="fp32",
        images=len(inputs),
        cosine=torch.cosine_similarity(points.double(), theirs.double()).nan_to_num(nan=-1).min().item(),
        same_nearest=int((_nearest(model, points) == _nearest(model, theirs)).all(dim=1).sum()),
    )


def _nearest(model: EmbeddingModel, points: Tensor) -> Tensor:
    """Return for each point (N, D) which others are the 10 most similar, in the order of their rows (N, 10)."""
    similarities = model.manifold.similarity(points, points).fill_diagonal_(-torch.inf)
    return similarities.topk(NEAREST).indices.sort().values


def _bf16(model: EmbeddingModel) -> Callable[[Tensor], Tensor]:
    def compute(inputs: Tensor) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16):
            return model(inputs).float()

    return compute


def _session_of(model: EmbeddingModel, engine: str, option: str) -> Session | None:
    """Return what opens an ONNX graph; None for ``bf16``, which takes none."""
    if engine == "bf16":
        return None
    if model.device.type != "cpu":
        raise UserError(f"{option}: {engine} computes on the CPU here; use the device cpu, or bf16")
    return partial(onnx_session, import_runtime(option))


def _write_graph(model: EmbeddingModel, inputs: Tensor, graph: Path, option: str) -> None:
    """Write the ONNX graph of a model, and remove the oldest ones of others."""
    try:
        program = onnx_program(traced(model, inputs[:2]), "inputs")
    except NotExportableError as error:
        raise UserError(f"{option}: {error}; {WAYS}") from error
    with atomic_write(graph) as partial:
        program.save(partial)
    graphs = sorted(graph.parent.glob("engine-*.onnx"), key=lambda path: path.stat().st_mtime)
    for old in graphs[:-KEPT]:
        old.unlink(missing_ok=True)
