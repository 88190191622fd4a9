"""Conditions on rows: a limited gallery answers as one that was created from these rows alone."""

import csv
import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dmlkit.errors import UserError
from dmlkit.files.where import Where
from dmlkit.gallery.change import create_gallery, remove_images
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.sources import open_points
from dmlkit.identify.calibration import Identification, calibrate_by_value
from dmlkit.recipe.file import parse_recipe
from dmlkit.vectors.run import embed
from tests.conftest import Cli, Killed, refuses
from tests.datasets import trees
from tests.vectors.stored import ON_CPU

SIDES = ["left", "right", None, "Left", "left "]
CELLS = {
    "side": SIDES,
    "year": ["2019", "2020", "2020.0", None, "1999"],
    "day": ["2020-05-01", "2020-05-31T23:00", "2020-06-01", None, "2019-12-31"],
}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("side=left", [0, 4]),
        ("SIDE = left", [0, 4]),
        ("side=", [2]),
        ("side in left, right", [0, 1, 4]),
        ("side in left,", [0, 2, 4]),
        ('side in ""', [2]),
        ("year=2020", [1, 2]),
        ("year>=2020", [1, 2]),
        ("year<=2019", [0, 4]),
        ("year=2019..2020", [0, 1, 2]),
        ("year=..2019", [0, 4]),
        ("day=2020-05-01..2020-05-31", [0, 1]),
        ("day>=2020-05", [0, 1, 2]),
        ("side=left and year=2019..", [0]),
        ("side=left and year=..2019 and day<=2019", [4]),
    ],
)
def test_rows_are_those_of_a_loop_by_hand(text: str, rows: list[int]):
    assert Where.of(text).rows(CELLS, "t.csv", 5) == rows


@pytest.mark.parametrize("sign", ["T", " "])
def test_times_are_compared_as_those_of_datetime(sign: str):
    times = [datetime(2021, month, day, hour, 30) for month in (3, 10) for day in (3, 12) for hour in (9, 18)]
    cells = {"time": [str(time).replace(" ", sign) for time in times], "clock": [f"{time:%-H:%M}" for time in times]}

    def rows(text: str) -> list[datetime]:
        return [times[row] for row in Where.of(text).rows(cells, "t.csv", len(times))]

    for end in ("2021-03-12 12:00", "2021-3-12T12:00"):
        assert rows(f"time>={end}") == [time for time in times if time >= datetime(2021, 3, 12, 12)]
        assert rows(f"time<={end}") == [time for time in times if time <= datetime(2021, 3, 12, 12)]
    assert rows("time>=2021-4") == [time for time in times if time.month >= 4]
    assert rows("clock<=9:30") == rows("clock<=09:30") == [time for time in times if time.hour == 9]
    assert rows("clock>=10:00") == [time for time in times if time.hour == 18]
    refuses("'time' has '2021-03-03.09:30:00'; expected a date before the clock", rows, "time>=12:00")


@pytest.mark.parametrize("form", ["%Y:%m:%d %H:%M:%S", "%Y/%m/%d", "%Y/%-m/%-d", "%Y.%m.%d", "%Y%m%d"])
def test_dates_in_other_forms_are_in_the_order_of_time(form: str):
    days = [datetime(2019 + number % 3, 1 + number % 12, 1 + number % 28) for number in range(40)]
    cells = {"day": [f"{day:{form}}" for day in days]}
    for end in (datetime(2020, 6, 1), datetime(2020, 11, 9)):
        for text in ("%Y-%m-%d", form):
            rows = Where.of(f'day>="{end:{text}}"').rows(cells, "t.csv", len(days))
            assert rows == [row for row, day in enumerate(days) if day >= end]
    rows = Where.of("day=2020-02..2020-06").rows(cells, "t.csv", len(days))
    assert rows == [row for row, day in enumerate(days) if day.year == 2020 and 2 <= day.month <= 6]


