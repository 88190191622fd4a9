"""Files of vectors of other programs, compared with the arrays that they were written from."""

import csv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.lib import format as npy
from pyarrow import feather, parquet
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from dmlkit.errors import UserError
from dmlkit.files.source import kind_of, require_source
from dmlkit.files.vector_file import VectorFile, holds_vectors, read_label_file
from tests.conftest import refuses

GENERATOR = np.random.default_rng(4)
X = GENERATOR.normal(size=(30, 5)).astype(np.float32)
Y = np.repeat(np.arange(6), 5)
NAMES = np.array([f"Käfer {label}" for label in Y])


def csv_of(header: str | None, rows: list[list[Any]], delimiter: str = ",") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        lines = [delimiter.join(str(cell) for cell in row) for row in rows]
        path.write_text("\n".join([*([] if header is None else [header]), *lines]) + "\n")

    return write


ROWS = [[float(number) for number in row] for row in X]
TABLE = pa.table({"class": NAMES, "vector": ROWS})
FORMATS: dict[str, Callable[[Path], Any]] = {
    "keys.npz": lambda path: np.savez_compressed(path, embeddings=X, labels=NAMES),
    "bytes.npz": lambda path: np.savez(
        path, x=X, targets=np.char.encode(NAMES, "utf-8"), images=np.zeros((30, 4, 4, 3))
    ),
    "several.npz": lambda path: np.savez(path, embedding=X, logits=X[:, :3], label=NAMES, y=Y),
    "double.parquet": lambda path: parquet.write_table(TABLE.append_column("bbox", [[[0.0] * 4] * 30]), path),
    "fixed.arrow": lambda path: feather.write_feather(
        pa.table({"label": NAMES, "v": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 5)}), str(path)
    ),
    "tags.csv": csv_of(
        "label,e0,e1,e2,e3,e4,tag1,tag2,tag3", [[name, *row, 5, "", ""] for name, row in zip(NAMES, ROWS, strict=True)]
    ),
    "named.csv": csv_of("identity,e0,e1,e2,e3,e4", [[name, *row] for name, row in zip(NAMES, ROWS, strict=True)]),
    "shuffled.csv": csv_of(
        "id,x_5,x_1,label,x_3,x_2,x_4",
        [[i, r[4], r[0], name, r[2], r[1], r[3]] for i, (name, r) in enumerate(zip(NAMES, ROWS, strict=True))],
    ),
    "pandas.csv": csv_of(",0,1,2,3,4,label", [[i, *r, n] for i, (n, r) in enumerate(zip(NAMES, ROWS, strict=True))]),
    "no_header.csv": csv_of(None, [[*row, name] for name, row in zip(NAMES, ROWS, strict=True)]),
    "german.csv": csv_of(
        "label;e0;e1;e2;e3;e4",
        [[name, *(str(x).replace(".", ",") for x in row)] for name, row in zip(NAMES, ROWS, strict=True)],
        ";",
    ),
    "commas in texts.csv": csv_of(
        "label;e0;e1;e2;e3;e4;note", [[n, *r, "a, b"] for n, r in zip(NAMES, ROWS, strict=True)], ";"
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_the_vectors_and_labels_that_were_written(name: str, tmp_path: Path):
    FORMATS[name](tmp_path / name)
    assert kind_of(tmp_path / name) == require_source(tmp_path / name) == "array"
    file = VectorFile(tmp_path / name)
    np.testing.assert_array_equal(file.values.astype(np.float32), X)
    assert file.labels().to_pylist() == NAMES.tolist() and file.names[:2] == ["row 0", "row 1"]


def test_safetensors_may_be_half_precision(tmp_path: Path):
    save_file({"embeddings": X, "labels": Y}, tmp_path / "x.safetensors")
    save_tensors({"x": torch.from_numpy(X).bfloat16()}, tmp_path / "b.safetensors")
    file = VectorFile(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(file.values, X)
    assert file.labels().to_pylist() == [str(label) for label in Y]
    half = VectorFile(tmp_path / "b.safetensors")
    np.testing.assert_allclose(half.values, X, rtol=2**-8)
    assert half.labels() is None


def test_a_table_of_images_with_vectors_is_searched_by_its_vectors_and_named_by_its_images(tmp_path: Path):
    paths = [f"{row}.jpg" for row in range(30)]
    parquet.write_table(TABLE.append_column("file", [paths]), tmp_path / "x.parquet")
    assert kind_of(tmp_path / "x.parquet") == "images" and require_source(tmp_path / "x.parquet") == "array"
    assert holds_vectors(tmp_path / "x.parquet", with_paths=True)
    assert VectorFile(tmp_path / "x.parquet").names == paths
    (tmp_path / "0.jpg").touch()
    assert VectorFile(tmp_path / "x.parquet").names[:2] == [str(tmp_path / "0.jpg"), str(tmp_path / "1.jpg")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("boxes.csv", "path,x1,y1,x2,y2\na.jpg,1,2,3,4\n"),
        ("boxes.csv", "x1,y1,x2,y2,label\n1,2,3,4,a\n"),
        ("places.csv", "label,latitude,longitude\na,1.5,2.5\n"),
        ("texts.csv", "top1,top2,top3\na,b,c\n"),
        ("empty.csv", ""),
    ],
)
def test_other_tables_are_no_vectors(name: str, text: str, tmp_path: Path):
    (tmp_path / name).write_text(text)
    assert not holds_vectors(tmp_path / name)


def huge(path: Path) -> None:
    """Write a header that asks for 80 TB."""
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as file:
        npy.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**12, 10)})


