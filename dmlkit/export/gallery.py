"""Export of a gallery with its model to one ONNX file, which embeds an image and compares it with all images.

`dmlkit.embedding.questions.exported` reads it, without torch. The graph is traced from the model and from the
similarity of its manifold, so that there is one implementation of both.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.fusion import OWN_MODEL
from dmlkit.embedding.gallery.folder import GalleryFolder
from dmlkit.embedding.graphs import NotExportableError, import_runtime, onnx_program, traced
from dmlkit.embedding.points import all_points, load_same_model
from dmlkit.embedding.questions.exported import METADATA, SIMILARITIES, GalleryRecord
from dmlkit.embedding.questions.identify import Identifier
from dmlkit.embedding.trained import TrainedModel, describe
from dmlkit.errors import UserError, first_line
from dmlkit.export.model import TOLERANCE, Parity, parity_samples
from dmlkit.export.preparation import prepend_preparation
from dmlkit.files.atomic import atomic_write
from dmlkit.files.image_file import box_cell
from dmlkit.files.outputs import check_output, writing
from dmlkit.model import EmbeddingModel

FILE_NAME = "gallery.onnx"
MOST_BYTES = 1_900_000_000  # of the embeddings: protobuf limits a file to 2 GiB


class ComparedWithGallery(nn.Module):
    """Model that returns the points (B, D) of its inputs, and their similarities (B, N) to the points of a gallery."""

    gallery: Tensor

    def __init__(self, model: EmbeddingModel, gallery: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("gallery", gallery)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Embed, and compare in float64: products in float32 round distances of similar images."""
        points = self.model(inputs)
        return points, self.model.manifold.similarity(points.double(), self.gallery.double())


def export_gallery(path: Path, output: Path | None) -> tuple[Path, Parity]:
    """Write a gallery and its model to an ONNX file; return the file and its difference from torch on real images.

    Args:
        path: the gallery.
        output: the file. Default: ``exports/gallery.onnx`` in the gallery.

    Raises:
        UserError: a package is missing, the gallery is empty, has unlabeled images or two models, its run is not found,
            ONNX cannot express its model or similarity, or the file exists and dmlkit did not write it.
    """
    onnxruntime = import_runtime("onnxruntime", "--format onnx")
    gallery, output = GalleryFolder(path), output or path / "exports" / FILE_NAME
    check_output(output, is_exported_gallery)
    trained, points = _model_and_points(gallery)
    samples, prepared = parity_samples(trained)
    module = ComparedWithGallery(trained.model, points).eval()
    program = _program(module, trained, torch.stack(prepared[:2]), gallery)
    program.metadata_props[METADATA] = _record(gallery).text()
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    with writing(output), atomic_write(output) as partial:
        import onnxscript

        onnxscript.ir.save(program, partial)
        try:
            session: Any = onnxruntime.InferenceSession(partial, providers=["CPUExecutionProvider"])
            differences = list(_differences(session, module, samples, prepared))
        except Exception as error:  # of many kinds, defined in compiled code
            text = f"{path}: onnxruntime cannot compute its similarity ({first_line(error)}); use the gallery itself"
            raise UserError(text) from error
        if not max(differences) <= TOLERANCE:
            raise UserError(
                f"{output}: the exported gallery differs from torch by {max(differences):.1e}; nothing was written; "
                "use the gallery itself"
            )
    return output, Parity(images=len(samples), largest_difference=max(differences))


def _model_and_points(gallery: GalleryFolder) -> tuple[TrainedModel, Tensor]:
    """Return the model and the points (N, D) of a gallery that can be exported.

    Raises:
        UserError: it cannot.
    """
    path = gallery.path
    if not len(gallery):
        raise UserError(f"{path}: this gallery is empty; add images to it with dmlkit gallery add")
    if gallery.manifest.fusion is not None:
        raise UserError(f"{path}: is a gallery of two models; --format onnx exports galleries of one")
    trained = load_same_model(gallery, OWN_MODEL, start_ranks("cpu"))
    if trained.recipe.transform is None or not trained.samples.has_pixels:
        raise UserError(f"{path}: its model takes {trained.samples.name}s; --format onnx exports galleries of images")
    points = all_points(gallery)
    if points.nbytes > MOST_BYTES:
        raise UserError(f"{path}: {len(points):,} embeddings do not fit into an ONNX file, which has at most 2 GiB")
    return trained, points


def _program(module: ComparedWithGallery, trained: TrainedModel, inputs: Tensor, gallery: GalleryFolder) -> Any:
    """Return the ONNX program that takes images of any size.

    Raises:
        UserError: ONNX cannot express an operator.
    """
    try:
        program = onnx_program(traced(module, inputs), "images", SIMILARITIES).model
    except NotExportableError as error:
        raise UserError(f"{gallery.path}: {error}; use the gallery itself") from error
    assert trained.recipe.transform is not None
    prepend_preparation(program, trained.recipe.transform)
    program.metadata_props["dmlkit"] = json.dumps(describe(trained).stamped())
    return program


def _record(gallery: GalleryFolder) -> GalleryRecord:
    identifier = Identifier(gallery)
    return GalleryRecord(
        source=str(gallery.path),
        gallery_version=gallery.version,
        similarity=gallery.manifold.similarity_name,
        names=tuple(identifier.names),
        codes=tuple(identifier.decider.codes.tolist()),
        ids=tuple(gallery.ids),
        paths=tuple(gallery.paths),
        boxes=tuple(map(box_cell, gallery.boxes)),
        probability=identifier.sigmoid(1),
        threshold=identifier.threshold,
        least_probability=identifier.least_probability,
        note=identifier.note,
    )


@torch.inference_mode()
def _differences(
    session: Any, module: ComparedWithGallery, samples: Sequence[Tensor], prepared: Sequence[Tensor]
) -> Iterator[float]:
    """Yield the largest difference of each image's point and similarities from torch's, as a share of 1 + the value."""
    for sample, ready in zip(samples, prepared, strict=True):
        found = session.run(None, {"images": sample.permute(1, 2, 0)[None].contiguous().numpy()})
        for one, other in zip(module(ready[None]), found, strict=True):
            off = (one - torch.from_numpy(other)).abs() / (1 + one.abs())
            yield off.nan_to_num(nan=torch.inf).max().item()


def is_exported_gallery(path: Path) -> bool:
    """Return whether a file is an exported gallery, by its metadata."""
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # of many kinds: it is something else
        return False
    return any(one.key == METADATA for one in model.metadata_props)