@pytest.mark.parametrize("form", ["%d.%m.%Y", "%-m/%-d/%y", "%d-%m-%Y"])
def test_a_range_of_dates_that_end_with_the_year_is_refused(form: str):
    cells = {"day": [f"{datetime(2020, month, 28):{form}}" for month in range(1, 13)]}
    for end in (f"{datetime(2020, 6, 1):{form}}", "2020-06-01"):
        refuses("ranges of dates need the year first", Where.of(f"day>={end}").rows, cells, "t.csv", 12)
    assert Where.of(f"day={cells['day'][3]}").rows(cells, "t.csv", 12) == [3]


def test_an_address_of_four_numbers_is_no_date():
    cells = {"host": ["10.0.10.1", "10.0.20.1", "10.0.30.1"]}
    assert Where.of("host>=10.0.20.1").rows(cells, "t.csv", 3) == [1, 2]


@pytest.mark.parametrize(
    "value",
    [
        "black and white",
        "a=b",
        "1..2",
        "left, right",
        "x>=3",
        "5 in 10",
        "plain",
        "5 and",
        '"A" and "B"',
        "a\xa0and\xa0b",
    ],
)
@pytest.mark.parametrize("column", ["coat", "coat and size", "a=b", 'size "in"'])
def test_any_value_of_any_column_can_be_named(column: str, value: str):
    cells = {column: ["other", value, value.split()[0] + "!"], "side": ["left", "left", "left"]}
    first, second = (word.replace('"', '""') for word in (column, value))
    assert Where.of(f'side=left and "{first}"="{second}"').rows(cells, "t.csv", 3) == [1]
    assert Where.of(f'"{first}" in "{second}", none').rows(cells, "t.csv", 3) == [1]
    written = Where.of_value(column, value)
    assert Where.of(written.text).conditions == written.conditions


@pytest.mark.parametrize("value", ['"Bob" Smith', 'size 5"', '5", 6"'])
def test_marks_around_a_part_of_a_value_belong_to_it(value: str):
    assert Where.of(f"name={value}").rows({"name": [value, value.replace('"', "")]}, "t.csv", 2) == [0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("left", r"--where 'left': got 'left'; expected COLUMN=VALUE"),
        ("side=left and", "got ''; expected COLUMN=VALUE"),
        ("side==left", "expected COLUMN=VALUE"),
        ("side in and year=2020", "got 'side in'; expected COLUMN=VALUE"),
        ("sied=left", r"t.csv: has no column 'sied'; it has side, year, day; did you mean 'side'"),
        ("side=up", r"t.csv: no row is left; its column 'side' has Left, left, left , no value, right"),
        ("side=right and year=2019", r"no row of the 1 rows that fulfill the conditions before is left"),
        ("side=1..2", "column 'side' has 'left'; expected numbers"),
    ],
)
def test_what_is_no_condition_is_one_line(text: str, message: str):
    with pytest.raises(UserError, match=message):
        Where.of(text).rows(CELLS, "t.csv", 5)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """Return a folder with a run, a table of photos, and galleries of all of them and of those from the left."""
    folder = tmp_path_factory.mktemp("where")
    trained_once(folder)
    rows: list[tuple[str, str, str, int]] = []
    for number, name in enumerate(("crow", "dove", "finch", "gull")):
        for index in range(8):
            trees.photo(folder / "photos" / name / f"{index}.jpg", 10 * number + index, (40, 30))
            rows.append((f"photos/{name}/{index}.jpg", name, ("left", "right")[index % 2], 2015 + index))
    for file, kept in (("all.csv", rows), ("left.csv", [row for row in rows if row[2] == "left"])):
        with (folder / file).open("w", newline="") as table:
            csv.writer(table).writerows([("path", "label", "side", "year"), *kept])
        create_gallery(folder / "run", folder / file, folder / file.removesuffix(".csv"), model=ON_CPU)
    return folder


