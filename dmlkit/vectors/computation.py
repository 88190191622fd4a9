"""A model of a run, and what computes it: torch in float32, or a faster runtime, compared with it before it is used.

A device names it: ``cpu`` is torch in float32, ``cpu+onnxruntime``, ``cpu+bf16`` and ``cpu+fastest`` are the others.
The first use of a model compares the embeddings of 64 training images of the run with torch's. The answer is kept in
the user's cache with the ONNX graph, for these weights, versions of packages, and processor: later commands embed
without building the network, nor importing its library. A recipe may name one for the features of training images.
"""

import hashlib
import json
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeInt
from safetensors import SafetensorError
from torch import Tensor

from dmlkit.datasets.files.dataset import evenly_spread
from dmlkit.datasets.files.samples import Samples
from dmlkit.errors import UserError, warn
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import Document
from dmlkit.files.regular import cache_folder, file_checksum
from dmlkit.files.where import Where
from dmlkit.loading.batches import collate
from dmlkit.loading.image_changes import stamp
from dmlkit.loading.inputs import inputs_of
from dmlkit.manifolds.base import Manifold
from dmlkit.model import EmbeddingModel, Normalization
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.vectors.graphs import NotExportableError, import_runtime, onnx_program, onnx_session, traced
from dmlkit.vectors.manifest import NEAREST, Computation, Fusion, LocalFusion
from dmlkit.vectors.operators import read_operators, write_operators

IMAGES = 64  # training images that are compared
BATCH = 32  # of them at a time
KEPT = 8  # graphs of each kind in the user's cache, each of the size of the weights
OPERATORS = "operators"
PARTS = ("normalization", "backbone", "head")
Session = Callable[[Path], Callable[[Tensor], Tensor]]
"""Opens an ONNX graph, and returns a function that maps inputs to points."""


class EngineComparison(Document, frozen=True, strict=True):
    """Comparison of an engine with torch on this machine, in the user's cache."""

    kind: ClassVar[str] = "comparison of an engine with torch"

    computation: Computation
    checksum: NonNegativeInt = 0  # CRC-32 of the graph
    fingerprint: str = ""  # of the weights that torch computes with


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Model of a run, ready to embed; its network is built when it is first used: stored embeddings need none.

    Args:
        build: returns the network in evaluation mode, on the device, always the same one.
        saved: hash of what the checkpoint holds of the model; empty for a model that is not the whole one of a run.
    """

    recipe: Recipe
    samples: Samples
    manifold: Manifold
    device: torch.device
    build: Callable[[], EmbeddingModel]
    saved: str = ""
    checkpoint: CheckpointName
    epoch: int
    recorded: str = ""  # its fingerprint, if it is known
    run: RunFolder | None = None
    fusion: Fusion | None = None  # second model that embeds too, see `dmlkit.vectors.fusion.fuse`
    members: "tuple[TrainedModel, ...]" = ()  # the two models of a fusion
    local: LocalFusion | None = None  # local features that are computed with the points, for a gallery
    computation: Computation | None = None  # what computes it, if not torch in float32
    few: Callable[[], EmbeddingModel] | None = None  # what embeds a few images without the network, if that is kept
    aligned_to: str | None = None  # fingerprint of the older model in whose space it is; None if it has its own

    @classmethod
    def of(
        cls, recipe: Recipe, model: EmbeddingModel, checkpoint: CheckpointName = "last", epoch: int = 0
    ) -> "TrainedModel":
        """Return a network that is built already, in evaluation mode, with the recipe that describes it."""
        parts: Any = {"samples": model.samples, "manifold": model.manifold, "device": model.device}
        return cls(recipe=recipe, checkpoint=checkpoint, epoch=epoch, build=lambda: model, **parts)

    def limited(self, where: Where | None) -> "TrainedModel":
        """Return the model with the rows of its dataset that fulfill conditions, see `DatasetConfig.limited`."""
        if where is None:
            return self
        dataset = self.recipe.dataset.limited(where)
        return replace(self, recipe=self.recipe.model_copy(update={"dataset": dataset}))

    @property
    def model(self) -> EmbeddingModel:
        """Network in evaluation mode, on the device."""
        return self.build()

    @property
    def place(self) -> str:
        """Kind of the device, and what computes on it if not torch in float32, e.g. ``cpu+bf16``."""
        return self.device.type + (self.computation.option if self.computation else "")

    @property
    def model_of_few(self) -> EmbeddingModel:
        """Model that embeds a few images; it need not have the parts of the network."""
        return self.model if self.few is None or self.computation or self.local else self.few()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all weights, see `EmbeddingModel.fingerprint`; another one where the computation does not agree."""
        return self.recorded or self.model.fingerprint()


