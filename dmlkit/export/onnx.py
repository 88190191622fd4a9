"""A model as an ONNX graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.export.torch_export import program_of


def write_onnx(trained: TrainedModel, inputs: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """An ONNX graph with a free batch size; its input is named ``images``, or ``vectors``.

    Raises:
        UserError: onnxruntime or onnxscript is not installed.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # pyright: ignore[reportUnusedImport] - torch's exporter needs it
    except ImportError as error:
        raise UserError(f"--format onnx needs {error.name}; install it with: pip install 'dmlkit[onnx]'") from error
    name = "images" if trained.model.num_features is None else "vectors"
    program: Any = torch.onnx.export(
        program_of(trained, inputs), input_names=[name], output_names=["embeddings"], dynamo=True, verbose=False
    )
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(batch: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["embeddings"], {name: batch.numpy()})[0])

    return run
