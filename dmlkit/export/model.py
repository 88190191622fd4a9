"""Export of a trained model to safetensors, ONNX and torch.export; each export is compared with the run's model."""

import json
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, FiniteFloat, PositiveInt
from safetensors import SafetensorError
from torch import Tensor

from dmlkit.datasets.files.samples import Samples
from dmlkit.embedding.manifest import Description
from dmlkit.embedding.trained import TrainedModel, describe, merged_recipe, without_pretrained_weights
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import check_output, writing
from dmlkit.files.source import ModelFormat
from dmlkit.loading.batches import evaluation_loader
from dmlkit.loading.cache import images_of_split
from dmlkit.model import EmbeddingModel, build_model
from dmlkit.run_folder.threshold import Threshold

FILE_NAMES: dict[ModelFormat, str] = {
    "safetensors": "model.safetensors",
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
}
TOLERANCE = 1e-4  # per coordinate; float32 kernels of two runtimes differ by up to 2e-6 on unit vectors
PARITY_IMAGES = 16


class Parity(BaseModel, frozen=True, extra="forbid", strict=True):
    """Difference between the exported model and the run's model."""

    images: PositiveInt
    """Number of real images, or vectors, that both models embedded."""
    largest_difference: FiniteFloat
    """Largest difference of a coordinate."""


class ModelManifest(Description, frozen=True, strict=True):
    """Manifest of an exported model: its preprocessing and geometry."""

    kind: ClassVar[str] = "manifest of an exported model"

    file_format: ModelFormat
    """Format of the exported file."""
    input: str
    """Name, type and shape of the input."""
    output: str
    """Name, type and shape of the output."""
    parity: Parity
    """Comparison with the run's model."""
    threshold: Threshold | None = None
    """Similarity from which two embeddings are of one class, if ``dmlkit calibrate`` was run before."""


def export_model(
    trained: TrainedModel,
    format: ModelFormat,  # noqa: A002
    output: Path,
    threshold: Threshold | None = None,
) -> ModelManifest:
    """Write a model, and next to it a manifest of its preprocessing and geometry.

    The exported model takes RGB pixels (B, 3, S, S) uint8, resized as the manifest says, or vectors (B, F) float32, and
    returns points (B, D).

    Args:
        trained: the model on the CPU, not merged: the merged export is compared with the model as it was trained.
        format: ``safetensors`` (weights only), ``onnx``, or ``torch-export`` (a .pt2 program).

    Returns:
        The manifest; its ``parity`` is the largest difference from the run's embeddings of real images.

    Raises:
        UserError: a package for the format is missing, or the exported model differs from the run's model.
    """
    model = trained.model
    inputs = parity_inputs(trained)
    write = {"safetensors": write_safetensors, "onnx": write_onnx, "torch-export": write_program}[format]
    with torch.inference_mode():
        expected = [(batch, model(batch)) for batch in (inputs, inputs[:1])]
    model.backbone.merge()
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    # the manifest is renamed first, so that files left by a kill are recognized as dmlkit's
    with (
        writing(output, SafetensorError),
        atomic_write(output) as partial,
        atomic_write(manifest_path(output)) as described,
        torch.inference_mode(),
    ):
        run = write(trained, inputs, partial)
        # a batch of another size than the exporter saw: the batch size must not be fixed
        differences = [(run(batch) - points).abs().max() for batch, points in expected]
        difference = torch.stack(differences).max().item()  # nan stays nan, which Python's max may drop
        if not difference <= TOLERANCE:
            raise UserError(
                f"{output}: the exported model differs from the run by {difference:.1e}; nothing was written"
            )
        manifest = ModelManifest(
            **dict(describe(trained)),
            file_format=format,
            input=input_text(inputs, model.samples),
            output=f"embeddings: float32 (batch, {model.manifold.point_dim})",
            parity=Parity(images=len(inputs), largest_difference=difference),
            threshold=threshold,
        )
        described.write_text(manifest.text(), encoding="utf-8")
    return manifest


def manifest_path(output: Path) -> Path:
    """Return the path of an exported model's manifest."""
    return output.with_name(f"{output.name}.json")


