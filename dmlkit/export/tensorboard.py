"""Embeddings for TensorBoard's projector."""

from pathlib import Path

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import check_output, head_of

FILES = ("tensors.bytes", "metadata.tsv", "projector_config.pbtxt")
BEGINNING = 'embeddings {\n  tensor_name: "embeddings"\n'  # of the configuration


def write_tensorboard(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """A log folder for TensorBoard's embedding projector."""
    output.mkdir(parents=True, exist_ok=True)
    tensors, metadata, config = (output / name for name in FILES)
    rows = zip(folder.items["label"].to_pylist(), folder.items["path"].to_pylist(), strict=True)
    cells = [[str(cell or "").replace("\t", " ").replace("\n", " ") for cell in row] for row in rows]
    count, dim = folder.points.shape
    shape = f"  tensor_shape: {count}\n  tensor_shape: {dim}\n"
    paths = f'  tensor_path: "{tensors.name}"\n  metadata_path: "{metadata.name}"\n}}\n'
    # the configuration is renamed first: whatever a kill leaves has one, and is dmlkit's
    with (
        atomic_write(tensors) as tensors_path,
        atomic_write(metadata) as metadata_path,
        atomic_write(config) as config_path,
    ):
        with tensors_path.open("wb") as file:
            for block in folder.blocks():
                file.write(block.numpy().astype("<f4").tobytes())
        text = "".join("\t".join(row) + "\n" for row in [["label", "path"], *cells])
        metadata_path.write_text(text, encoding="utf-8")
        config_path.write_text(BEGINNING + shape + paths, encoding="utf-8")
    return [tensors, metadata, config]


def check_projector(output: Path) -> None:
    """Make sure that a projector's files may be written into a folder.

    Raises:
        UserError: it is no folder, or holds such files of somebody else.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: is a file; expected a folder for TensorBoard's projector")
    config = output / FILES[-1]
    ours = config.is_file() and head_of(config).startswith(BEGINNING.encode())
    for name in FILES:
        check_output(output / name, lambda _: ours)