def test_a_limited_gallery_answers_as_one_of_its_rows_alone(home: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(home)
    where = ("--where", "side=left and year=..2030")
    whole, alone = (open_points(Path(name)) for name in ("all", "left"))
    limited = open_points(Path("all"), where=Where.of(where[1]))
    assert (len(whole), len(limited), len(alone)) == (32, 16, 16) and limited.paths == alone.paths
    for ours, theirs in zip(limited.blocks(5), alone.blocks(5), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for words in (("search", "photos", "-k", 3, "--json"), ("identify", "photos", "-o", "answers.json")):
        command, *rest = words
        found = [
            json.loads(Path("answers.json").read_text() if command == "identify" else result.out)
            for options in (("all", *where), ("left",))
            if (result := dmlkit(command, options[0], *rest, *options[1:])).code == 0
        ]
        assert len(found) == 2
        pick = "queries" if command == "search" else "images"
        assert found[0][pick] == found[1][pick]
    assert dmlkit("calibrate", "all", *where).code == dmlkit("calibrate", "left").code == 0
    (own,) = Path("all").glob("identification-*.json")
    read = [json.loads(path.read_text()) for path in (own, Path("left/identification.json"))]
    assert read[0]["fits"] == read[1]["fits"] and read[0]["where"] == where[1] and read[1]["where"] is None
    assert not Path("all/identification.json").exists()
    words = ("identify", "all", "photos")
    assert "run dmlkit calibrate all to choose" in " ".join(dmlkit(*words).out.split())
    for text in (where[1], 'year=.."2030" and side = "left"'):  # the same conditions, spelled in another way
        assert "calibrate" not in dmlkit(*words, "--where", text).ok().out
    other = " ".join(dmlkit(*words, "--where", "side=right").out.split())
    assert "run dmlkit calibrate all --where side=right to choose" in other


def test_some_vectors_keep_their_ids_and_limit_the_queries_too(tmp_path: Path, dmlkit: Cli):
    points = np.random.default_rng(5).normal(size=(24, 6)).astype(np.float32)
    for name, rows in (("x", range(15)), ("q", range(15, 24))):
        columns = {"embedding": [points[row].tolist() for row in rows], "path": [f"{row}.png" for row in rows]}
        columns["side"] = ["left" if row % 2 else "right" for row in rows]
        parquet.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    directions = points / np.linalg.norm(points, axis=1, keepdims=True)
    words = ("search", tmp_path / "x.parquet", tmp_path / "q.parquet", "-k", 1, "--where", "side=left", "--json")
    found = dmlkit(*words).json()["queries"]
    left = np.arange(1, 15, 2)
    assert [Path(query["path"]).stem for query in found] == ["15", "17", "19", "21", "23"]
    for query in found:
        expected = left[(directions[left] @ directions[int(Path(query["path"]).stem)]).argmax()]
        (one,) = query["neighbors"]
        assert (one["id"], Path(one["path"]).stem) == (expected, str(expected))


def test_a_gallery_of_queries_is_limited_by_columns_of_its_table_alone(home: Path, dmlkit: Cli, monkeypatch):
    """Labels, paths and ids of queries are others than those of what is searched."""
    monkeypatch.chdir(home)
    embed(Path("run"), Path("photos"), output=Path("e"), device="cpu")
    found = dmlkit("search", "e", "e", "-k", 1, "--where", "label=gull", "--json").json()["queries"]
    assert len(found) == 32 and all(query["neighbors"][0]["id"] in range(24, 32) for query in found)  # rows of gulls
    words = ("search", "all", "all", "-k", 1, "--json", "--where")
    for where, count in (("label=gull", 32), ("side=left", 16), ("side=left and label=gull", 16)):
        assert len(dmlkit(*words, where).json()["queries"]) == count


def test_a_column_of_ids_of_the_table_goes_before_those_of_the_gallery(home: Path, dmlkit: Cli, monkeypatch):
    monkeypatch.chdir(home)
    lines = [f"photos/crow/{index}.jpg,crow,c{index // 2}" for index in range(6)]
    Path("ids.csv").write_text("\n".join(["path,label,id", *lines]))
    create_gallery(Path("run"), Path("ids.csv"), Path("ids"), model=ON_CPU)
    assert len(open_points(Path("ids"), where=Where.of("id=c1"))) == 2


def test_a_gallery_keeps_the_times_of_a_table_without_places(home: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(home)
    times = {
        f"photos/{name}/{index}.jpg": f"2026-0{5 + index % 2}-1{index}"
        for name in ("crow", "dove")
        for index in range(4)
    }
    rows = [f"{path},{Path(path).parent.name},{time}" for path, time in times.items()]
    Path("times.csv").write_text(
        "\n".join(["path,label,Date", *rows, "photos/gull/0.jpg,gull,", "photos/gull/1.jpg,gull,"])
    )
    create_gallery(Path("run"), Path("times.csv"), Path("times"), model=ON_CPU)
    june = open_points(Path("times"), where=Where.of("time>=2026-06"))
    assert june.paths == [str(home / path) for path, time in times.items() if time[:7] == "2026-06"] and len(june) == 4
    found = dmlkit("eval", "times", "--by", "time", "--json").json()["by"]
    assert {(value["value"], value["queries"]) for value in found["values"]} == {(time, 2) for time in times.values()}
    assert found["without"] == 2


@pytest.fixture
def sides(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a gallery with images from the left and the right, one from the top, and one from no side."""
    monkeypatch.chdir(home)
    with Path("all.csv").open() as table:
        head, *rows = csv.reader(table)
    rows[0][2], rows[1][2] = "top", ""
    rows = [[*row, f"{row[1]}-{row[2]}"] for row in rows]
    with Path("sides.csv").open("w", newline="") as table:
        csv.writer(table).writerows([[*head, "burst"], *rows])
    shutil.rmtree("sides", ignore_errors=True)
    create_gallery(Path("run"), Path("sides.csv"), Path("sides"), model=ON_CPU)
    return Path("sides")


def answers_of(dmlkit: Cli, *words: object) -> dict[str, dict[str, Any]]:
    dmlkit("identify", *words, "-o", "answers.json", "--device", "cpu").ok()
    return {image["path"]: image for image in json.loads(Path("answers.json").read_text())["images"]}


@pytest.mark.slow
def test_calibrating_by_value_is_calibrating_each_value_alone(sides: Path, dmlkit: Cli):
    """Thresholds are those of --where to the bit; identify answers images and groups as with --where."""
    calibrate = ("calibrate", sides, "--fpir", 0.4, "--device", "cpu")
    alone, wanted = dict[str, Any](), dict[str, dict[str, dict[str, Any]]]()
    for by in ((), ("--by", "burst")):
        assert dmlkit(*calibrate).code == 0
        expected = answers_of(dmlkit, sides, "sides.csv", *by)
        for side in ("left", "right"):
            where = ("--where", f"side={side}")
            alone[side] = dmlkit(*calibrate, *where, "--json").json()
            expected |= answers_of(dmlkit, sides, "sides.csv", *where, *by)
        wanted["".join(by)] = expected
    wanted["--bylabel"] = answers_of(dmlkit, sides, "sides.csv", "--by", "label")  # of both sides
    for file in sides.glob("identification-*.json"):
        file.unlink()
    report = dmlkit(*calibrate, "--by", "Side", "--json").json()
    assert report["column"] == "side" and list(report["values"]) == ["left", "right", "top"]
    for side in ("left", "right"):
        assert report["values"][side]["fits"] == alone[side]["fits"]
    assert (
        alone["left"]["fits"] != alone["right"]["fits"] and "each label has a single image" in report["values"]["top"]
    )
    for options, expected in wanted.items():
        by = () if not options else ("--by", options.removeprefix("--by"))
        given = answers_of(dmlkit, sides, "sides.csv", *by)
        assert list(given) == [path for path in expected if path in given] and len(given) == len(expected)
        for path, answer in given.items():
            for key, value in expected[path].items():
                exact = not isinstance(value, float) or key == "least_probability"
                assert answer[key] == (value if exact or key == "nearest" else pytest.approx(value, abs=1e-5)), key


@pytest.mark.slow
def test_what_calibrating_by_value_and_identify_say(sides: Path, dmlkit: Cli):
    calibrate = ("calibrate", sides, "--device", "cpu")
    shown = " ".join(dmlkit(*calibrate, "--by", "side").out.split())
    assert "per side, among the images of the same side alone" in shown
    assert (
        "note: identify takes the threshold of all images for top; top: sides: each label has a single image" in shown
    )
    screen = " ".join(dmlkit("identify", sides, "sides.csv", "--device", "cpu").out.split())
    assert (
        "30 of 32 images compared with the images of their own side alone, by its threshold, the others with" in screen
    )
    assert "with all images, by the common one: no side (1), top (1)" in screen
    screen = " ".join(dmlkit("identify", sides, "photos", "--device", "cpu").out.split())
    assert "the thresholds per side do not apply: photos is no table with this column" in screen
    for words in (("--threshold", 0.5), ("--where", "side=left")):
        assert "per side" not in dmlkit("identify", sides, "photos", *words, "--device", "cpu").ok().out
    create_gallery(Path("run"), Path("photos"), Path("folder"), model=ON_CPU)
    for words, message in (
        ((sides, "--by", "sied"), "--by sied: sides: has no column 'sied'; it has side, year, burst; did you mean"),
        (("folder", "--by", "side"), "--by side: folder has no columns; create it from a table with the column side"),
        (("left", "--by", "side"), "--by side: the only value is 'left'; expected a column with 2 to 200 values"),
    ):
        dmlkit("calibrate", *words, "--device", "cpu").refused(message)
    none = dmlkit(*calibrate, "--by", "year")  # 4 images of each year
    assert none.code == 0 and "threshold of all images for 2015, 2016, 2017, 2018, 2019 and 3 more" in " ".join(
        none.out.split()
    )
    assert "per year" not in dmlkit("identify", sides, "sides.csv", "--device", "cpu").ok().out
    assert not list(sides.glob("identification-*.json"))[2:]  # those of the sides alone


def test_tables_of_queries_and_vectors_are_limited(home: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(home)
    report = dmlkit("search", "all", "all.csv", "-k", 1, "--where", "side=right", "--json").json()
    assert len(report["queries"]) == 16
    assert all(int(Path(query["path"]).stem) % 2 for query in report["queries"])
    assert all(query["neighbors"][0]["path"].endswith(query["path"].removeprefix("./")) for query in report["queries"])
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    labels, sites = [f"c{row % 3}" for row in range(12)], [["a", "b"][row // 6] for row in range(12)]
    np.savez("x.npz", x=x, label=labels, site=sites)
    np.savez("a.npz", x=x[:6], label=labels[:6])
    for sources in ((("x.npz", "--where", "site=a"), ("a.npz",)), (("all", "--where", "side=left"), ("left",))):
        limited, alone = (dmlkit("eval", *words, "--metric", "map@r", "--json").json() for words in sources)
        assert limited["metrics"] == alone["metrics"]
    assert "16 images: " in dmlkit("duplicates", "all", "--threshold", 0.5, "--where", "side=left").ok().out


def test_a_run_is_limited_to_rows_of_its_table(home: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    """Its figures and its threshold are those of a table of these rows alone."""
    monkeypatch.chdir(home)
    for name in ("all", "left"):
        head, *lines = Path(f"{name}.csv").read_text().splitlines()
        split = ["validation" if "crow" in line or "dove" in line else "test" for line in lines]
        cells = [",".join(pair) for pair in zip(lines, split, strict=True)]
        Path(f"{name}-split.csv").write_text("\n".join([f"{head},split", *cells]))
    data = {name: f"dataset={{name: table, file: {name}-split.csv}}" for name in ("all", "left")}
    where = "side=left and year=..2030"
    limited = open_points(Path("run"), overrides=[data["all"]], where=Where.of(where), model=ON_CPU)
    alone = open_points(Path("run"), overrides=[data["left"]], model=ON_CPU)
    assert len(limited) == 8 and limited.paths == alone.paths
    for ours, theirs in zip(limited.blocks(5), alone.blocks(5), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for words in (("eval", "run", "--metric", "map@r"), ("calibrate", "run")):
        ours, theirs = (
            dmlkit(*words, "--set", data[file], *options, "--json", "--device", "cpu").json()
            for file, options in (("left", ()), ("all", ("--where", where)))
        )
        for key in ("metrics",) if words[0] == "eval" else ("threshold", "validation", "test", "probability"):
            assert ours[key] == theirs[key]
    assert ours["where"] is None and theirs["where"] == where
    photos = [f"photos/crow/{index}.jpg" for index in range(2)]
    verified = dmlkit("verify", "run", *photos, "--device", "cpu")
    assert verified.code == 0 and f"its threshold was chosen for {where} alone; dmlkit calibrate run" in verified.err
    for words, message in (
        (("eval", "run"), "--where side=left: the dataset is glyphs, which has no columns; create a gallery"),
        (("eval", "run", "photos"), "--where side=left: the dataset is photos, which has no columns"),
        (("calibrate", "run", "--set", data["all"], "--by", "side"), "--by side: does not apply to --where side=left"),
    ):
        dmlkit(*words, "--where", "side=left", "--device", "cpu").refused(message)
    text = "dataset: {name: table, file: all-split.csv, where: left}"
    with pytest.raises(UserError, match=r"dataset.where: --where 'left': got 'left'; expected COLUMN=VALUE"):
        parse_recipe(text, "recipe.yaml")


@pytest.mark.slow
def test_a_value_with_too_few_images_to_list_is_compared_with_all(sides: Path, dmlkit: Cli):
    """When all but two of its images are removed, the left side has the common threshold; answers list three images."""
    report = dmlkit("calibrate", sides, "--fpir", 0.4, "--by", "side", "--device", "cpu", "--json").json()
    common, right = (fits["fits"][0]["threshold"] for fits in (report, report["values"]["right"]))
    with Path("sides.csv").open() as table:
        rows = [row for row in csv.DictReader(table) if row["side"] == "left"]
    dmlkit("gallery", "remove", sides, *(row["path"] for row in rows[2:])).ok()
    answers = answers_of(dmlkit, sides, "sides.csv")
    assert common != right and {len(answer["nearest"]) for answer in answers.values()} == {3}
    left = {str(Path(row["path"]).absolute()) for row in rows}
    minimums = {path: answer["least_probability"] for path, answer in answers.items()}
    assert {minimums[path] for path in minimums if str(Path(path).absolute()) in left} == {common}
    assert {*minimums.values()} == {common, right}
    screen = " ".join(dmlkit("identify", sides, "sides.csv", "--device", "cpu").ok().out.split())
    assert f"by the common one: left ({len(rows)}), no side (1), top (1)" in screen


@pytest.mark.slow
def test_a_killed_calibration_by_value_changes_no_threshold_of_identify(
    sides: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch
):
    words = ("--by", "side", "--device", "cpu")
    dmlkit("calibrate", sides, "--fpir", 0.4, *words).ok()
    kept, written, write = (sides / "identification.json").read_bytes(), list[Path](), Identification.write

    def write_or_die(calibration: Identification, path: Path) -> None:
        if len(written) == 2:
            raise Killed
        written.append(path)
        write(calibration, path)

    monkeypatch.setattr(Identification, "write", write_or_die)
    with pytest.raises(Killed):
        calibrate_by_value(sides, "side", fpir=0.5, model=ON_CPU)
    assert (sides / "identification.json").read_bytes() == kept and json.loads(kept)["column"] == "side"
    assert len(written) == 2 and all("identification-" in path.name for path in written)


def test_an_empty_gallery_has_no_row_that_fulfills_a_condition(files: Path):
    gallery = files / "gallery"
    remove_images(gallery, labels=[*"ABCDEFGH"])
    assert len(GalleryFolder(gallery, Where.of("label=A"))) == 0
    refuses("this gallery is empty; add images", open_points, gallery, where=Where.of("label=A"))
