"""Export of a trained model to safetensors, ONNX and torch.export; each export is compared with the run's model."""

import json
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, FiniteFloat, PositiveInt
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dmlkit.datasets.files.samples import Samples
from dmlkit.errors import UserError
from dmlkit.export.precision import Lowered, ValidationScores
from dmlkit.export.preparation import as_floats, images_program, prepend_preparation
from dmlkit.export.wanted import FLOATS, ModelFormat, ModelInput
from dmlkit.files.atomic import atomic_write
from dmlkit.files.image_file import BadImageError
from dmlkit.files.outputs import writing
from dmlkit.model import build_model
from dmlkit.run_folder.threshold import Threshold
from dmlkit.vectors.graphs import NotExportableError, import_runtime, onnx_program, onnx_session, traced
from dmlkit.vectors.manifest import Description
from dmlkit.vectors.trained import TrainedModel, describe, merged_recipe, without_pretrained_weights

FILE_NAMES: dict[ModelFormat, str] = {
    "safetensors": "model.safetensors",
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
    "hub": "hub",
}
TOLERANCE = 1e-4  # per coordinate; float32 kernels of two runtimes differ by up to 2e-6 on unit vectors
PARITY_IMAGES = 16
MOST_ONNX = 2**31  # bytes of a message of Protocol Buffers


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
    validation: ValidationScores | None = None
    """Metric of validation images before and after the conversion to a lower precision; null for ``fp32``."""


def export_model(
    trained: TrainedModel,
    format: ModelFormat,  # noqa: A002
    output: Path,
    threshold: Threshold | None = None,
    *,
    takes: ModelInput = "squares",
    labels: Sequence[str] = (),
    lowered: Lowered | None = None,
) -> ModelManifest:
    """Write a model, and next to it a manifest of its preprocessing and geometry.

    The exported model returns points (B, D). It takes vectors (B, F) float32, or RGB images: (B, H, W, 3) uint8 of any
    size, or squares (B, 3, S, S), resized as the manifest says, uint8 or as `as_floats` gives them.

    Args:
        trained: the model on the CPU, not merged: the merged export is compared with the model as it was trained.
        format: ``safetensors`` (weights only), ``onnx``, or ``torch-export`` (a .pt2 program).
        takes: what a model of images takes, and so whether it contains their resizing and crop.
        labels: names of the training classes, for the metadata of an ONNX file.
        lowered: the model in a lower precision, which is written to an ONNX file instead.

    Returns:
        The manifest; its ``parity`` is the largest difference from the run's embeddings of real images, or from those
        of the model in a lower precision, whose agreement with the run is in ``computation``.
    """
    exported = lowered.trained if lowered else trained
    model = exported.model
    samples, prepared = parity_samples(trained)
    inputs = torch.stack(prepared)
    with torch.inference_mode():
        if takes == "images":
            expected = [
                (image.permute(1, 2, 0)[None], model(model_input[None]))
                for image, model_input in zip(samples, prepared, strict=True)
            ]
            expected.append((expected[0][0].expand(2, -1, -1, -1), expected[0][1].expand(2, -1)))
        else:
            expected = [(batch, model(batch)) for batch in (inputs, inputs[:1])]
        if takes in FLOATS:
            expected = [(as_floats(batch, takes), points) for batch, points in expected]
    trained.model.backbone.merge()
    with (
        writing(output, SafetensorError),
        atomic_write(manifest_path(output)) as described,
        atomic_write(output) as partial,  # is renamed first, so that no manifest is newer than its model
        torch.inference_mode(),
    ):
        match format:
            case "onnx":
                metadata = {"labels": json.dumps(list(labels))}
                if threshold:
                    metadata["threshold"] = json.dumps(threshold.stamped())
                run = write_onnx(trained, lowered, inputs, takes, metadata, partial)
            case "torch-export":
                run = write_program(trained, inputs, takes, partial)
            case _:
                run = write_safetensors(trained, partial)
        # batches of other sizes than the exporter saw: neither the batch size nor the image size must be fixed
        differences = [(run(batch) - points).abs().max() for batch, points in expected]
        difference = torch.stack(differences).max().item()  # nan stays nan, which Python's max may drop
        if not difference <= TOLERANCE:
            advice = "; --input squares leaves resizing and crop out of it" if takes == "images" else ""
            raise UserError(
                f"{output}: the exported model differs from the run by {difference:.1e}; nothing was written{advice}"
            )
        manifest = ModelManifest(
            **dict(describe(exported)),
            file_format=format,
            input=input_text(inputs, model.samples, takes),
            output=f"embeddings: float32 (batch, {model.manifold.point_dim})",
            parity=Parity(images=len(inputs), largest_difference=difference),
            threshold=threshold,
            validation=lowered.validation if lowered else None,
        )
        described.write_text(manifest.text(), encoding="utf-8")
    return manifest


