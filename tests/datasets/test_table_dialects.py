"""Tables as people bring them: separators, encodings, padding, no header, usual names, boxes, paths of Windows."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from dmlkit.datasets import TableConfig
from dmlkit.errors import UserError
from dmlkit.files.columns import sighting_cells, time_of
from dmlkit.files.csv_table import read_csv
from dmlkit.files.image_table import read_images
from dmlkit.files.outputs import write_table
from tests.conftest import refuses
from tests.datasets import trees

NAMES = ["path", "label", "note"]
text = st.text(
    st.sampled_from("ab0.,;|\t'\"=@-+ \n\xe9\u0142") | st.characters(exclude_categories=["Cs", "Cc"]), max_size=8
)
tables = st.lists(st.tuples(text.map(lambda one: f"{one}.jpg"), text, text), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dialects")


def read_back(file: Path) -> tuple[list[list[str]], list[list[str]]]:
    """The cells by both readers, pyarrow's and that of small tables; an empty cell is an empty text."""
    columns = read_csv(file).table().to_pydict().values()
    return [list(row) for row in zip(*([cell or "" for cell in column] for column in columns), strict=True)], [
        list(cells.values()) for _, cells in read_csv(file).rows()
    ]


@given(tables, st.sampled_from(",;\t|"), st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le"]), st.booleans())
def test_cells_are_those_that_the_csv_module_wrote(folder, rows, delimiter, encoding, crlf):
    written = io.StringIO()
    writer = csv.writer(written, delimiter=delimiter, lineterminator="\r\n" if crlf else "\n", quoting=csv.QUOTE_ALL)
    writer.writerows([NAMES, *rows])
    (folder / "t.csv").write_bytes(written.getvalue().encode(encoding))
    large, small = read_back(folder / "t.csv")
    assert large == [[unescaped(cell) for cell in row] for row in rows]
    assert small == [[unescaped(cell.strip()) for cell in row] for row in rows]


def unescaped(cell: str) -> str:
    return cell[1:] if cell[:1] == "'" and cell.lstrip("'")[:1] in tuple("=+@-\t\r\n") else cell


@given(tables, st.booleans())
def test_what_dmlkit_writes_is_read_as_it_was(folder: Path, rows: list[tuple[str, ...]], is_data: bool):
    write_table(folder / "own.csv", NAMES, rows, is_data=is_data)
    assert read_back(folder / "own.csv")[0] == [list(row) for row in rows]


def photos(root: Path, count: int = 8) -> list[str]:
    names = [f"sub/{index}.jpg" for index in range(count)]
    trees.photos(root, names)
    return names


LABELS = ["ant", "ant", "bee", "bee", "M\xf6we", "M\xf6we", "\u0142o\u015b", "\u0142o\u015b"]


@pytest.mark.parametrize(
    ("head", "row", "encoding"),
    [
        ("path;label", "{path};{label}", "utf-8"),
        ("label\tpath", "{label}\t{path}", "utf-16"),
        ("path, label", "{path}, {label}", "utf-8"),
        ('"path", "label" ', ' {path} , "{label}" ', "utf-8"),
        ("FileName,Individual_ID", "{path},{label}", "utf-8-sig"),
        (",image_id,identity,PATH,note", "0,7,{label},{path},", "utf-8"),
        ("sep=;\r\npath;label", "{path};{label}", "utf-8-sig"),
        ("path | label", "{path} | {label}", "utf-8"),
        ("", "{path}|{label}", "utf-8"),
        ("", "{path};{label}", "utf-8"),
        ("", "{label},{path}", "utf-8"),
        ("path,label", "{windows},{label}", "utf-8"),
        ("path,label", "{path},{label}\n", "utf-8"),
    ],
)
def test_a_table_in_any_dialect_is_the_same(head: str, row: str, encoding: str, tmp_path: Path):
    names = photos(tmp_path)
    pairs = zip(names, LABELS, strict=True)
    rows = [row.format(path=name, label=label, windows=name.replace("/", "\\")) for name, label in pairs]
    file = tmp_path / "t.csv"
    file.write_bytes("\r\n".join([*([head] if head else []), *rows]).encode(encoding))
    listing = TableConfig(file=str(file)).listing()
    assert listing.faults == [] and listing.class_names == sorted(set(LABELS))
    assert list(listing.everything().paths) == [str(tmp_path / name) for name in names]
    assert [listing.class_names[label] for label in listing.labels] == LABELS
    file.write_bytes("\n".join([*([head] if head else []), rows[0], *rows[:2]]).encode(encoding))
    (fault,) = TableConfig(file=str(file)).listing().faults
    first, lines = 1 + len(head.splitlines()), 1 + row.count("\n")
    assert f"{file}:{first + lines}: " in fault and f"is already listed in {file}:{first};" in fault


@pytest.mark.parametrize("head", ["", "path,label\n"])
def test_bars_between_labels_do_not_divide_columns(head: str, tmp_path: Path):
    names = photos(tmp_path)
    (tmp_path / "t.csv").write_text(head + "".join(f"{name},shirt|hat|scarf\n" for name in names))
    columns = read_csv(tmp_path / "t.csv").table().to_pydict()
    assert columns == {"path": names, "label": ["shirt|hat|scarf"] * len(names)}


def test_a_table_of_windows_latin_is_read_and_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "t.csv"
    file.write_bytes("path;label\na.jpg;M\xf6we\nb.jpg;\u201eGans\u201c\n".encode("cp1252"))
    assert read_csv(file).table()["label"].to_pylist() == ["M\xf6we", "\u201eGans\u201c"]
    assert "t.csv: is not UTF-8, so it is read as Windows-1252; line 2: 'a.jpg;M\xf6we'" in caplog.text


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize(
    "columns",
    [
        {"x1": [1, 2.5], "y1": [2, 3], "x2": [11, 12], "y2": [22, 13]},
        {"X_1": [1, 2.5], "Y_1": [2, 3], "X_2": [11, 12], "Y_2": [22, 13], "width": [90, 90], "height": [90, 90]},
        {"xmin": ["1", "2,5"], "ymin": [2, 3], "xmax": [11, 12], "ymax": [22, 13]},
        {"left": [1, 2.5], "top": [2, 3], "right": [11, 12], "bottom": [22, 13]},
        {"x": [1, 2.5], "y": [2, 3], "w": [10, 9.5], "h": [20, 10]},
        {"bbox_x": [1, 2.5], "bbox_y": [2, 3], "bbox_width": [10, 9.5], "bbox_height": [20, 10]},
        {"bbox_x": [1, 2.5], "bbox_y": [2, 3], "bbox_w": [10, 9.5], "bbox_h": [20, 10], "width": [64, 64], "y": [5, 6]},
        {"width": [64, 64], "height": [48, 48], "x": [1, 2.5], "y": [2, 3], "w": [10, 9.5], "h": [20, 10]},
        {"w": [64, 64], "h": [48, 48], "x": [1, 2.5], "y": [2, 3], "width": [10, 9.5], "height": [20, 10]},
        {"xmin": [1, 2.5], "ymin": [2, 3], "xmax": [11, 12], "ymax": [22, 13], "bbox_x": [0, 0], "bbox_y": [0, 0]}
        | {"bbox_w": [0.5, 0.5], "bbox_h": [0.5, 0.5]},
        {"left": [1, 2.5], "top": [2, 3], "width": [10, 9.5], "height": [20, 10]},
        {"bbox": ["[1, 2, 10, 20]", "(2.5 3.0 95e-1 10.)"]},
        {"box": [[1.0, 2, 10, 20], [2.5, 3, 9.5, 10]]},
    ],
    ids=lambda columns: "-".join(columns),
)
def test_boxes_are_read_whatever_their_columns(columns: dict[str, list[Any]], suffix: str, tmp_path: Path):
    names = [*photos(tmp_path, 3)]
    table: dict[str, list[Any]] = {"path": names, "label": ["ant", "bee", "bee"]}
    table |= {name: [*values, None] for name, values in columns.items()}
    if suffix == ".parquet":
        parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    else:
        with (tmp_path / "t.csv").open("w", newline="") as file:
            csv.writer(file, delimiter=";").writerows([list(table), *zip(*table.values(), strict=True)])
    boxes = TableConfig(file=str(tmp_path / f"t{suffix}")).listing().boxes
    assert boxes is not None and np.isnan(boxes[2]).all()
    assert boxes[:2].tolist() == [[1, 2, 11, 22], [2.5, 3, 12, 13]]


def test_columns_that_are_no_boxes_are_none(tmp_path: Path):
    for head in ("path,label,width,height", "path,label,left", "path,label,x,y"):
        (tmp_path / "t.csv").write_text(f"{head}\na.jpg,ant,{','.join('1' * (head.count(',') - 1))}\n")
        assert TableConfig(file=str(tmp_path / "t.csv")).listing().boxes is None


def test_a_backslash_in_the_name_of_a_file_stays(tmp_path: Path):
    trees.photo(tmp_path / "a\\b.jpg", 0)
    (tmp_path / "t.csv").write_text("path,label\na\\b.jpg,ant\n")
    assert TableConfig(file=str(tmp_path / "t.csv")).listing().everything().sample(0).shape == (3, 18, 24)


def test_a_column_of_labels_and_sightings_in_any_case_and_with_decimal_commas(tmp_path: Path):
    file = tmp_path / "t.csv"
    file.write_text("Path;Species;Latitude;LONGITUDE;Time\na.jpg;007;46,5;-7,25;2026-05-31\n")
    table = read_images(file, columns={"label": "species"})
    assert table.table["label"].to_pylist() == ["007"]
    with pytest.raises(UserError, match=r"t.csv: has no column 'kind'; it has Path, Species, Latitude,"):
        read_images(file, columns={"label": "kind"})
    assert sighting_cells(table) == [("46,5", "-7,25", "2026-05-31")]
    for cells, message in (
        ("95;0;", "a.jpg: latitude: got '95', expected degrees from -90 to 90"),
        ("north;0;", "a.jpg: latitude: got 'north', expected degrees"),
        ("0;-181;", "a.jpg: longitude: got '-181', expected degrees from -180 to 180"),
        ("0;nan;", "a.jpg: longitude: got 'nan', expected degrees"),
        ("0;;", "a.jpg: got one of latitude and longitude; expected both, or two empty cells"),
        (";;5 May", "a.jpg: time: got '5 May', expected a date or a time such as 2026-05-31"),
    ):
        file.write_text(f"path;label;latitude;longitude;time\na.jpg;a;{cells}\nb.jpg;b;{cells}\n")
        with pytest.raises(UserError, match=f"{message}.*\\n?.*1 more of this kind") as raised:
            sighting_cells(read_images(file))
        assert "b.jpg" in str(raised.value)


@pytest.mark.parametrize("cell", ["x" * 140_000, '"a"b'])
def test_rows_have_numbers_where_their_lines_are_not_known(cell: str, tmp_path: Path):
    """Cells that pyarrow reads and the csv module refuses, which counts lines where there is a blank one."""
    file = tmp_path / "t.csv"
    file.write_text(f"path,label,note\na.jpg,ant,{cell}\n\n../b.jpg,bee,\n")
    assert read_images(file).table["label"].to_pylist() == ["ant", "bee"]
    (fault,) = TableConfig(file=str(file)).listing().faults
    assert fault.startswith(f"{file}: row 2: path '../b.jpg' leads out of the root")


def test_a_file_in_several_folders_is_not_guessed(tmp_path: Path):
    """As of Kaggle: train.csv next to train/ and test/, which both have 0.jpg; masks are no photos."""
    trees.photos(tmp_path, ("train/0.jpg", "test/0.jpg", "masks/0.jpg"))
    for name in ("train.csv", "labels.csv"):
        (tmp_path / name).write_text("image,label\n0.jpg,fox\n")
    assert read_images(tmp_path / "train.csv").table["path"].to_pylist() == ["train/0.jpg"]
    message = "labels.csv: '0.jpg' is in the folders test and train of .*--root"
    refuses(message, read_images, tmp_path / "labels.csv")
    (tmp_path / "labels.csv").write_text("image,label,split\n0.jpg,fox,train\n")
    refuses(r"--column 'path=\{split\}/\{file\}'", read_images, tmp_path / "labels.csv")
    columns = {"path": "{split}/{image}"}
    assert read_images(tmp_path / "labels.csv", columns=columns).table["path"].to_pylist() == ["train/0.jpg"]
    trees.photos(tmp_path, ("images/0.jpg",))
    assert read_images(tmp_path / "labels.csv").table["path"].to_pylist() == ["images/0.jpg"]


def test_rows_in_a_cell_are_a_mark_without_an_end(tmp_path: Path):
    """An even number of marks, which as CSV is one cell of several lines; a note of several lines is one."""
    (tmp_path / "t.csv").write_text('path,label\n0.jpg,a\n1.jpg,"b\n2.jpg,b\n3.jpg,"c\n4.jpg,c\n')
    refuses("a quotation mark is not closed", read_images, tmp_path / "t.csv")
    for note in ("by Ann,\nsee 3.jpg", "1.jpg,\n2.jpg,\n3.jpg", "seen again\nin b.jpg, with cub"):
        (tmp_path / "t.csv").write_text(f'path,label,note\n0.jpg,a,"{note}"\n')
        assert read_images(tmp_path / "t.csv").table["note"].to_pylist() == [note]


def test_rows_without_any_cell_are_blank_lines(tmp_path: Path):
    """Excel saves them for each row that once had a cell or a border."""
    file = tmp_path / "t.csv"
    file.write_text("path;label;note\na.jpg;crow;\n;;\nb.jpg;dove;x\n;;\n;;\n")
    listed = read_images(file)
    assert listed.table["path"].to_pylist() == ["a.jpg", "b.jpg"]
    assert [listed.place(row) for row in range(2)] == [f"{file}:2", f"{file}:4"]
    file.write_text("path,label\na.jpg,crow\n,dove\n")
    assert len(read_images(file)) == 2  # a label without a path is a fault of the table
    file.write_text("a;b;same\na.jpg;b.jpg;1\n;;\na.jpg;c.jpg;0\n;;\n")  # a table of pairs
    assert [(line, [*cells.values()]) for line, cells in read_csv(file).rows()] == [
        (2, ["a.jpg", "b.jpg", "1"]),
        (4, ["a.jpg", "c.jpg", "0"]),
    ]


def test_a_message_on_a_table_names_some_of_its_columns(tmp_path: Path):
    file = tmp_path / "t.csv"
    file.write_text(",".join(["path", *(f"f{number}" for number in range(3000))]) + "\n")
    refuses("has no column 'label'.*; it has path, f0, f1, .*, f18 and 2,981 more; name it", read_images, file)


def test_a_row_that_is_too_short_gets_advice_for_it(tmp_path: Path):
    (tmp_path / "t.csv").write_text("path,label,note\n0.jpg,a\n")
    refuses("a row has 2 cells, expected 3 .*; add the missing cells", read_images, tmp_path / "t.csv")


def test_days_and_times_of_day_in_two_columns_are_one_time(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Both stay columns, for conditions on them."""
    (tmp_path / "t.csv").write_text("path,label,Date,Time\n0.jpg,a,2024-05-01,14:10:00\n1.jpg,a,,\n")
    table = read_images(tmp_path / "t.csv").table
    assert table["time"].to_pylist() == ["2024-05-01 14:10:00", None] and table["Date"][0].as_py() == "2024-05-01"
    (tmp_path / "t.csv").write_text("path,label,Time\n0.jpg,a,14:10\n")
    listed = read_images(tmp_path / "t.csv")
    assert listed.table["time"].to_pylist() == ["14:10"] and time_of(sighting_cells(listed)[0].time, "") is None
    assert "'Time' has times of day without dates, so no image has a time" in caplog.text


def test_groups_and_super_classes_are_texts_as_labels_are(tmp_path: Path):
    """Without blanks at the ends, composed (NFC)."""
    groups, kinds = ("cam1", "cam1 ", "caf\xe9", "cafe\u0301"), ("caf\xe9", "cafe\u0301 ", "x", "x")
    lines = zip(photos(tmp_path, 4), "aabb", groups, kinds, strict=True)
    (tmp_path / "t.csv").write_text("path,label,group,category\n" + "".join(",".join(line) + "\n" for line in lines))
    listing = TableConfig(file=str(tmp_path / "t.csv")).listing()
    assert listing.faults == [] and listing.groups is not None
    assert listing.groups[0] == listing.groups[1] != listing.groups[2] == listing.groups[3]
