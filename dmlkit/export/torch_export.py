"""A model as a program for `torch.export.load`."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from dmlkit.embedding.trained import TrainedModel


def write_program(trained: TrainedModel, inputs: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """A program for ``torch.export.load``, with a free batch size."""
    program, buffer = program_of(trained, inputs), BytesIO()
    torch.export.save(program, buffer)  # on a full disk torch itself would end the process
    path.write_bytes(buffer.getbuffer())
    with path.open("rb") as file:
        return torch.export.load(file).module()


def program_of(trained: TrainedModel, inputs: Tensor) -> torch.export.ExportedProgram:
    """The model traced on images, or vectors, with a free batch size."""
    batch = torch.export.Dim("batch", min=1)
    example = inputs.expand(max(2, len(inputs)), *inputs.shape[1:])  # a single one would fix the batch size at 1
    return torch.export.export(trained.model, (example,), dynamic_shapes={"inputs": {0: batch}})