HEAD = "label,e0,e1,e2"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "two.npz": (
        lambda path: np.savez(path, a=X, b=X),
        "'a' and 'b' may be the vectors; call the right one 'embedding'",
    ),
    "labels.npz": (lambda path: np.savez(path, x=X, y=Y, labels=Y), "'labels' and 'y' may be the labels"),
    "short.npz": (lambda path: np.savez(path, x=X, y=Y[:9]), r"'y' has shape \(9,\), but 'x' has 30 vectors"),
    "objects.npz": (lambda path: np.savez(path, x=X, y=NAMES.astype(object)), "'y' holds Python objects"),
    "vectors.npz": (lambda path: np.savez(path, x=X.astype(object)), r"no vectors \(x object \(0,\)\)"),
    "none.npz": (lambda path: np.savez(path, y=Y), r"no vectors \(y int64 \(30,\)\); expected a 2-dimensional array"),
    "text.npz": (lambda path: path.write_text("xx"), "cannot read these arrays: this is no .npz file"),
    "huge.npz": (huge, "huge.npz: cannot read these arrays: Unable to allocate"),
    "cut.npz": (lambda path: path.write_bytes(b"PK\3\4 cut"), "cannot read these arrays"),
    "cut.safetensors": (lambda path: path.write_bytes(b"\x40\0\0\0\0\0\0\0{"), "cannot read these arrays"),
    "cut.parquet": (lambda path: path.write_bytes(b"PAR1"), "cannot read this table"),
    "ragged.parquet": (
        lambda path: parquet.write_table(pa.table({"v": [[0.5] * (2 + (row == 7)) for row in range(30)]}), path),
        r"column 'v': row 7 \(counted from 0\) is blank or differs",
    ),
    "null.parquet": (
        lambda path: parquet.write_table(pa.table({"v": [[0.5, 1.0]] * 5 + [[0.5, None]]}), path),
        r"column 'v': row 5 \(counted from 0\) is blank or differs",
    ),
    "two.csv": (csv_of("e0,e1,e2,f0,f1,f2", [[1, 2, 3, 4, 5, 6]]), "'e' and 'f' may be the vectors"),
    "gap.csv": (csv_of("label,e0,e1,e3", [["a", 1, 2, 3]]), "expected 3 or more columns of numbers"),
    "word.csv": (csv_of(HEAD, [["a", 1, 2, 3], ["b", 1, "x", 3]]), "column 'e1' has 'x'; expected numbers"),
    "first.csv": (csv_of(HEAD, [["a", 1, "", 3], ["b", 1, 2, 3]]), "first.csv:2: column 'e1' is empty"),
    "blank.csv": (csv_of(HEAD, [["a", 1, 2, 3], ["b", 1, "", 3]]), "blank.csv:3: column 'e1' is empty"),
    "ragged.csv": (csv_of(HEAD, [["a", 1, 2, 3], ["b", 1, 2]]), "a row has 3 cells, expected 4"),
    "short.csv": (csv_of(HEAD, [["a", 1, 2, 3], ["b", 1, 2]]), "a row has 3 cells, expected 4 .*; add the missing"),
    "rows.csv": (csv_of(HEAD, []), "no rows"),
    "rows and labels.csv": (
        csv_of(None, [[0, 0.5, 0.25, 0.1, 3], [1, 0.5, 0.75, 0.2, 3], [2, 0.1, 0.2, 0.3, 4]]),
        "its first and its last column have whole numbers",
    ),
    "groups.npz": (
        lambda path: np.savez(path, embedding=X, split=NAMES.astype(object)),
        r"'split' holds Python objects, which are never read; save text with split.astype\(str\)",
    ),
    "numbers.csv": (csv_of(None, [[0, 0.5, 0.25], [1, 0.5, 0.75]]), "its first column has whole numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_vector_is_one_line(name: str, tmp_path: Path):
    write, message = BAD[name]
    write(tmp_path / name)
    with pytest.raises(UserError, match=message):
        VectorFile(tmp_path / name).labels()


def test_labels_with_fractions_are_refused(tmp_path: Path):
    parquet.write_table(pa.table({"label": [1.0, None, 2.5], "v": [[0.5], [1.0], [2.0]]}), tmp_path / "x.parquet")
    refuses(r"'label' has the number 2.5; expected integers or text", VectorFile(tmp_path / "x.parquet").labels)


def test_labels_may_be_beside_in_any_file(tmp_path: Path):
    np.save(tmp_path / "y.npy", NAMES)
    np.savez(tmp_path / "y.npz", NAMES)
    (tmp_path / "y.txt").write_text("\n".join(NAMES))
    (tmp_path / "y.csv").write_text("id,label\n" + "".join(f"{row},{name}\n" for row, name in enumerate(NAMES)))
    parquet.write_table(pa.table({"whatever": NAMES}), tmp_path / "y.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert read_label_file(path).to_pylist() == NAMES.tolist()
    parquet.write_table(pa.table({"a": NAMES, "b": NAMES}), tmp_path / "two.parquet")
    with pytest.raises(UserError, match=r"two.parquet: has a, b; expected labels in a column called 'label'"):
        read_label_file(tmp_path / "two.parquet")


def test_commands_take_vectors_of_any_file_as_those_of_npy(tmp_path, dmlkit, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("y.npy", NAMES)
    np.savez("x.npz", x=X, y=NAMES)
    FORMATS["named.csv"](tmp_path / "x.csv")
    parquet.write_table(TABLE.append_column("path", [[f"{row}.jpg" for row in range(30)]]), "x.parquet")
    expected = dmlkit("eval", "x.npy", "--labels", "y.npy", "--json").json()
    cosines = X / np.linalg.norm(X, axis=1, keepdims=True)
    nearest = np.argsort(-(cosines @ cosines.T), axis=1, kind="stable")[:, 1]
    for name in ("x.npz", "x.csv", "x.parquet"):
        report = dmlkit("eval", name, "--json").json()
        assert [report[key] for key in ("metrics", "intervals")] == [expected[key] for key in ("metrics", "intervals")]
        assert dmlkit("search", name, "x.npy", "-k", 2, "-o", "near.csv").code == 0
        with Path("near.csv").open() as file:
            second = [row["path"] for row in csv.DictReader(file)][1::2]
        assert [path.removeprefix("row ").removesuffix(".jpg") for path in second] == [str(row) for row in nearest]
        for words in (("cluster", name, "-k", 3), ("inspect", name, "-o", "page.html")):
            assert dmlkit(*words).code == 0
    np.save("others.npy", X[::-1])
    for name in ("x.npy", "others.npy"):  # rows of two files have the same names
        said = dmlkit("identify", "x.npy", name, "--labels", "y.npy", "--manifold", "sphere").out
        assert ("of these images are in the source" in " ".join(said.split())) == (name == "x.npy"), said
    both = dmlkit("eval", "x.npy", "x.npz", "--labels", "y.npy")
    assert "same points" in both.err  # the labels of x.npz are inside, so that the file of them is that of x.npy


def test_a_dead_coordinate_is_no_label(tmp_path: Path):
    csv_of(None, [[0, 0.5, 0.25, 0], [0, 0.5, 0.75, 0], [0, 0.25, 0.5, 0]])(tmp_path / "x.csv")
    assert VectorFile(tmp_path / "x.csv").values.shape == (3, 4)
    csv_of(None, [[0, 0.5, 0.25, 0.5]])(tmp_path / "one.csv")
    assert VectorFile(tmp_path / "one.csv").values.shape == (1, 4)
    csv_of(None, [[7, 0.5, 0.25], [7, 0.5, 0.75]])(tmp_path / "label.csv")
    refuses("its first column has whole numbers", VectorFile, tmp_path / "label.csv")


def test_y_is_the_label_unless_it_is_a_coordinate_beside_one(tmp_path: Path):
    own = {"embedding": ROWS[:2], "y": [3, 4]}
    for more, labels in (({}, "34"), ({"name": ["a.png", "b.png"]}, "34"), ({"x": [1, 2]}, "34")):
        parquet.write_table(pa.table(own | more), tmp_path / "x.parquet")
        assert VectorFile(tmp_path / "x.parquet").labels().to_pylist() == [*labels]
    parquet.write_table(pa.table(own | {"x": [1, 2], "identity": ["a", "b"]}), tmp_path / "x.parquet")
    assert VectorFile(tmp_path / "x.parquet").labels().to_pylist() == ["a", "b"]
    np.savez(tmp_path / "x.npz", x=X, y=Y, group=Y.astype(">f8"))
    vectors = VectorFile(tmp_path / "x.npz")
    assert vectors.labels().to_pylist() == [str(label) for label in Y] and vectors.columns["group"][29].as_py() == 5


def test_numbers_beyond_float32_are_not_called_far_from_0(tmp_path: Path, caplog: Any):
    np.save(tmp_path / "x.npy", np.array([[0.0, 1.0], [1.0, 1e39]]))
    assert len(VectorFile(tmp_path / "x.npy")) == 2 and caplog.text == ""


@pytest.mark.parametrize("kind", [np.float64, np.int64])
@pytest.mark.parametrize("rows", [1, 30])
def test_differences_that_float32_changes_are_told(kind: type, rows: int, tmp_path: Path, caplog: Any):
    steps = GENERATOR.integers(-8, 8, size=(rows, 5)).astype(kind)
    for offset, is_lost in ((0, False), (2**20, False), (2**26 + 1, rows > 1)):  # float32 has steps of 8 from 2**26
        values = steps + kind(offset)
        np.save(tmp_path / f"{offset}.npy", values)
        VectorFile(tmp_path / f"{offset}.npy")
        gaps, rounded = ((x - x[:1]).astype(np.float64) for x in (values, values.astype(np.float32)))
        assert np.allclose(gaps, rounded, atol=1) is not is_lost
        assert ("float32" in caplog.text) is is_lost, caplog.text
