"""A Parquet table."""

from pathlib import Path

from dmlkit.export.formats.base import Format
from dmlkit.files.atomic import atomic_write
from dmlkit.nearest.search import BLOCK_ROWS
from dmlkit.vectors.folder import EmbeddingFolder


class Parquet(Format, name="parquet", file_name="embeddings.parquet"):
    """One row per image: id, path, label, and the embedding as fixed_size_list<float32>."""

    def write(self, folder: EmbeddingFolder, output: Path) -> list[Path]:
        import pyarrow as pa
        from pyarrow import parquet

        column = pa.field("embedding", pa.list_(pa.float32(), folder.points.shape[1]))
        schema = folder.items.schema.append(column)
        with atomic_write(output) as partial, parquet.ParquetWriter(partial, schema) as writer:
            for number, block in enumerate(folder.blocks()):
                values = pa.FixedSizeListArray.from_arrays(pa.array(block.numpy().ravel()), block.shape[1])
                rows = folder.items.slice(number * BLOCK_ROWS, len(block))
                writer.write_table(rows.append_column(column, values))
        return [output]
