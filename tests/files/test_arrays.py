"""NumPy files that are damaged, or promise more than they hold, are refused before anything is loaded."""

import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.lib import format as npy

from dmlkit.errors import UserError
from dmlkit.files.arrays import read_array, read_arrays

NAMES = ("recall@1", "map@r")
VALUES = np.linspace(0, 1, 6)
TYPES = dict.fromkeys(NAMES, np.float64)


def header(path: Path, shape: tuple[int, ...]) -> None:
    with path.open("wb") as file:
        npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        file.write(b"1234")


def refused(read, *arguments: object) -> str:
    with pytest.raises(UserError) as error:
        read(*arguments)
    line = str(error.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("array", [np.eye(3), np.eye(3, dtype=">f4"), np.array(["ä", "b"]), np.zeros((0, 4))])
def test_an_array_is_read(array: np.ndarray, tmp_path: Path):
    np.save(tmp_path / "x.npy", array)
    values = read_array(tmp_path / "x.npy")
    assert values.dtype == array.dtype and np.array_equal(values, array)


NO_ARRAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "0 bytes": (lambda path: path.write_bytes(b""), "cannot read this NumPy array: EOF"),
    "text": (lambda path: path.write_text("1.0 2.0 3.0 4.0"), "the magic string is not correct"),
    "10^12 values": (lambda path: header(path, (10**12, 4)), "the file is shorter than its header says"),
    "2^80 values": (lambda path: header(path, (2**40, 2**40)), "cannot read this NumPy array"),
    "objects": (lambda path: np.save(path.open("wb"), np.array([{}], dtype=object)), "Python objects"),
    "npz": (lambda path: np.savez(path.open("wb"), np.eye(3)), "cannot read this NumPy array"),
    "header": (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00\x06\x00{'a':\n"), "cannot read this NumPy array"),
    "folder": (lambda path: path.mkdir(), "is a folder"),
    "pipe": (lambda path: os.mkfifo(path), "is a FIFO; expected a regular file"),
    "missing": (lambda path: None, "no such file"),
}


@pytest.mark.parametrize("kind", NO_ARRAYS)
def test_what_is_no_array_is_told_t8_u2_u4(kind: str, tmp_path: Path):
    write, message = NO_ARRAYS[kind]
    write(tmp_path / "x.npy")
    line = refused(read_array, tmp_path / "x.npy")
    assert line.startswith(f"{tmp_path / 'x.npy'}: ") and message in line


def save(path: Path, *, names: tuple[str, ...] = NAMES, values: np.ndarray = VALUES) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, **dict.fromkeys(names, values))  # pyright: ignore[reportArgumentType]


def test_arrays_of_queries_are_read(tmp_path: Path):
    save(tmp_path / "x.npz")
    arrays = read_arrays(tmp_path / "x.npz", TYPES, 6)
    assert list(arrays) == list(NAMES) and all(np.array_equal(values, VALUES) for values in arrays.values())
    types = {"map@r": np.float64, "class": np.int64}
    np.savez(tmp_path / "y.npz", **{"map@r": VALUES, "class": np.arange(6)})
    assert read_arrays(tmp_path / "y.npz", types, 6)["class"].tolist() == list(range(6))
    np.savez(tmp_path / "y.npz", **{"map@r": VALUES, "class": VALUES})
    assert "class is float64 (6,), expected int64 (6,)" in refused(read_arrays, tmp_path / "y.npz", types, 6)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: (save(path), path.write_bytes(path.read_bytes()[:200])), "not a zip file"),
        (lambda path: save(path, values=VALUES.astype(str)), "expected float64 (6,)"),
        (lambda path: save(path, values=VALUES[:5]), "expected float64 (6,)"),
        (lambda path: save(path, values=np.array([{}] * 6, dtype=object)), "cannot read these arrays"),
        (lambda path: save(path, names=NAMES[:1]), "it has recall@1.npy"),
        (lambda path: save(path, names=(*NAMES, "x")), "it has recall@1.npy, map@r.npy, x.npy"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: None, "missing"),
    ],
)
def test_what_are_no_arrays_of_queries_is_told_t6(write, message: str, tmp_path: Path):
    write(tmp_path / "x.npz")
    assert message in refused(read_arrays, tmp_path / "x.npz", TYPES, 6)


def test_a_zip_is_measured_before_it_is_inflated_s8(tmp_path: Path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in NAMES:
            with archive.open(f"{name}.npy", "w") as file:
                npy.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (8_000_000,)})
                for _ in range(8):
                    file.write(bytes(8_000_000))
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    assert "64,000,128 bytes for 6 numbers" in refused(read_arrays, path, TYPES, 6)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
