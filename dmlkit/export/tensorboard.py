"""Embeddings for TensorBoard's projector."""

from pathlib import Path

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.files.atomic import atomic_write


def write_tensorboard(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """A log folder for TensorBoard's embedding projector."""
    output.mkdir(parents=True, exist_ok=True)
    tensors, metadata, config = (output / name for name in ("tensors.bytes", "metadata.tsv", "projector_config.pbtxt"))
    with atomic_write(tensors) as partial, partial.open("wb") as file:
        for block in folder.blocks():
            file.write(block.numpy().astype("<f4").tobytes())
    rows = zip(folder.items["label"].to_pylist(), folder.items["path"].to_pylist(), strict=True)
    cells = [[str(cell or "").replace("\t", " ").replace("\n", " ") for cell in row] for row in rows]
    metadata.write_text("".join("\t".join(row) + "\n" for row in [["label", "path"], *cells]), encoding="utf-8")
    count, dim = folder.points.shape
    config.write_text(
        f'embeddings {{\n  tensor_name: "embeddings"\n  tensor_shape: {count}\n  tensor_shape: {dim}\n'
        f'  tensor_path: "{tensors.name}"\n  metadata_path: "{metadata.name}"\n}}\n',
        encoding="utf-8",
    )
    return [tensors, metadata, config]
