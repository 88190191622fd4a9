"""Writing shards: the same bytes each time, whole after a kill, and nothing of others' replaced."""

from pathlib import Path

import pytest

from dmlkit.datasets import FolderConfig, GlyphsConfig, TableConfig
from dmlkit.errors import UserError
from dmlkit.loading import shard_writer
from dmlkit.loading.shard_writer import ShardWriter
from tests.datasets import trees


@pytest.fixture
def config(tmp_path: Path) -> FolderConfig:
    return FolderConfig(root=str(trees.presplit(tmp_path / "photos")))


def write(config: FolderConfig, output: Path, images_per_shard: int = 2) -> None:
    ShardWriter(config, images_per_shard).write(output, lambda _: None)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.tar")}


def test_what_a_kill_left_is_completed_to_the_same_bytes(config: FolderConfig, tmp_path: Path, monkeypatch):
    write(config, tmp_path / "one")
    assert len(contents(tmp_path / "one")) == 6
    add, added = shard_writer._add, []

    def stopped(tar, name, content) -> None:
        added.append(name)
        if len(added) == 7:
            raise KeyboardInterrupt
        add(tar, name, content)

    monkeypatch.setattr(shard_writer, "_add", stopped)
    with pytest.raises(KeyboardInterrupt):
        write(config, tmp_path / "two")
    assert list(contents(tmp_path / "two")) == ["train/000000.tar"]
    added.extend([""])  # goes on from here
    write(config, tmp_path / "two")
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert "train/1/0.jpg" not in added[8:]  # the whole shard stayed
    count = len(added)
    write(config, tmp_path / "two")
    assert len(added) == count


def test_another_folder_is_never_written_to(config: FolderConfig, tmp_path: Path):
    write(config, tmp_path / "shards")
    with pytest.raises(UserError, match="or with another --images-per-shard; use another -o"):
        write(config, tmp_path / "shards", 3)
    trees.photo(tmp_path / "photos" / "train" / "1" / "0.jpg", 99, (30, 20))
    with pytest.raises(UserError, match="contains shards of other images, of changed images"):
        write(config, tmp_path / "shards")
    with pytest.raises(UserError, match=r"photos: this is inside .*photos, where every file is read as data"):
        write(config, tmp_path / "photos")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file already exists"):
        write(config, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    write(config, tmp_path / "empty")


def test_what_shards_cannot_hold_is_told(tmp_path: Path):
    with pytest.raises(UserError, match="dataset glyphs has no image files; expected a dataset of image files"):
        ShardWriter(GlyphsConfig(classes=4), 10)
    lines = ["path,label", *(f"{index}.jfif,{index // 2}" for index in range(4))]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    with pytest.raises(
        UserError, match=r"0.jfif: shards identify images by their extension; rename the file to one of .bmp, .gif"
    ):
        ShardWriter(TableConfig(file=str(tmp_path / "table.csv")), 10)
    (tmp_path / "table.csv").write_text("\n".join(lines).replace("jfif", "jpg"))
    writer = ShardWriter(TableConfig(file=str(tmp_path / "table.csv")), 10)
    with pytest.raises(UserError, match=r"0.jpg: cannot read this image: No such file"):
        writer.write(tmp_path / "shards", lambda _: None)
