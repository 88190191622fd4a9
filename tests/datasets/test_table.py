"""Tables: CSV and Parquet, OML's columns, and each cell at fault named with its line."""

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from dmlkit.datasets import TableConfig
from dmlkit.errors import UserError
from tests.datasets import trees

LABELS = ["crow", "crow", "dove", "dove", "finch", "finch", "gull", "gull"]


def write(root: Path, columns: dict[str, list], suffix: str = ".csv") -> TableConfig:
    """A table of eight photos, with more columns."""
    paths = [f"photos/{index}.jpg" for index in range(len(LABELS))]
    for index, path in enumerate(paths):
        if not (root / path).exists():
            trees.photo(root / path, index)
    table = pa.table({"path": paths, "label": LABELS} | columns)
    file = root / f"table{suffix}"
    csv.write_csv(table, file) if suffix == ".csv" else parquet.write_table(table, file)
    return TableConfig(file=str(file), validation_fraction=0)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_without_a_split_the_first_half_of_the_labels_trains(suffix: str, tmp_path: Path):
    config = write(tmp_path, {"comment": ["any"] * 8}, suffix)
    train, test = config.build("train"), config.build("test")
    assert train.class_names == ("crow", "dove") and test.class_names == ("finch", "gull")
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert train.paths[3] == str(tmp_path / "photos" / "3.jpg") and train.image(3).shape == (3, 18, 24)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_numbers_are_sorted_as_numbers_and_gaps_are_noted(suffix: str, tmp_path: Path):
    config = write(tmp_path, {"label": [10, 10, 9, 9, 2, 2, 100, 100]}, suffix)
    assert config.build("train").class_names == ("2", "9") and config.build("test").class_names == ("10", "100")
    (note,) = config.listing().notes
    assert "the labels 2 to 100 have gaps: no image has 3 (95 such numbers)" in note


def test_a_split_with_validation_classes(tmp_path: Path):
    split = ["train"] * 2 + ["validation"] * 2 + ["test"] * 4
    config = write(tmp_path, {"split": split})
    parts = {part: config.build(part).class_names for part in ("train", "validation", "test", "all")}
    assert parts["train"] == ("crow",) and parts["validation"] == ("dove",) and parts["test"] == ("finch", "gull")
    assert len(config.build("all")) == 8


def test_omls_columns(tmp_path: Path):
    columns = {
        "split": ["train"] * 4 + ["validation"] * 4,
        "is_query": [None] * 4 + [True, False, True, True],
        "is_gallery": [None] * 4 + [False, True, False, True],
        "category": ["black", "black", "white", "white", "black", "black", "white", "white"],
        "x_1": [0, 2, 4, None, 0, 0, 0, 0],
        "x_2": [10, 12, 24, None, 24, 24, 24, 24],
        "y_1": [0, 1, 2, None, 0, 0, 0, 0],
        "y_2": [5, 7, 18, None, 18, 18, 18, 18],
    }
    config = write(tmp_path, columns)
    train, test = config.build("train"), config.build("test")
    assert train.query is None and train.gallery is None
    assert test.query is not None and test.query.tolist() == [True, False, True, True]
    assert test.gallery is not None and test.gallery.tolist() == [False, True, False, True]
    assert train.super_classes is not None and train.super_classes.tolist() == [0, 1]
    assert [tuple(train.image(index).shape[1:]) for index in range(4)] == [(5, 10), (6, 10), (16, 20), (18, 24)]
    whole = TableConfig(file=str(write(tmp_path / "plain", {}).file)).build("all").image(2)
    assert torch.equal(train.image(2), whole[:, 2:18, 4:24])
    assert "the validation rows test, as in OML's tables" in config.listing().notes[0]