def manifest_path(output: Path) -> Path:
    """Return the path of an exported model's manifest."""
    return output.with_name(f"{output.name}.json")


def input_text(inputs: Tensor, samples: Samples, takes: ModelInput = "squares") -> str:
    """Describe name, type and shape of a model's input.

    Example:
        >>> from dmlkit.datasets.files.samples import ImageSamples
        >>> input_text(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), ImageSamples())
        'images: uint8 RGB (batch, 3, 32, 32)'
    """
    if takes == "images":
        return "images: uint8 RGB (batch, height, width, 3) of any size, upright"
    sides, kind = ", ".join(map(str, inputs.shape[1:])), str(inputs.dtype).removeprefix("torch.")
    if takes in FLOATS:
        mean, std = FLOATS[takes]
        pixels = "in 0..1" if takes == "tracker" else f"in 0..1 less {mean}, divided by {std}"
        return f"images: float32 RGB (batch, {sides}), {pixels}"
    return f"{samples.name}s: {kind}{' RGB' if samples.has_pixels else ''} (batch, {sides})"


def parity_samples(trained: TrainedModel) -> tuple[list[Tensor], list[Tensor]]:
    """Return a few samples of the test split, or of all images if there is none, evenly spaced; and as model inputs."""
    dataset = trained.recipe.dataset.build(trained.recipe.dataset.default_split)
    trained.model.check_takes(dataset)
    count, samples, faults = min(PARITY_IMAGES, len(dataset)), list[Tensor](), list[str]()
    for index in range(count):
        try:
            samples.append(dataset.sample(index * len(dataset) // count))
        except BadImageError as error:
            faults.append(str(error))
    if not samples:
        raise UserError(f"cannot check the export against real images: {faults[0]}")
    if trained.recipe.transform is None:
        return samples, samples
    transform = trained.recipe.transform.evaluation()
    return samples, [transform(sample) for sample in samples]


def write_onnx(
    trained: TrainedModel,
    lowered: Lowered | None,
    inputs: Tensor,
    takes: ModelInput,
    metadata: dict[str, str],
    path: Path,
) -> Callable[[Tensor], Tensor]:
    """Write an ONNX graph with a dynamic batch size; its input is named ``images`` or ``vectors``."""
    onnxruntime = import_runtime("--format onnx")
    import onnxscript

    name = f"{trained.samples.name}s"
    if lowered:
        trained = lowered.trained
        program: Any = onnxscript.ir.from_proto(lowered.graph)
        program.graph.sort()
    else:
        try:
            program = onnx_program(traced(trained.model, inputs), name).model
        except NotExportableError as error:
            raise UserError(f"--format onnx: {error}; use --format torch-export, or another backbone") from error
    if takes != "squares" and trained.recipe.transform:
        prepend_preparation(program, trained.recipe.transform, takes)
    program.metadata_props.update({"dmlkit": json.dumps(describe(trained).stamped()), **metadata})
    for node in program.graph.all_nodes():
        node.metadata_props.clear()  # lines of code with the paths of this machine, also half of a small file
    size = sum(value.const_value.nbytes for value in program.graph.initializers.values() if value.const_value)
    if size >= MOST_ONNX:
        raise UserError(
            f"--format onnx: the weights take {size / 1e9:.1f} GB, expected less than {MOST_ONNX / 1e9:.1f}, the most "
            "that an ONNX file holds; use --format torch-export or safetensors"
        )
    onnxscript.ir.save(program, path)
    return onnx_session(onnxruntime, path)


def write_program(trained: TrainedModel, inputs: Tensor, takes: ModelInput, path: Path) -> Callable[[Tensor], Tensor]:
    """Write a program for ``torch.export.load`` with a dynamic batch size."""
    model, transform = trained.model, trained.recipe.transform
    try:
        program = images_program(model, transform) if takes == "images" and transform else traced(model, inputs)
    except NotExportableError as error:
        raise UserError(f"--format torch-export: {error}; use --format safetensors, or another backbone") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of code with the paths of this machine
    buffer = BytesIO()
    with warnings.catch_warnings():  # of weights in the order channels_last, which are whole and are loaded so again
        warnings.filterwarnings("ignore", message="No complete tensor found")
        torch.export.save(program, buffer)  # torch would abort the process on a full disk
    path.write_bytes(buffer.getbuffer())
    with path.open("rb") as file:
        return torch.export.load(file).module()


def write_safetensors(trained: TrainedModel, path: Path) -> Callable[[Tensor], Tensor]:
    """Write the weights, with everything needed to rebuild the model in the file's metadata."""
    recipe = merged_recipe(trained.recipe)
    metadata = {"dmlkit": json.dumps(describe(trained).stamped()), "recipe": recipe.model_dump_json()}
    tensors = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
    save_file(tensors, path, metadata)
    rebuilt = build_model(without_pretrained_weights(recipe), trained.samples.num_features)
    rebuilt.load_state_dict(load_file(path))
    return rebuilt.eval()
