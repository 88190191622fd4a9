"""What computes a network: torch in float32, or a faster runtime, compared with it before it is used.

A device names it: ``cpu`` is torch in float32, ``cpu+onnxruntime``, ``cpu+openvino``, ``cpu+bf16`` and ``cpu+fastest``
are the others. The first use of a model compares the embeddings of 64 training images of the run with torch's, and
times both. The answer is kept in the user's cache with the ONNX graph, for these weights, versions of packages, and
processor.
A recipe may name one for the features of training images, and ``dmlkit start`` chooses it.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, Literal

import torch
from pydantic import FiniteFloat, NonNegativeInt
from torch import Tensor

from dmlkit.embedding.graphs import (
    NotExportableError,
    import_runtime,
    onnx_program,
    onnx_session,
    openvino_session,
    traced,
)
from dmlkit.embedding.manifest import NEAREST, Computation
from dmlkit.errors import UserError, warn
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import Document
from dmlkit.files.regular import file_checksum
from dmlkit.loading.batches import collate
from dmlkit.loading.inputs import DRAFT, inputs_of
from dmlkit.model import EmbeddingModel
from dmlkit.recipe.schema import Recipe

Engine = Literal["torch", "bf16", "onnxruntime", "openvino"]
IMAGES = 64  # training images that are compared
TIMED = 32  # of them that are timed: on one CPU core 2 s of EfficientNet-Lite0
KEPT = 8  # ONNX graphs in the user's cache, each of the size of the weights
WAYS = "leave it out, or use bf16"
Session = Callable[[Path], Callable[[Tensor], Tensor]]
"""Opens an ONNX graph, and returns a function that maps inputs to points."""


class EngineComparison(Document, frozen=True, strict=True):
    """Comparison of an engine with torch on this machine, in the user's cache."""

    kind: ClassVar[str] = "comparison of an engine with torch"

    computation: Computation
    """Agreement of the embeddings."""
    images_per_second: FiniteFloat
    """Speed of the network alone."""
    torch_images_per_second: FiniteFloat
    """Speed of torch in float32, timed in turns with it."""
    checksum: NonNegativeInt = 0
    """CRC-32 of the ONNX graph."""
    says_nothing: bool = False
    """Whether draft decoding was compared on images of which none is large enough to be decoded at a smaller size."""


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
    model: EmbeddingModel, recipe: Recipe, engine: str, option: str, *, draft: bool = False
) -> tuple[EmbeddingModel, Computation | None]:
    """Return a model as an engine computes it, and how far it agrees with torch in float32.

    Args:
        model: the model in evaluation mode, on its device.
        recipe: its recipe, whose training images are compared.
        engine: ``bf16``, ``onnxruntime`` or ``openvino``; or ``fastest`` of these and torch whose embeddings agree:
            every cosine is at least 0.9999, and all 10 nearest images are the same. ``bf16`` is not tried where it is
            emulated, nor ``openvino`` where it is not installed. Empty for torch, if only ``draft`` changes.
        option: where the user named the engine, for messages.
        draft: whether large JPEGs are decoded at a smaller size, on which the agreement depends too.

    Returns:
        The model and the comparison; the given model and None if torch in float32 is the fastest.

    Raises:
        UserError: a package is missing, ONNX cannot express the backbone, or the training images cannot be read.
    """
    best, speed = None, 0.0
    for candidate, computed, measured in _prepare_all(model, recipe, option, draft) if engine == "fastest" else ():
        found = measured.computation
        if found.agrees and measured.images_per_second > max(speed, measured.torch_images_per_second):
            best, speed = (computed, measured), measured.images_per_second
        elif not found.agrees:
            warn(f"{option}: {candidate} is not used: {found}")
    if best is None and engine == "fastest" and not draft:
        return model, None
    if best is None:
        only: Any = "torch" if engine in ("", "fastest") else engine
        best = _prepare(model, recipe, only, option, draft=draft)
    if best[1].says_nothing:
        warn(
            f"{option}: no training image is large enough to be decoded at a smaller size, so that nothing is known of "
            "large photos; use the same --device for all that you compare, also in calibrate and verify"
        )
    return best[0], best[1].computation


def compare_engines(model: EmbeddingModel, recipe: Recipe, option: str) -> dict[Engine, EngineComparison]:
    """Return how each engine compares with torch in float32, see `accelerate`; one that fails is named and left out."""
    return {engine: measured for engine, _, measured in _prepare_all(model, recipe, option)}


def _prepare_all(
    model: EmbeddingModel, recipe: Recipe, option: str, draft: bool = False
) -> Iterator[tuple[Engine, EmbeddingModel, EngineComparison]]:
    engines: list[Engine] = ["onnxruntime"] if model.device.type == "cpu" else []
    if engines and _has_openvino():
        engines.append("openvino")
    if _computes_bf16(model.device):
        engines.append("bf16")
    for engine in engines:
        try:
            yield engine, *_prepare(model, recipe, engine, f"{option}: {engine}", draft=draft)
        except UserError as error:
            warn(f"{error}; not used")