def test_every_cell_at_fault_is_named_with_its_line(tmp_path: Path):
    columns = {
        "path": [
            "photos/0.jpg",
            "",
            "../2.jpg",
            "/etc/passwd",
            "photos/../../5.jpg",
            "photos/5.jpg",
            "a/../b.jpg",
            "x",
        ],
        "label": ["a", "a", "b", "b", "", "c", "d", "d"],
        "split": ["train", "train", "train", "trian", "test", "test", "test", "test"],
        "query": ["true", "0", "False", "1", "maybe", "", "true", "true"],
        "gallery": ["false"] * 8,
    }
    config = write(tmp_path, columns)
    file = config.file
    assert config.listing().faults == [
        f"{file}:3: no path",
        f"{file}:4: path '../2.jpg' leaves the root {tmp_path}; expected a file below it",
        f"{file}:5: path '/etc/passwd' leaves the root {tmp_path}; expected a file below it",
        f"{file}:6: path 'photos/../../5.jpg' leaves the root {tmp_path}; expected a file below it",
        f"{file}:6: no label",
        f"{file}:5: split 'trian'; expected train, validation, test",
        f"{file}:6: query 'maybe'; expected true or false",
        f"{file}: no row is gallery; expected some, or no query and gallery columns",
    ]
    with pytest.raises(UserError, match="no label"):
        config.build("train")


def test_paths_inside_the_root_may_be_absolute(tmp_path: Path):
    paths = [str(tmp_path / "photos" / f"{index}.jpg") for index in range(8)]
    assert write(tmp_path, {"path": paths}).build("all").image(7).shape == (3, 18, 24)


def test_boxes_outside_the_image_and_empty_ones_are_faults(tmp_path: Path):
    box = {"x1": [5] + [0] * 7, "x2": [5] + [99] * 7, "y1": [0] * 8, "y2": [9] * 8}
    config = write(tmp_path, box)
    assert len(config.listing().faults) == 1 and ":2: box" in config.listing().faults[0]
    config = write(tmp_path, box | {"x1": [0] * 8})
    with pytest.raises(UserError, match=r"the box \(0, 0, 99, 9\) does not lie in the 24 x 18 image"):
        config.build("all").image(1)


def test_a_label_of_two_super_classes_is_a_fault(tmp_path: Path):
    config = write(tmp_path, {"super_class": ["a", "b"] + ["a"] * 6})
    (fault,) = config.listing().faults
    assert "its label has another super_class in other rows" in fault


def test_a_class_in_both_splits_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="class 'crow' is in both train and test"):
        write(tmp_path, {"split": ["train", "test"] * 4}).build("train")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("name,label\na,b\n", "has no column 'path'; it has name, label"),
        ("path,label,is_query\na,b,1\n", "has query without gallery"),
        ("path,label,x1,y1\na,b,1,1\n", "has x1 and y1 without x2 and y2"),
        ("path,label,sequence\na,b,1\n", "not supported"),
        ("path,label\na,b,c,d\n", "cannot read this table"),
        ("", "cannot read this table"),
        ("path,label,path\na,b,c\n", "has column 'path' twice"),
    ],
)
def test_tables_that_are_none(columns: str, message: str, tmp_path: Path):
    (tmp_path / "table.csv").write_text(columns)
    with pytest.raises(UserError, match=r"dataset\.file") as error:
        TableConfig(file=str(tmp_path / "table.csv")).build("train")
    assert message in str(error.value).replace("y2 and x2", "x2 and y2")


def test_unreadable_tables(tmp_path: Path):
    (tmp_path / "table.csv").write_bytes("path,label\n1.jpg,Möwe\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"cannot read this table.*UTF8"):
        TableConfig(file=str(tmp_path / "table.csv")).build("train")
    (tmp_path / "table.parquet").write_bytes(b"PAR1 nothing more")
    with pytest.raises(UserError, match="cannot read this table"):
        TableConfig(file=str(tmp_path / "table.parquet")).build("train")
    with pytest.raises(UserError, match="no such file"):
        TableConfig(file=str(tmp_path / "none.csv")).build("train")
    with pytest.raises(UserError, match=r"expected a \.csv or \.parquet file"):
        TableConfig(file=str(tmp_path / "table.xlsx")).build("train")
