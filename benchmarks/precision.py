"""Precision of an exported ONNX model: what float16 and kinds of int8 cost of map@r, and of the bytes of the file.

The model is that of RUN, in ONNX Runtime, without resizing and crop. Every row of int8 changes one thing of the row
`int8`, which is what `dmlkit export --precision int8` does: convolutions and linear layers with unsigned weights, a
scale per channel, and ranges that are the least and greatest values on 64 training images; the smallest layers, with
3 % of the weights, stay in fp32.

- `size`: bytes of the file, as a share of fp32's.
- `cosine`: least cosine to the embedding of torch in float32, on the same 64 training images; `same 10`: number of them
  whose 10 nearest others are the same.
- `validation`, `test`: map@r minus that of torch in float32. The defaults were chosen by the least cosine on
  training images, when the test value of another form (with Clip and Relu) was already known.

Run: dmlkit train start/frozen_lite0 -o RUN --set dataset.root=PHOTOS; python benchmarks/precision.py RUN. PHOTOS are
those of the Grocery Store data set, one folder per product.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationMethod, QuantType
from report import write_report
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_ranks
from dmlkit.export.precision import WEIGHTED, to_fp16, to_int8
from dmlkit.metrics.scoring import retrieval_metrics
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.computation import ComputedModel, as_computed, compare, training_inputs
from dmlkit.vectors.graphs import onnx_program, onnx_session, traced
from dmlkit.vectors.in_memory import embed_images
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import TrainedModel, load_model

FEW = 16  # images for the methods that keep all activations of all images in memory
SPLITS: tuple[Split, ...] = ("validation", "test")


def variants(graph: Any) -> dict[str, dict[str, Any]]:
    """Return the options of the quantizer by the name of a row."""
    percentile: Any = {"MatMulConstBOnly": True, "CalibPercentile": 99.99}
    average: Any = {"MatMulConstBOnly": True, "CalibMovingAverage": True}
    weighted = [node.name for node in graph.graph.node if node.op_type in WEIGHTED]
    return {
        "int8": {},
        "int8, signed weights": {"weight_type": QuantType.QInt8},
        "int8, signed weights of 7 bits": {"weight_type": QuantType.QInt8, "reduce_range": True},
        "int8, a scale per layer": {"per_channel": False},
        "int8, activations too": {"op_types_to_quantize": [*WEIGHTED, "Clip", "Relu"]},
        "int8, all layers": {"nodes_to_exclude": []},
        "int8, first and last layer in fp32": {"nodes_to_exclude": [weighted[0], weighted[-1]]},
        "int8, moving average": {"extra_options": average},
        f"int8, percentile 99.99 of {FEW}": {
            "calibrate_method": CalibrationMethod.Percentile,
            "extra_options": percentile,
        },
        f"int8, entropy of {FEW}": {"calibrate_method": CalibrationMethod.Entropy},
    }


def row_of(
    name: str, graph: Any, trained: TrainedModel, inputs: Tensor, size: int, exact: Sequence[float]
) -> list[str]:
    """Measure one row; only that of the command is measured on test images too."""
    content = graph.SerializeToString()
    model = ComputedModel(trained, onnx_session(onnxruntime, content))
    agreement = compare(trained.model, model, inputs)
    differences: list[str] = []
    for split, before in zip(SPLITS, exact, strict=True):
        if split == "test" and name != "int8":
            differences.append("")
            continue
        images = trained.recipe.dataset.build(split)
        points = embed_images(as_computed(trained, model, agreement), start_ranks("cpu"), images, split)
        differences.append(f"{score(trained, points.points, points.labels) - before:+.4f}")
    share = f"{len(content) / size:.3f}"
    return [name, share, f"{agreement.cosine:.4f}", f"{agreement.same_nearest} of {agreement.images}", *differences]


def score(trained: TrainedModel, points: Tensor, labels: Tensor) -> float:
    """Return map@r."""
    return retrieval_metrics(points, labels, manifold=trained.manifold, metrics=["map@r"])["map@r"]


def main(path: str) -> None:
    """Measure all rows and write the report."""
    logging.disable(logging.WARNING)
    run, ranks = RunFolder(Path(path)), start_ranks("cpu")
    trained = load_model(run, ranks)
    inputs = training_inputs(trained.recipe, "the benchmark")
    exact: list[float] = []
    for split in SPLITS:
        embeddings = split_embeddings(run, trained, ranks, trained.recipe.dataset.build(split), split)
        exact.append(score(trained, embeddings.points, embeddings.labels))
        print(split, len(embeddings.points), exact[-1], flush=True)
    with torch.no_grad():
        graph = onnx_program(traced(trained.model, inputs[:2]), "images").model_proto
    size, rows = len(graph.SerializeToString()), list[list[str]]()
    for name, options in {"fp16": None, **variants(graph)}.items():
        copy = onnx.ModelProto.FromString(graph.SerializeToString())
        if options is not None:
            copy = to_int8(copy, "images", inputs[:FEW] if str(FEW) in name else inputs, **options)
        else:
            copy = to_fp16(copy)
        rows.append(row_of(name, copy, trained, inputs, size, exact))
        print(rows[-1], flush=True)
    header = ["precision", "size", "cosine", "same 10", *SPLITS]
    about = f"{__doc__}\nfp32: {size:,} bytes; map@r {exact[0]:.4f} on validation, {exact[1]:.4f} on test images."
    write_report("precision", about, header, rows)


if __name__ == "__main__":
    main(sys.argv[1])
