"""ONNX graphs of models: written by PyTorch's exporters, opened by ONNX Runtime."""

import logging
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.errors import UserError, first_line


def import_runtime(option: str) -> ModuleType:
    """Return the package ``onnxruntime``, after a check that graphs can be written too."""
    try:
        if find_spec("onnxscript") is None:  # torch's exporter needs it; its import takes .4 s
            raise ModuleNotFoundError(name="onnxscript")
        return import_module("onnxruntime")
    except ImportError as error:
        raise UserError(f"{option} needs {error.name}; install it with: pip install 'dmlkit[onnx]'") from error


@contextmanager
def quiet() -> Generator[None]:
    """Silence the pages that PyTorch's exporters and onnxruntime's tools log and print."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


class NotExportableError(UserError):
    """The operators of a model cannot be written as a graph; the message names the first of them."""


OPERATOR = re.compile(r"OpOverload\(op='([\w.]+)'")


@contextmanager
def _in_one_line(problem: str) -> Generator[None]:
    """Raise an error of PyTorch's exporters, which has pages, as one line."""
    try:
        with torch.no_grad(), quiet():
            yield
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        operator = OPERATOR.search(str(cause))
        reason = f"no form of the operator {operator[1]}" if operator else first_line(cause)
        raise NotExportableError(f"{problem} ({reason})") from error


def traced(model: nn.Module, inputs: Tensor, *dynamic: str) -> torch.export.ExportedProgram:
    """Return a model traced on a batch of inputs.

    Args:
        dynamic: names of its first dimensions, whose sizes the program leaves open. Default: that of the batch alone.
    """
    sizes = {number: torch.export.Dim(name, min=1) for number, name in enumerate(dynamic or ("batch",))}
    example = inputs.expand(max(2, len(inputs)), *inputs.shape[1:])  # a batch of one would fix the batch size at 1
    with _in_one_line("PyTorch cannot trace this model"):
        return torch.export.export(model, (example,), dynamic_shapes=(sizes,))


def onnx_program(program: torch.export.ExportedProgram, name: str) -> Any:
    """Return the ONNX program of a traced model, whose input has a name and whose output is ``embeddings``."""
    with _in_one_line("ONNX cannot express this model"):
        return torch.onnx.export(program, input_names=[name], output_names=["embeddings"], dynamo=True, verbose=False)


def onnx_session(runtime: ModuleType, graph: Path | bytes) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the points of an ONNX graph, with as many threads as torch."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

    def compute(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["embeddings"], {session.get_inputs()[0].name: inputs.numpy()})[0])

    return compute