def _computes_bf16(device: torch.device) -> bool:
    """Return whether a device computes in bfloat16; without AVX-512 it is emulated, 18 times as slow for Lite0."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _prepare(
    model: EmbeddingModel, recipe: Recipe, engine: Engine, option: str, *, draft: bool
) -> tuple[EmbeddingModel, EngineComparison]:
    """Return the model as an engine computes it, and the comparison, from the user's cache if it has them."""
    session = _session_of(model, engine, option)
    place = _place(model, recipe, engine, draft=draft)
    graph = place.with_suffix(".onnx")
    stored = _stored(place, graph if session else None)
    if stored is not None:
        return _computed(model, engine, session, graph), stored
    inputs = training_inputs(recipe, option).to(model.device)
    warn(f"{option}: compared with torch on {len(inputs)} training images, once for this model and machine")
    place.parent.mkdir(parents=True, exist_ok=True)
    if session:
        _write_graph(model, inputs, graph, option)
    computed = _computed(model, engine, session, graph)
    drafted = training_inputs(recipe, option, draft=True).to(model.device) if draft else inputs
    measured = _measure(model, computed, inputs, engine, drafted)
    measured = measured.model_copy(update={"checksum": file_checksum(graph) if session else 0})
    measured.write(place)
    warn(
        f"{option}: {measured.images_per_second:.3g} images/s, torch {measured.torch_images_per_second:.3g}, "
        "of the model alone"
    )
    return computed, measured


def _computed(model: EmbeddingModel, engine: Engine, session: Session | None, graph: Path) -> EmbeddingModel:
    if engine == "torch":
        return model
    return ComputedModel(model, session(graph) if session else _bf16(model))


def _stored(place: Path, graph: Path | None) -> EngineComparison | None:
    try:
        found = EngineComparison.read(place)
        return found if graph is None or file_checksum(graph) == found.checksum else None
    except (UserError, OSError):  # there is none, or it is damaged
        return None


def _place(model: EmbeddingModel, recipe: Recipe, engine: Engine, *, draft: bool) -> Path:
    """Return the file of a comparison in ``$XDG_CACHE_HOME/dmlkit``, or ``~/.cache/dmlkit``."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    packages = ("torch",) if engine in ("torch", "bf16") else ("torch", engine, "onnxscript")
    network = recipe.model_dump_json(include={"backbone", "head", "manifold", "embedding_dim", "transform"})
    device = model.device
    processor = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    machine = [platform.machine(), processor, str(torch.get_num_threads())]
    decoding = [f"draft {DRAFT}"] if draft else []
    depends = json.dumps([model.fingerprint(), network, *machine, *map(version, packages), *decoding])
    return Path(folder, "dmlkit", f"engine-{hashlib.sha256(depends.encode()).hexdigest()[:16]}-{engine}.json")


def training_inputs(recipe: Recipe, option: str, *, draft: bool = False) -> Tensor:
    """Return evenly spaced training images as inputs of the model: test classes choose nothing."""
    try:
        dataset = recipe.dataset.build("train")
    except UserError as error:
        raise UserError(f"{option}: needs training images of the run to compare with torch: {error}") from None
    inputs = inputs_of(dataset, recipe.transform, training=False, draft=draft)
    rows = sorted({int(row) for row in torch.linspace(0, len(dataset) - 1, IMAGES).round()})
    batch = collate([inputs[row, 0] for row in rows])
    if len(batch.labels) <= NEAREST:
        reason = batch.faults[0] if batch.faults else f"there are {len(batch.labels)}"
        raise UserError(
            f"{option}: needs more than {NEAREST} training images of the run to compare with torch: {reason}"
        )
    return batch.inputs


@torch.inference_mode()
def compare(
    model: EmbeddingModel, computed: EmbeddingModel, inputs: Tensor, drafted: Tensor | None = None
) -> Computation:
    """Return how far the points of two models agree; engine and precision are those of torch in float32.

    Args:
        drafted: inputs of the second one, if its images are decoded at a smaller size.
    """
    pairs = ((model, inputs), (computed, inputs if drafted is None else drafted))
    points, theirs = (torch.cat([one(part).float() for part in given.split(TIMED)]) for one, given in pairs)
    near = [_nearest(model, one) for one in (points, theirs)]
    return Computation(
        engine="torch",
        precision="fp32",
        images=len(inputs),
        cosine=torch.cosine_similarity(points.double(), theirs.double()).nan_to_num(nan=-1).min().item(),
        same_nearest=int((near[0] == near[1]).all(dim=1).sum()),
    )


@torch.inference_mode()
def _measure(
    model: EmbeddingModel, computed: EmbeddingModel, inputs: Tensor, engine: Engine, drafted: Tensor
) -> EngineComparison:
    """Compare the points of two models, and time them in turns; the first batches are slower."""
    agreement = compare(model, computed, inputs, drafted)
    seconds: list[list[float]] = [[], []]
    for _ in range(3):
        for one, times in zip((model, computed), seconds, strict=True):
            started = perf_counter()
            one(inputs[:TIMED]).float().sum().item()
            times.append(perf_counter() - started)
    speeds = [min(len(inputs), TIMED) / min(times) for times in seconds]
    of_engine = {"precision": "bf16"} if engine == "bf16" else {"engine": engine}
    decoding = "full" if drafted is inputs else "draft"
    computation = agreement.model_copy(update={**of_engine, "decoding": decoding})
    return EngineComparison(
        computation=computation,
        images_per_second=speeds[1],
        torch_images_per_second=speeds[0],
        says_nothing=drafted is not inputs and torch.equal(drafted, inputs),
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


def _has_openvino() -> bool:
    return find_spec("openvino") is not None


def _session_of(model: EmbeddingModel, engine: Engine, option: str) -> Session | None:
    """Return what opens an ONNX graph by an engine; None for an engine that takes none."""
    if engine in ("torch", "bf16"):
        return None
    if model.device.type != "cpu":
        raise UserError(f"{option}: {engine} computes on the CPU here; use the device cpu, or bf16")
    open_session = openvino_session if engine == "openvino" else onnx_session
    return partial(open_session, import_runtime(engine, option))


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