class ComputedModel(EmbeddingModel):
    """Embedding model in evaluation mode whose points another program computes.

    Its parts are those of the network in torch, which is built when anything but points is needed, e.g. the head alone.
    """

    def __init__(self, trained: TrainedModel, compute: Callable[[Tensor], Tensor]) -> None:
        torch.nn.Module.__init__(self)
        self.trained, self.samples, self.compute = trained, trained.samples, compute
        self.eval()

    @property
    def device(self) -> torch.device:
        return self.trained.device

    @property
    def manifold(self) -> Manifold:
        return self.trained.manifold

    def __getattr__(self, name: str) -> Any:
        """Return a part of the network, or what a module has."""
        return getattr(self.trained.model, name) if name in PARTS else super().__getattr__(name)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map RGB images (B, 3, H, W) uint8, or vectors (B, F) float32, to points (B, D) float32."""
        return self.compute(inputs)


def accelerate(trained: TrainedModel, engine: str, option: str) -> TrainedModel:
    """Return a model as an engine computes it, compared with torch; as it is if ``fastest`` finds none that agrees.

    Args:
        engine: ``bf16``, ``onnxruntime``, or ``fastest``: the first of ``onnxruntime``, on a CPU, and ``bf16``, unless
            it is emulated, whose embeddings agree: every cosine is at least 0.9999, and all 10 nearest images are the
            same.
    """
    candidates = [engine]
    if engine == "fastest":  # on 2 CPU cores ONNX Runtime was 3.3 (Lite0) to 1.5 (ConvNeXt-T) times as fast as torch
        candidates = ["onnxruntime"] if trained.device.type == "cpu" else []
        candidates += ["bf16"] if _computes_bf16(trained.device) else []
    for candidate in candidates:
        try:
            way = option if candidate == engine else f"{option}: {candidate}"
            model, comparison = _prepare(trained, candidate, way)
        except UserError as error:
            if candidate == engine:
                raise
            warn(f"{error}; not used")
            continue
        if candidate == engine or comparison.computation.agrees:
            return as_computed(replace(trained, recorded=comparison.fingerprint), model, comparison.computation)
        warn(f"{option}: {candidate} is not used: {comparison.computation}")
    return trained


def as_computed(trained: TrainedModel, model: EmbeddingModel, computation: Computation) -> TrainedModel:
    """Return a model that another program computes.

    Where its embeddings do not agree with those of torch in float32 it is another model, with a fingerprint of its own:
    so neither are they compared with each other, nor is a threshold of the one used for the other.
    """
    weights = trained.fingerprint
    if not computation.agrees:
        way = f"{weights} {computation.engine} {computation.precision}"
        weights = hashlib.sha256(way.encode()).hexdigest()
    space = trained.aligned_to if computation.agrees else None
    options: Any = {"saved": "", "recorded": weights, "computation": computation, "aligned_to": space}
    return replace(trained, build=lambda: model, **options)


def _computes_bf16(device: torch.device) -> bool:
    """Return whether a device computes in bfloat16; without AVX-512 it is emulated, 18 times as slow for Lite0."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _prepare(trained: TrainedModel, engine: str, option: str) -> tuple[EmbeddingModel, EngineComparison]:
    """Return the network as an engine computes it, and the comparison, from the user's cache if it has them."""
    session = None
    if engine != "bf16":
        if trained.device.type != "cpu":
            raise UserError(f"{option}: {engine} computes on the CPU here; use the device cpu, or bf16")
        session = partial(onnx_session, import_runtime(option))
    place = _place(trained, engine)
    graph = place.with_suffix(".onnx")
    stored = _stored(place, graph if session else None) or _compared(trained, engine, session, place, option)
    return ComputedModel(trained, session(graph) if session else partial(_bf16, trained.model)), stored


def _compared(
    trained: TrainedModel, engine: str, session: Session | None, place: Path, option: str
) -> EngineComparison:
    """Compare an engine with torch on training images, and keep the answer, and the ONNX graph, in the user's cache."""
    model, graph = trained.model, place.with_suffix(".onnx")
    inputs = training_inputs(trained.recipe, option).to(trained.device)
    warn(f"{option}: compared with torch on {len(inputs)} training images, once for this model and machine")
    place.parent.mkdir(parents=True, exist_ok=True)
    if session:
        try:
            program = onnx_program(traced(model, inputs[:2]), "inputs")
        except NotExportableError as error:
            raise UserError(f"{option}: {error}; leave it out, or use bf16") from error
        with atomic_write(graph) as partial_graph:
            program.save(partial_graph)
        _remove_oldest(graph)
    computed = session(graph) if session else partial(_bf16, model)
    of_engine = {"precision": "bf16"} if engine == "bf16" else {"engine": engine}
    comparison = EngineComparison(
        computation=compare(model, computed, inputs).model_copy(update=of_engine),
        checksum=file_checksum(graph) if session else 0,
        fingerprint=model.fingerprint(),
    )
    comparison.write(place)
    return comparison


