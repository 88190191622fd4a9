"""Lower precision of an exported ONNX model: float16, or int8 by onnxruntime's quantizer on training images.

The weighted layers compute in the lower precision, and the map to the points of the manifold in float32. So a point is
on its manifold, however coarse its features are. The result is compared with the run before it is written.
"""

import tempfile
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, FiniteFloat, PositiveInt
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError, first_line
from dmlkit.export.wanted import ModelPrecision
from dmlkit.manifolds.base import Manifold, check_points
from dmlkit.metrics.scoring import retrieval_metrics
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.computation import ComputedModel, as_computed, compare, training_inputs
from dmlkit.vectors.graphs import NotExportableError, import_runtime, onnx_program, onnx_session, quiet, traced
from dmlkit.vectors.in_memory import Embeddings, embed_images
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import TrainedModel

WEIGHTED = ("Conv", "Gemm", "MatMul")  # operators of ONNX that multiply by weights, in which their bytes are
SMALL = 0.03  # share of the weights that stay in float32, in the smallest layers; the file is 0.02 of fp32's larger
METRIC = "map@r"


class ValidationScores(BaseModel, frozen=True, extra="forbid", strict=True):
    """Metric of validation images before and after a model was converted to a lower precision."""

    metric: str = METRIC
    """Name of the metric."""
    images: PositiveInt
    """Number of validation images."""
    fp32: FiniteFloat
    """Value of the run's model."""
    lowered: FiniteFloat
    """Value of the model in the lower precision."""

    def __str__(self) -> str:
        return f"{self.metric} {self.lowered:.4f}, fp32 {self.fp32:.4f} on {self.images:,} validation images"


@dataclass(frozen=True)
class Lowered:
    """A model in a lower precision."""

    graph: Any
    trained: TrainedModel  # the model that this graph computes, with its agreement in ``computation``
    validation: ValidationScores | None  # metric on validation images; None if the run has none
    report: str  # agreement, metric on validation images, and size, for the user
    notes: list[str]  # what the user has to know of embeddings that do not agree with those of the run


def lower(run: RunFolder, trained: TrainedModel, precision: ModelPrecision, ranks: Ranks) -> Lowered:
    """Return the model of a run in a lower precision, compared with torch in float32 on its training images.

    Args:
        trained: its model on the CPU, with low-rank updates added to the weights.
    """
    option, name = f"--precision {precision}", f"{trained.samples.name}s"
    onnxruntime = import_runtime(option)
    inputs = training_inputs(trained.recipe, option)
    try:
        whole = onnx_program(traced(trained.model, inputs[:2]), name).model_proto
    except NotExportableError as error:
        raise UserError(f"{option}: {error}; use --format torch-export in fp32, or another backbone") from error
    try:
        with quiet():
            graph = to_int8(whole, name, inputs) if precision == "int8" else to_fp16(whole)
            content = graph.SerializeToString()
            session = onnx_session(onnxruntime, content)
    except UserError:
        raise
    except Exception as error:  # of the graph's operators: the tools of onnxruntime raise many kinds
        reason = first_line(error)
        raise UserError(f"{option}: onnxruntime cannot convert this model ({reason}); use --precision fp32") from error
    model = ComputedModel(trained, session)
    advice = f"{precision} is too coarse for this model and its space ({trained.recipe.manifold.name}); use another"
    check_points(trained.manifold, model(inputs), lambda row: f"{option}: training image {row}", advice)
    agreement = compare(trained.model, model, inputs)
    agreement = agreement.model_copy(update={"engine": "onnxruntime", "precision": precision})
    lowered = as_computed(trained, model, agreement)
    scores = _validation_scores(run, trained, lowered, ranks)
    figures = scores or f"{METRIC} is unknown, because the run has no validation images"
    share = len(content) / whole.ByteSize()
    note = "its embeddings are those of another model: do not compare them with embeddings of the run"
    report = f"{precision}: {agreement}; {figures}; {share:.2f} of the size of fp32"
    return Lowered(graph, lowered, scores, report, [] if agreement.agrees else [note])


def _validation_scores(
    run: RunFolder, trained: TrainedModel, lowered: TrainedModel, ranks: Ranks
) -> ValidationScores | None:
    """Return the metric of both models on validation images; None if there are none."""
    try:
        images = trained.recipe.dataset.searched("validation")
    except UserError:
        return None
    source = f"the validation split of {run.path}"
    exact = None if trained.run is None else split_embeddings(run, trained, ranks, images, "validation")
    exact = exact or embed_images(trained, ranks, images, source)
    rows = exact.indices if images.query is None else exact.indices[images.query[exact.indices]]
    fp32, lowered_score = (
        _score(embeddings, images, trained.manifold)
        for embeddings in (exact, embed_images(lowered, ranks, images, source))
    )
    return ValidationScores(images=len(rows), fp32=fp32, lowered=lowered_score)