def check_model_output(format: ModelFormat, output: Path, sources: Sequence[Path]) -> None:  # noqa: A002
    """Check that an exported model and its manifest may be written to the given output.

    Raises:
        UserError: a file exists that such an export did not write; see `check_output`.
    """
    check_output(output, lambda _: _is_model(format, output), sources=sources)
    check_output(manifest_path(output), lambda _: _is_model(format, output), sources=sources)


def _is_model(format: ModelFormat, output: Path) -> bool:  # noqa: A002
    manifest = manifest_path(output)
    return ModelManifest.is_at(manifest) and ModelManifest.read(manifest).file_format == format


def input_text(inputs: Tensor, samples: Samples) -> str:
    """Describe name, type and shape of a model's input.

    Example:
        >>> from dmlkit.datasets.files.samples import ImageSamples
        >>> input_text(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), ImageSamples())
        'images: uint8 RGB (batch, 3, 32, 32)'
    """
    sides, kind = ", ".join(map(str, inputs.shape[1:])), str(inputs.dtype).removeprefix("torch.")
    return f"{samples.name}s: {kind}{' RGB' if samples.has_pixels else ''} (batch, {sides})"


def parity_inputs(trained: TrainedModel) -> Tensor:
    """Return a few samples of the test split, or of all images if there is none, evenly spaced, as input of the model.

    Raises:
        UserError: none of them can be read.
    """
    dataset = images_of_split(trained.recipe.dataset, trained.recipe.dataset.default_split)
    trained.model.check_takes(dataset)
    count = min(PARITY_IMAGES, len(dataset))
    indices = [index * len(dataset) // count for index in range(count)]
    loader = evaluation_loader(dataset, trained.recipe.transform, indices=indices, workers=0)
    batch = next(iter(loader))
    if not len(batch.labels):
        raise UserError(f"cannot check the export against real images: {batch.faults[0]}")
    return batch.inputs


def write_onnx(trained: TrainedModel, inputs: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """Write an ONNX graph with a dynamic batch size; its input is named ``images`` or ``vectors``.

    Raises:
        UserError: onnxruntime or onnxscript is not installed.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  # pyright: ignore[reportUnusedImport] - torch's exporter needs it
    except ImportError as error:
        raise UserError(f"--format onnx needs {error.name}; install it with: pip install 'dmlkit[onnx]'") from error
    name = f"{trained.samples.name}s"
    program: Any = torch.onnx.export(
        program_of(trained, inputs), input_names=[name], output_names=["embeddings"], dynamo=True, verbose=False
    )
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(batch: Tensor) -> Tensor:
        return torch.from_numpy(session.run(["embeddings"], {name: batch.numpy()})[0])

    return run


def write_program(trained: TrainedModel, inputs: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """Write a program for ``torch.export.load`` with a dynamic batch size."""
    program, buffer = program_of(trained, inputs), BytesIO()
    torch.export.save(program, buffer)  # torch would abort the process on a full disk
    path.write_bytes(buffer.getbuffer())
    with path.open("rb") as file:
        return torch.export.load(file).module()


def program_of(trained: TrainedModel, inputs: Tensor) -> torch.export.ExportedProgram:
    """Return the model traced on images or vectors, with a dynamic batch size."""
    batch = torch.export.Dim("batch", min=1)
    example = inputs.expand(max(2, len(inputs)), *inputs.shape[1:])  # a batch of one would fix the batch size at 1
    return torch.export.export(trained.model, (example,), dynamic_shapes={"inputs": {0: batch}})


def write_safetensors(trained: TrainedModel, _: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
    """Write the weights, with everything needed to rebuild the model in the file's metadata."""
    from safetensors.torch import load_file, save_file

    description = describe(trained)
    document = description.stamped()
    recipe = merged_recipe(trained.recipe)
    metadata = {"dmlkit": json.dumps(document), "recipe": recipe.model_dump_json()}
    tensors = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
    save_file(tensors, path, metadata)
    rebuilt: EmbeddingModel = build_model(without_pretrained_weights(recipe), trained.samples.num_features)
    rebuilt.load_state_dict(load_file(path))
    return rebuilt.eval()