def _stored(place: Path, graph: Path | None) -> EngineComparison | None:
    try:
        stored = EngineComparison.read(place)
        return stored if graph is None or file_checksum(graph) == stored.checksum else None
    except (UserError, OSError):  # there is none, or it is damaged
        return None


def _place(trained: TrainedModel, engine: str) -> Path:
    """Return the file of a comparison in the user's cache."""
    packages = ("torch", engine, "onnxscript") if engine == "onnxruntime" else ("torch",)
    described = trained.recipe.model_dump_json(include={"backbone", "head", "manifold", "embedding_dim", "transform"})
    device = trained.device
    processor = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    machine = [platform.machine(), processor, str(torch.get_num_threads())]
    weights = trained.saved or trained.model.fingerprint()
    depends = json.dumps([weights, described, *machine, *map(version, packages)])
    return cache_folder() / f"engine-{hashlib.sha256(depends.encode()).hexdigest()[:16]}-{engine}.json"


def training_inputs(recipe: Recipe, option: str) -> Tensor:
    """Return evenly spaced training images as inputs of the model: test classes choose nothing."""
    try:
        dataset = recipe.dataset.build("train")
    except UserError as error:
        raise UserError(f"{option}: needs training images of the run to compare with torch: {error}") from None
    inputs = inputs_of(dataset, recipe.transform, training=False)
    batch = collate([inputs[row, 0] for row in evenly_spread(torch.arange(len(dataset)), IMAGES).tolist()])
    if len(batch.labels) <= NEAREST:
        reason = batch.faults[0] if batch.faults else f"there are {len(batch.labels)}"
        raise UserError(
            f"{option}: needs more than {NEAREST} training images of the run to compare with torch: {reason}"
        )
    return batch.inputs


@torch.inference_mode()
def compare(model: EmbeddingModel, computed: Callable[[Tensor], Tensor], inputs: Tensor) -> Computation:
    """Return how far two functions of inputs agree; engine and precision are those of torch in float32."""
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


def _bf16(model: EmbeddingModel, inputs: Tensor) -> Tensor:
    with torch.autocast(model.device.type, torch.bfloat16):
        return model(inputs).float()


def _remove_oldest(graph: Path) -> None:
    """Remove the oldest graphs of the kind of one that was written."""
    graphs = sorted(graph.parent.glob(f"engine-*{graph.suffix}"), key=lambda path: stamp(str(path))[1])
    for old in graphs[:-KEPT]:
        old.unlink(missing_ok=True)


def keep_operators(trained: TrainedModel) -> None:
    """Keep the operators of a network in the user's cache, so that a later command need not import its library.

    They are kept where they compute the same as the network to the bit, for batches of 1, 2 and 3 images of noise.
    """
    transform = trained.recipe.transform
    if transform is None or not has_operators(trained):
        return
    place = _place(trained, OPERATORS)
    graph = place.with_suffix(".safetensors")
    if _stored(place, graph) is not None:
        return
    shape, model = (3, 3, transform.size, transform.size), trained.model
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    # no operators, or no room, which safetensors reports by an error of its own
    with suppress(UserError, OSError, SafetensorError), torch.inference_mode(False), torch.no_grad():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_operators(torch.nn.Sequential(model.backbone, model.head), model.normalization(images), graph)
        _remove_oldest(graph)
        compute = _with_operators(trained, graph)
        if not all(torch.equal(compute(images[:count]), model(images[:count])) for count in (1, 2, 3)):
            graph.unlink()
            return
        same = Computation(engine="torch", precision="fp32", images=3, cosine=1.0, same_nearest=3)
        checksum, fingerprint = file_checksum(graph), model.fingerprint()
        EngineComparison(computation=same, checksum=checksum, fingerprint=fingerprint).write(place)


def has_operators(trained: TrainedModel) -> bool:
    """Return whether the operators of a network are worth keeping: a library builds it, for a CPU."""
    return bool(trained.saved) and trained.device.type == "cpu" and trained.recipe.backbone.is_of_library


def kept_operators(trained: TrainedModel) -> ComputedModel | None:
    """Return a network by the operators that `keep_operators` has kept; None if there are none."""
    place = _place(trained, OPERATORS)
    graph = place.with_suffix(".safetensors")
    return None if _stored(place, graph) is None else ComputedModel(trained, _with_operators(trained, graph))


def kept_fingerprint(trained: TrainedModel) -> str:
    """Return the hash of the weights of a network whose operators are kept; empty if they are not."""
    with suppress(UserError, OSError):
        return EngineComparison.read(_place(trained, OPERATORS)).fingerprint
    return ""


def _with_operators(trained: TrainedModel, graph: Path) -> Callable[[Tensor], Tensor]:
    """Return the function of a network by its operators, which follow the normalization of pixels."""
    transform = trained.recipe.transform
    assert transform is not None
    normalization = Normalization(transform.mean, transform.std, transform.channels, transform.pixel_max)
    points = read_operators(graph)
    return lambda images: points(normalization(images))