def _score(embeddings: Embeddings, images: Dataset, manifold: Manifold) -> float:
    """Return the metric of images, of which the queries search the gallery, as in an evaluation."""
    points, ids = embeddings.points, embeddings.indices
    labels = embeddings.labels if images.members is None else images.members[embeddings.labels]
    groups = images.groups_of(ids)
    query, searched = (
        torch.ones(len(ids), dtype=torch.bool) if chosen is None else chosen[ids]
        for chosen in (images.query, images.gallery)
    )
    return retrieval_metrics(
        points[query],
        labels[query],
        points[searched],
        labels[searched],
        manifold,
        [METRIC],
        ids=(groups[query], groups[searched]),
    )[METRIC]


def to_int8(graph: Any, name: str, inputs: Tensor, **options: Any) -> Any:
    """Return a graph whose weighted layers have weights and inputs of 8 bits, with scales from samples.

    The smallest layers, with at most `SMALL` of all weights, stay in float32. They are the first layers and depthwise
    convolutions, whose errors are the largest and whose bytes are few.

    Args:
        options: further arguments of onnxruntime's ``quantize_static``, or other values of those given here.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    feeds = ({name: row.numpy()} for row in inputs.split(1))

    class Samples(CalibrationDataReader):
        def get_next(self) -> Any:
            return next(feeds, None)

    with tempfile.TemporaryDirectory() as folder:
        start, simplified, result = (Path(folder, name) for name in ("start.onnx", "simplified.onnx", "result.onnx"))
        onnx.save(graph, start)
        quant_pre_process(str(start), str(simplified), skip_symbolic_shape=True)
        whole = onnx.load(simplified).graph
        sizes = {tensor.name: prod(tensor.dims) for tensor in whole.initializer}
        layers = sorted((sizes.get(node.input[1], 0), node.name) for node in whole.node if node.op_type in WEIGHTED)
        sums = list(accumulate((size for size, _ in layers), initial=0))
        chosen: dict[str, Any] = {
            "quant_format": QuantFormat.QDQ,
            "op_types_to_quantize": list(WEIGHTED),
            "nodes_to_exclude": [
                name for (_, name), below in zip(layers, sums[1:], strict=True) if below <= SMALL * sums[-1]
            ],
            "per_channel": True,
            "activation_type": QuantType.QUInt8,
            "weight_type": QuantType.QUInt8,  # of signed ones, processors without VNNI saturate the sums
            # without CalibMaxIntermediateOutputs, which discards collected ranges in onnxruntime 1.31
            "extra_options": {"MatMulConstBOnly": True},
        }
        quantize_static(simplified, result, Samples(), **{**chosen, **options})
        quantized = onnx.load(result)
    if not any(node.op_type == "DequantizeLinear" for node in quantized.graph.node):
        raise UserError("--precision int8: the model has no layer that onnxruntime quantizes; use --precision fp32")
    return quantized


def to_fp16(graph: Any) -> Any:
    """Return a graph whose nodes up to the last weighted layer compute in float16."""
    from onnx import TensorProto
    from onnxruntime.transformers.float16 import convert_float_to_float16

    last = max((row for row, node in enumerate(graph.graph.node) if node.op_type in WEIGHTED), default=-1)
    if last < 0:
        raise UserError("--precision fp16: the model has no weighted layer; use --precision fp32")
    after = [node.name for node in graph.graph.node[last + 1 :]]
    converted = convert_float_to_float16(graph, keep_io_types=True, node_block_list=after)
    first: dict[str, int] = {}
    for row, node in enumerate(converted.graph.node):
        first.setdefault(node.output[0], row)
    # the same cast is there once per node that needs it, with the same names
    for row in sorted({*range(len(converted.graph.node))} - {*first.values()}, reverse=True):
        del converted.graph.node[row]
    casts = {node.output[0]: node for node in converted.graph.node if node.op_type == "Cast"}
    for back in casts.values():  # a node in float32 reads another's result, not its cast to float16 and back
        there = casts.get(back.input[0])
        if there and there.attribute[0].i == TensorProto.FLOAT16 and back.attribute[0].i == TensorProto.FLOAT:
            back.op_type, back.input[0] = "Identity", there.input[0]
            del back.attribute[:]
    return converted
