"""A log folder for TensorBoard's embedding projector."""

from collections.abc import Sequence
from pathlib import Path

from dmlkit.export.formats.base import Format
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import check_folder
from dmlkit.vectors.folder import EmbeddingFolder

CONFIG = "projector_config.pbtxt"


class TensorBoard(Format, name="tensorboard", file_name="tensorboard"):
    """A log folder for the embedding projector."""

    def write(self, folder: EmbeddingFolder, output: Path) -> list[Path]:
        output.mkdir(exist_ok=True)
        tensors, metadata, config = self.files(output)
        rows = zip(folder.items["label"].to_pylist(), folder.items["path"].to_pylist(), strict=True)
        cells = [[str(cell or "").replace("\t", " ").replace("\n", " ") for cell in row] for row in rows]
        count, dim = folder.points.shape
        shape = f"  tensor_shape: {count}\n  tensor_shape: {dim}\n"
        paths = f'  tensor_path: "{tensors.name}"\n  metadata_path: "{metadata.name}"\n}}\n'
        # the configuration is renamed first: by it the next export knows the folder after a kill
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
            config_path.write_text('embeddings {\n  tensor_name: "embeddings"\n' + shape + paths, encoding="utf-8")
        return [tensors, metadata, config]

    def files(self, output: Path) -> list[Path]:
        return [output / name for name in ("tensors.bytes", "metadata.tsv", CONFIG)]

    def check(self, output: Path, data: Sequence[Path]) -> None:
        """Check that the folder may be written, see `check_folder`."""
        check_folder(output, "TensorBoard's projector", CONFIG, sources=data)
