"""Export a trained model to formats that other programs load, each checked against the run before it is kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, FiniteFloat, PositiveInt
from safetensors import SafetensorError
from torch import Tensor

from dmlkit.embedding.manifest import Description, describe
from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.export.onnx import write_onnx
from dmlkit.export.safetensors import write_safetensors
from dmlkit.export.torch_export import write_program
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import check_output, writing
from dmlkit.loading.batches import evaluation_loader
from dmlkit.loading.cache import images_of_split
from dmlkit.run_folder.threshold import Threshold

ModelFormat = Literal["safetensors", "onnx", "torch-export"]
FILE_NAMES: dict[ModelFormat, str] = {
    "safetensors": "model.safetensors",
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
}
TOLERANCE = 1e-4  # of a coordinate; float32 kernels of two runtimes differ by up to 2e-6 on unit vectors
PARITY_IMAGES = 16


class Parity(BaseModel, frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True):
    """How far the exported model was from the run's own."""

    images: PositiveInt
    """Real images that both embedded."""
    largest_difference: FiniteFloat
    """Of a coordinate."""


class ModelManifest(Description, frozen=True, strict=True, use_attribute_docstrings=True):
    """What stands beside an exported model: its preprocessing and geometry."""

    kind: ClassVar[str] = "manifest of an exported model"

    file_format: ModelFormat
    """Of the file beside it."""
    input: str
    """Name, type and shape of what the model takes."""
    output: str
    """Likewise of what it gives."""
    parity: Parity
    """What was found before it was kept."""
    threshold: Threshold | None = None
    """From which similarity on two embeddings are of one class, where ``dmlkit calibrate`` was run before."""


def export_model(
    trained: TrainedModel,
    format: ModelFormat,  # noqa: A002
    output: Path,
    threshold: Threshold | None = None,
) -> ModelManifest:
    """Write a model and, beside it, a manifest of its preprocessing and geometry.

    The exported model takes RGB pixels (B, 3, S, S) uint8, resized as the manifest says, and gives points (B, D).

    Args:
        trained: on the CPU.
        format: ``safetensors`` (weights alone), ``onnx``, or ``torch-export`` (a .pt2 program).
        output: the file to write.
        threshold: of the model, if it was calibrated.

    Returns:
        The manifest, with ``parity``: the largest difference to the run's own embeddings over real images.

    Raises:
        UserError: a package for the format is missing, or the exported model disagrees with the run.
    """
    model = trained.model
    images = parity_images(trained)
    write = {"safetensors": write_safetensors, "onnx": write_onnx, "torch-export": write_program}[format]
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    # the manifest is renamed first: whatever a kill leaves has one, and is dmlkit's
    with (
        writing(output, SafetensorError),
        atomic_write(output) as partial,
        atomic_write(beside(output)) as described,
        torch.inference_mode(),
    ):
        run = write(trained, images, partial)
        # a smaller batch than the exporter saw: the batch size must not be baked in
        differences = [(run(batch) - model(batch)).abs().max() for batch in (images, images[:1])]
        difference = torch.stack(differences).max().item()  # of nan and a number nan, which Python's max may drop
        if not difference <= TOLERANCE:
            raise UserError(f"{output}: the exported model differs from the run by {difference:.1e}; nothing was kept")
        manifest = ModelManifest(
            **dict(describe(trained)),
            file_format=format,
            input=f"images: uint8 RGB (batch, 3, {images.shape[-1]}, {images.shape[-1]})",
            output=f"embeddings: float32 (batch, {model.manifold.point_dim})",
            parity=Parity(images=len(images), largest_difference=difference),
            threshold=threshold,
        )
        described.write_text(manifest.text(), encoding="utf-8")
    return manifest


def beside(output: Path) -> Path:
    """The manifest of an exported model."""
    return output.with_name(f"{output.name}.json")


def check_model_output(format: ModelFormat, output: Path, sources: Sequence[Path]) -> None:  # noqa: A002
    """Make sure that an exported model and its manifest may be written where the user says.

    Raises:
        UserError: something is there that such an export has not written; see `check_output`.
    """
    check_output(output, lambda _: _is_model(format, output), sources=sources)
    check_output(beside(output), lambda _: _is_model(format, output), sources=sources)


def _is_model(format: ModelFormat, output: Path) -> bool:  # noqa: A002
    manifest = beside(output)
    return ModelManifest.is_at(manifest) and ModelManifest.read(manifest).file_format == format


def parity_images(trained: TrainedModel) -> Tensor:
    """A few real images of the test split, evenly spread, as the model takes them.

    Raises:
        UserError: none of them can be read.
    """
    dataset = images_of_split(trained.recipe.dataset, "test")
    count = min(PARITY_IMAGES, len(dataset))
    indices = [index * len(dataset) // count for index in range(count)]
    loader = evaluation_loader(dataset, trained.recipe.transform, indices=indices, workers=0)
    batch = next(iter(loader))
    if not len(batch.labels):
        raise UserError(f"cannot check the export against real images: {batch.faults[0]}")
    return batch.images
