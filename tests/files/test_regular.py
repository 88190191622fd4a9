"""Whatever dmlkit reads is a regular file: nothing waits for a FIFO or reads a device to its end."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dmlkit.backbones.weights import read_tensors
from dmlkit.datasets import Cars196Config, Cub200Config, TableConfig
from dmlkit.datasets.files.image import read_image
from dmlkit.errors import UserError
from dmlkit.files.arrays import read_array
from dmlkit.files.image_table import read_images
from dmlkit.files.regular import check_regular, read_start
from dmlkit.files.source import require_queries
from dmlkit.recipe.file import read_recipe
from tests.conftest import refuses


def cub_list(path: Path) -> object:
    (path.parent / "CUB_200_2011").mkdir()
    path.rename(path.parent / "CUB_200_2011" / "images.txt")
    return Cub200Config(root=str(path.parent)).build("train")


def cars_mat(path: Path) -> object:
    path.rename(path.parent / "cars_annos.mat")
    return Cars196Config(root=str(path.parent)).build("train")


READERS: dict[str, Callable[[Path], object]] = {
    "image": read_image,
    "recipe": read_recipe,
    "table": lambda path: TableConfig(file=str(path.rename(path.with_suffix(".csv")))).build("train"),
    "parquet": lambda path: TableConfig(file=str(path.rename(path.with_suffix(".parquet")))).build("train"),
    "list": cub_list,
    "matlab": cars_mat,
    "weights": read_tensors,
    "safetensors": lambda path: read_tensors(path.rename(path.with_suffix(".safetensors"))),
}


def fifo(path: Path) -> str:
    os.mkfifo(path)
    return "a FIFO"


def endless(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "a device"


def listening(path: Path) -> str:
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))  # a socket's path may have 107 bytes
    return "a socket"


@pytest.mark.parametrize(
    ("reader", "make"), [*((reader, fifo) for reader in READERS), ("image", endless), ("image", listening)]
)
def test_other_kinds_of_files_are_told_at_once_s7(reader: str, make: Callable[[Path], str], tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = make(tmp_path / "file")
    with pytest.raises(UserError, match=f"this is {kind}; expected a regular file"):
        READERS[reader](tmp_path / "file")


def test_links_to_files_are_files_and_folders_are_not(tmp_path: Path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    assert read_start(tmp_path / "link", 3) == b"tex"
    with pytest.raises(OSError, match="this is a folder; expected a regular file"):
        check_regular(tmp_path)


def test_a_folder_with_the_name_of_a_video_is_looked_into(tmp_path: Path):
    (tmp_path / "clips.mp4").mkdir()
    refuses("no images found in this folder", require_queries, tmp_path / "clips.mp4")


def test_a_recipe_without_an_end_is_read_to_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files of /proc are regular and have 0 bytes, so the size of a file says nothing."""
    (tmp_path / "long.yaml").write_text("# " + "x" * 2_000)
    monkeypatch.setattr("dmlkit.files.yaml_tree.MAX_BYTES", 1_000)
    refuses("more than 1,000 bytes; expected a recipe", read_recipe, tmp_path / "long.yaml")
    if Path("/proc/self/maps").exists():
        refuses("more than 1,000 bytes; expected a recipe", read_recipe, Path("/proc/self/maps"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer.*git lfs pull"),
        (b"<html><body>404</body></html>", "page of a website.*download it again"),
    ],
)
def test_a_pointer_or_a_page_instead_of_a_file_is_named(content: bytes, message: str, tmp_path: Path):
    readers = {"file.npy": read_array, "file.pt": read_tensors, "file.csv": read_images, "file.parquet": read_images}
    for name, read in readers.items():
        (tmp_path / name).write_bytes(content)
        refuses(message, read, tmp_path / name)
