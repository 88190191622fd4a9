"""Tables: CSV and Parquet, OML's columns, and each cell at fault named with its line."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from dmlkit.datasets import TableConfig
from dmlkit.datasets.files.dataset import class_subset
from dmlkit.datasets.table import other_table
from dmlkit.errors import UserError
from dmlkit.files.where import Where
from tests.conftest import refuses
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


def test_without_a_split_the_first_half_of_the_labels_trains(tmp_path: Path):
    config = write(tmp_path, {"comment": ["any"] * 8})
    train, test = config.build("train"), config.build("test")
    assert train.class_names == ("crow", "dove") and test.class_names == ("finch", "gull")
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert train.paths[3] == str(tmp_path / "photos" / "3.jpg") and train.sample(3).shape == (3, 18, 24)


@pytest.mark.parametrize(
    ("suffix", "labels", "names"),
    [
        (".csv", [10, 10, 9, 9, 2, 2, 100, 100], "2 9 10 100"),
        (".parquet", [10, 10, 9, 9, 2, 2, 100, 100], "2 9 10 100"),
        (".parquet", [2e10 + 1, 2e10 + 1, None, 1.0, 2.0, 3.0, 4.0, float("nan")], "1 2 3 4 20000000001"),
        (".parquet", [2e10 + 1, 2.0, float("nan"), 1.0, 2.0, 3.0, 4.0, 4.5], "1 2 20000000001 3 4 4.5"),
        (".csv", ["0", "0", str(2**70), str(2**70), "-7", "-7", str(10**30), "8"], f"-7 0 8 {2**70} {10**30}"),
        (".csv", ["10", "10", "9", "9", "9" * 5000, "9" * 5000, "8", "8"], f"10 8 9 {'9' * 5000}"),  # as words
    ],
    ids=["integers", "parquet", "floats of pandas", "fractions", "more than 64 bits", "too long"],
)
def test_numbers_are_sorted_as_numbers(suffix: str, labels: list[Any], names: str, tmp_path: Path):
    listing = write(tmp_path, {"label": labels}, suffix).listing()
    found = [float(listing.class_names[label]) if label >= 0 else None for label in listing.labels]
    assert found == [None if label in (None, "") or label != label else float(label) for label in labels]
    assert " ".join(listing.class_names) == names


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
    assert [tuple(train.sample(index).shape[1:]) for index in range(4)] == [(5, 10), (6, 10), (16, 20), (18, 24)]
    whole = TableConfig(file=str(write(tmp_path / "plain", {}).file)).build("all").sample(2)
    assert torch.equal(train.sample(2), whole[:, 2:18, 4:24])
    assert "the validation rows are used for testing, as in OML" in config.listing().notes[0]


def test_every_cell_at_fault_is_named_with_its_line(tmp_path: Path):
    paths = "photos/0.jpg", "", "../2.jpg", "/etc/passwd", "photos/../../5.jpg", "photos/5.jpg", "a/../b.jpg", "x"
    columns = {
        "path": [*paths],
        "label": ["a", "a", "b", "b", "", "c", "d", "d"],
        "split": ["train", "train", "train", "trian", "test", "test", "test", "test"],
        "query": ["true", "0", "False", "1", "maybe", "", "true", "true"],
        "gallery": ["false"] * 8,
    }
    config = write(tmp_path, columns)
    file = config.file
    below = "expected a file below it: name the folder above all images with --root FOLDER, or dataset.root in a recipe"
    assert config.listing().faults == [
        f"{file}:3: no path",
        f"{file}:4: path '../2.jpg' leads out of the root {tmp_path}; {below}; so do 2 more rows",
        f"{file}:5: split 'trian'; expected train, validation, test",
        f"{file}:6: query 'maybe'; expected true or false",
        f"{file}: no row has gallery true; mark at least one, or remove the columns query and gallery",
    ]
    with pytest.raises(UserError, match="no path"):
        config.build("train")


def test_a_null_byte_in_a_path_is_no_image(tmp_path: Path):
    (tmp_path / "table.csv").write_bytes(b"path,label\nphot\0os/0.jpg,ant\n")
    images = TableConfig(file=str(tmp_path / "table.csv")).build("all")
    refuses("embedded null", images.sample, 0)  # byte, or character since Python 3.13


def test_paths_inside_the_root_may_be_absolute(tmp_path: Path):
    paths = [str(tmp_path / "photos" / f"{index}.jpg") for index in range(8)]
    assert write(tmp_path, {"path": paths}).build("all").sample(7).shape == (3, 18, 24)


def test_a_box_that_exceeds_its_image_by_a_pixel_is_cut_at_each_border(tmp_path: Path):
    exceeding = {"x1": [-0.8] * 8, "y1": [-0.7] * 8, "x2": [24.9] * 8, "y2": [18.6] * 8}
    whole = write(tmp_path, {"x1": [0] * 8, "y1": [0] * 8, "x2": [24] * 8, "y2": [18] * 8}).build("all").sample(1)
    assert torch.equal(write(tmp_path, exceeding).build("all").sample(1), whole)


def test_a_label_of_two_super_classes_is_a_fault(tmp_path: Path):
    (fault,) = write(tmp_path, {"super_class": ["a", "b"] + ["a"] * 6}).listing().faults
    assert "the label has another super_class in other rows" in fault


def test_a_class_in_both_splits_is_refused(tmp_path: Path):
    """In one line, whatever their number, with the ways on."""
    config = write(tmp_path, {"split": ["train", "test"] * 4})
    message = r"(\d) classes are in several splits \(crow, .*dataset\.split=images .*, halves .*, or all"
    refuses(f"^{config.file}: {message}", config.build, "train")
    names = config.build("all").class_names
    halves = config.model_copy(update={"split": "halves", "validation_fraction": 0.0})
    divided = [halves.build("train").class_names, halves.build("test").class_names]
    assert divided == [names[: len(names) // 2], names[len(names) // 2 :]]
    everything = config.model_copy(update={"split": "all"}).build("train")
    assert everything.class_names == names and len(everything) == 8


@pytest.mark.parametrize(("name", "suffix"), [("group", ".csv"), ("sequence", ".parquet")])
def test_groups(name: str, suffix: str, tmp_path: Path):
    config = write(tmp_path, {name: ["7", "7", "a", None, "7", None, "a", "a"]}, suffix)
    whole, test = config.build("all"), config.build("test")
    assert whole.groups is not None and test.groups is not None
    alike = whole.groups[:, None] == whole.groups
    expected = torch.eye(8, dtype=torch.bool)
    for members in ([0, 1, 4], [2, 6, 7]):
        expected[torch.tensor(members)[:, None], torch.tensor(members)] = True
    assert torch.equal(alike, expected)
    assert torch.equal(test.groups[:, None] == test.groups, expected[4:, 4:])
    subset = class_subset(whole, [3, 0]).groups
    assert subset is not None and torch.equal(subset, whole.groups[torch.tensor([0, 1, 6, 7])])
    assert write(tmp_path, {}, suffix).build("all").groups is None


def test_blank_texts_of_parquet_are_empty_cells(tmp_path: Path):
    """As of CSV: images without a group have none in common, those without a box are whole, a blank path is a fault."""
    blank = {"group": ["", " ", "a", "a", *[""] * 4], "query": ["true"] * 7 + [""], "gallery": ["true"] * 8}
    boxes = {side: ["2", "", *[" "] * 6] for side in ("x1", "y1")} | {side: ["9", *[""] * 7] for side in ("x2", "y2")}
    images = write(tmp_path, blank | boxes, ".parquet").build("all")
    assert images.groups is not None and images.query is not None and images.box(1) is None
    alike = (images.groups[:, None] == images.groups).nonzero().tolist()
    assert alike == sorted([[row, row] for row in range(8)] + [[2, 3], [3, 2]])
    assert images.query.tolist() == [True] * 7 + [False] and images.box(0) is not None
    refuses(r"row 1: no path", write(tmp_path, {"path": ["", *"abcdefg"]}, ".parquet").build, "all")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("place,label\na,b\n", "has no column 'path' (or file, filename, filepath, image, imagefile); it has place,"),
        ("path,kind\na,b\n", "has no column 'label' (or identity, individual, individualid, class, classname); it has"),
        ("file,image,label\na,b,c\n", "'file' and 'image' may be the path; name the right one with --column path=NAME"),
        ("path,label,is_query\na,b,1\n", "has query without gallery"),
        ("path,label,xmin,ymax\na,b,1,1\n", "has xmin and ymax without ymin and xmax"),
        ("path,label,left,top,right\na,b,1,1,1\n", "has left and top and right without bottom"),
        ("path,label,x1,y1,x2,y2\na,b,1,1,2,z\n", "column 'y2' has a value that is not a number"),
        ('path,label,bbox\na,b,"[1, 2, 3]"\n', "column 'bbox': 1 cell is no box, e.g. '[1, 2, 3]'; expected left, top"),
        ("path,label\na,b,c,d\n", "a row has 4 cells, expected 2 (path, label): 'a,b,c,d'; put cells that contain ','"),
        ("", "the file is empty; expected a line with the columns' names"),
        (b"path,label\n1.jpg,M\xc3\xb6we\n2.jpg,M\xf6we\n", "line 3 is not UTF-8: got the byte b'\\xf6'; save it as"),
        ("path,label,path\na,b,c\n", "has 2 columns 'path'; expected one"),
        ("a.jpg,ant,1\nb.jpg,bee,2\n", "has no header: its first line is 'a.jpg,ant,1'; put a line with the names"),
    ],
)
def test_tables_that_are_none(columns: str | bytes, message: str, tmp_path: Path):
    (tmp_path / "table.csv").write_bytes(columns.encode() if isinstance(columns, str) else columns)
    with pytest.raises(UserError, match=r"dataset\.file") as error:
        TableConfig(file=str(tmp_path / "table.csv")).build("train")
    assert message in str(error.value)


def test_a_file_of_another_kind_is_no_table(tmp_path: Path):
    (tmp_path / "table.doc").write_bytes(b"")
    refuses(r"table.doc: expected a table \(\.csv, \.tsv, ", TableConfig(file=str(tmp_path / "table.doc")).build, "all")


BOX = {"x1": [0] * 8, "y1": [0] * 8, "x2": [9] * 8, "y2": [9] * 8}


@pytest.mark.parametrize(
    ("suffix", "cells", "shown"),
    [
        (".csv", {"x1": None}, "x1 blank, y1 0, x2 9, y2 9"),
        (".parquet", {"y2": None}, "x1 0, y1 0, x2 9, y2 blank"),
        (".csv", {"x1": None, "y1": None, "x2": None}, "x1 blank, y1 blank, x2 blank, y2 9"),
        (".csv", {"x1": -3}, "x1 -3, y1 0, x2 9, y2 9"),
        (".csv", {"x2": float("inf")}, "x1 0, y1 0, x2 inf, y2 9"),
        (".csv", {"x1": 9}, "x1 9, y1 0, x2 9, y2 9"),
    ],
)
def test_a_box_at_fault_is_shown_w12_u3(suffix: str, cells: dict[str, float | None], shown: str, tmp_path: Path):
    config = write(tmp_path, BOX | {name: [cell, *BOX[name][1:]] for name, cell in cells.items()}, suffix)
    (fault,) = config.listing().faults
    row = ":2" if suffix == ".csv" else ": row 1"
    assert fault.startswith(
        f"{config.file}{row}: got the box {shown}; expected 0 <= x1 < x2 and 0 <= y1 < y2 in pixels"
    )
    write(tmp_path, {name: [None, *values[1:]] for name, values in BOX.items()}, suffix)
    assert config.build("all").sample(0).shape == (3, 18, 24)


def test_an_image_that_is_listed_twice_is_a_fault_w20(tmp_path: Path):
    paths = [f"photos/{name}.jpg" for name in ("0", "1", "0", "3", "4", "4", "4", "7")]
    paths[5], paths[6] = "./photos/4.jpg", "photos//4.jpg"
    config = write(tmp_path, {"path": paths})
    file, hint = config.file, "list each image once, or with different boxes"
    assert config.listing().faults == [
        f"{file}:4: photos/0.jpg is already listed in {file}:2, with another label; {hint}",
        f"{file}:7: ./photos/4.jpg is already listed in {file}:6; {hint}",
        f"{file}:8: photos//4.jpg is already listed in {file}:6, with another label; {hint}",
    ]
    boxes = BOX | {"path": ["photos/0.jpg"] * 8, "x2": [1, 2, 3, 4, 5, 6, 7, 7]}
    (fault,) = write(tmp_path, boxes).listing().faults  # another box is another image
    assert fault.startswith(f"{file}:9: photos/0.jpg is already listed in {file}:8; ")


@pytest.mark.parametrize(("name", "values"), [("path", [[1]] * 8), ("label", [{"a": 1}] * 8), ("split", [b"\xff"] * 8)])
def test_columns_of_other_kinds_are_told_t11(name: str, values: list, tmp_path: Path):
    config = write(tmp_path, {name: values}, ".parquet")
    refuses(f"^dataset.file: {config.file}: column '{name}' has type .*; expected text or", config.listing)


@pytest.mark.parametrize(("name", "encoded"), [("path", False), ("label", True), ("remarks", False)])
def test_texts_of_a_parquet_table_that_are_not_utf8_are_told(name: str, encoded: bool, tmp_path: Path):
    texts: Any = pa.array([b"ant\x80"] * 8).view(pa.string())
    config = write(tmp_path, {name: texts.dictionary_encode() if encoded else texts}, ".parquet")
    refuses(rf"table\.parquet: column '{name}': .*Invalid UTF8.*; save the texts as UTF-8", config.listing)


@pytest.mark.parametrize("none", ["", "Unknown "])
def test_an_image_without_a_label_is_listed_and_in_no_split(none: str, tmp_path: Path):
    kinds = {"super_class": ["a", "b"] * 4}
    config = write(tmp_path, kinds | {"label": [none] * 8})
    assert config.listing().faults == [] and config.listing().class_names == []
    refuses("no images for train", config.build, "train")
    config = write(tmp_path, kinds | {"label": [none, "x", "y", "z", none, "u", "v", "w"]})
    listing = config.listing()
    assert listing.faults == [] and listing.class_names == ["u", "v", "w", "x", "y", "z"]
    assert listing.notes == [
        f"{config.file}: 2 images have no label (empty or 'unknown'), to be left out of all losses and metrics"
    ]
    assert listing.splits.tolist() == [-1, 2, 2, 2, -1, 0, 0, 0]
    assert [Path(path).stem for path in config.build("all").paths] == ["1", "2", "3", "5", "6", "7"]
    whole = listing.everything()
    assert whole.label_names(whole.labels) == [None, "x", "y", "z", None, "u", "v", "w"]


def test_labels_that_look_alike_are_one_label_and_a_difference_in_case_is_noted(tmp_path: Path):
    labels = ["crow", "crow ", "Mo\u0308we", "M\xf6we", "7.0", "7", "Crow", "crow"]
    listing = write(tmp_path, {"label": labels}).listing()
    assert listing.class_names == ["7", "Crow", "M\xf6we", "crow"]
    assert [listing.class_names[label] for label in listing.labels] == [
        *("crow", "crow", "M\xf6we", "M\xf6we", "7", "7", "Crow", "crow")
    ]
    spelled, case = listing.notes
    assert spelled.endswith(
        ": 3 images have a label in another spelling: '7.0' as '7', "
        r"'Mo\u0308we' as 'M\xf6we', 'crow ' as 'crow'"
    )
    assert case.endswith(
        ": labels that differ only in upper and lower case are different labels: 'Crow' (1) and 'crow' (3)"
    )


def test_conditions_of_a_command_are_added_to_those_of_the_recipe(tmp_path: Path):
    sides, years = ["left", "right"] * 4, ["2019", "2019", "2020", "2020"] * 2
    config = write(tmp_path, {"side": sides, "year": years}).model_copy(update={"where": "side=left"})
    limited = config.limited(Where.of("year=2020 and label in dove, gull"))
    expected = [row for row in range(8) if (sides[row], years[row]) == ("left", "2020") and LABELS[row] != "crow"]
    assert [Path(path).stem for path in limited.build("all").paths] == [str(row) for row in expected] == ["2", "6"]


def test_another_table_has_the_texts_and_left_out_columns_of_the_recipe(tmp_path: Path):
    write(tmp_path, {"label": ["new", "new", "dove", "dove", " none", "finch", "gull", "gull"], "group": ["a"] * 8})
    columns = {"unknown": "new|none", "group": "", "label": "species"}
    config = other_table(tmp_path / "table.csv", TableConfig(file="elsewhere/t.csv", columns=columns))
    listing = config.listing()
    assert listing.class_names == ["dove", "finch", "gull"] and listing.groups is None
    assert (listing.labels < 0).tolist() == [True, True, False, False, True, False, False, False]


@pytest.mark.parametrize("name", ["other.csv", "other"])
def test_labels_of_another_table_or_folder_are_the_parts_of_paths_of_the_recipe(name: str, tmp_path: Path):
    names = ["fox_0.jpg", "owl_1.jpg", "owl_2.jpg"]
    trees.photos(tmp_path / "other", names)
    (tmp_path / "other.csv").write_text("\n".join(["path", *(f"other/{photo}" for photo in names)]))
    recipe = TableConfig(file="elsewhere/t.csv", columns={"label": "(?P<label>[a-z]{3})_[0-9]"})
    images = other_table(tmp_path / name, recipe).build("all")
    assert [images.class_names[label] for label in images.labels.tolist()] == [photo[:3] for photo in names]


def test_paths_of_a_table_in_the_current_folder_are_those_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = write(tmp_path, {})
    monkeypatch.chdir(tmp_path)
    near = config.model_copy(update={"file": Path(config.file).name, "split": "all"})
    assert [*near.build("train").paths] == [f"photos/{index}.jpg" for index in range(8)]
