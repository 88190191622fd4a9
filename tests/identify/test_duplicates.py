"""`dmlkit duplicates` and `data check --run`: groups, pairs, tables, pages, and what is refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from dmlkit.run_folder.folder import RunFolder
from tests.conftest import Cli, csv_rows
from tests.datasets import trees
from tests.vectors.stored import EUCLIDEAN, embeddings_at

HURTS = "<b>\"'\n\u202eevil\U0001f600"


def turned(*degrees: float) -> np.ndarray:
    """Unit vectors in 8 dimensions at some angles."""
    points = np.zeros((len(degrees), 8), dtype=np.float32)
    points[:, 0], points[:, 1] = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    return points


def labelled(path: Path, labels: list[str | None]) -> Path:
    rows = range(len(labels))
    columns = {"id": list(rows), "path": [f"photos/{row}{HURTS}.jpg" for row in rows], "label": pa.array(labels, "str")}
    parquet.write_table(pa.table(columns), path / "items.parquet")
    return path


def test_groups_are_told_on_the_screen_as_a_table_and_as_a_page(dmlkit: Cli, tmp_path: Path, monkeypatch):
    # 0, 1 and 2 are alike, 4 and 5 too; 6 is a link from 5 to 7, which is not like 5
    source = labelled(embeddings_at(tmp_path / "e", turned(0, 1, 2, 40, 80, 81, 89, 97)), ["a", "a", "b", *"cdefg"])
    table, page = tmp_path / "groups.csv", tmp_path / "page.html"
    result = dmlkit("duplicates", source, "--threshold", np.cos(np.deg2rad(8.5)), "-o", table, "-o", page).ok()
    assert "8 images: 7 of them in 3 groups of near-duplicates" in result.out
    assert "note: 3 groups have several labels" in result.out
    assert "note: 1 more pair reaches the threshold across groups" in result.out
    assert "note: 7 pictures are placeholders" in result.out
    rows = csv_rows(table)
    assert [(row["group"], row["path"].split("<")[0]) for row in rows] == [
        *(("1", f"photos/{row}") for row in (0, 1, 2)),
        *(("2", f"photos/{row}") for row in (4, 5)),
        *(("3", f"photos/{row}") for row in (6, 7)),
    ]
    least = [float(row["least_similarity"]) for row in rows]
    assert least == pytest.approx(np.cos(np.deg2rad([2, 1, 2, 1, 1, 8, 8])).tolist(), abs=1e-6)
    text = page.read_text(encoding="utf-8")
    assert "<b>" not in text and "\u202e" not in text and text.count("<section ") == 3
    monkeypatch.setattr("dmlkit.identify.page.MOST", 2)
    short = dmlkit("duplicates", source, "--threshold", np.cos(np.deg2rad(8.5)), "-o", page).ok()
    assert f"wrote {page}: the first 2 rows" in short.out and "after the first 2 rows." in page.read_text("utf-8")


def test_pairs_of_two_folders(dmlkit: Cli, tmp_path: Path):
    one = embeddings_at(tmp_path / "one", turned(0, 1, 50, 90))
    other = embeddings_at(tmp_path / "other", turned(1.5, 120, 91))
    result = dmlkit(
        "duplicates", one, other, "--threshold", 0.999, "-o", tmp_path / "x.csv", "-o", tmp_path / "x.html"
    ).ok()
    assert "3 pairs of near-duplicates: 3 of 4 images in a, 2 of 3 in b" in result.out
    found = [
        (row["path"], row["other_path"], round(float(row["similarity"]), 6)) for row in csv_rows(tmp_path / "x.csv")
    ]
    cosines = [round(float(np.cos(np.deg2rad(angle))), 6) for angle in (1.5, 0.5, 1)]
    assert found == [
        ("photos/0.jpg", "photos/0.jpg", cosines[0]),
        ("photos/1.jpg", "photos/0.jpg", cosines[1]),
        ("photos/3.jpg", "photos/2.jpg", cosines[2]),
    ]


def test_labels_of_an_array(dmlkit: Cli, tmp_path: Path):
    np.save(tmp_path / "x.npy", turned(0, 1, 90))
    np.save(tmp_path / "y.npy", np.array(["a", "b", "c"]))
    own = ("duplicates", tmp_path / "x.npy", "--threshold", 0.9, "--labels", tmp_path / "y.npy")
    assert "note: 1 group has several labels" in dmlkit(*own, "-o", tmp_path / "groups.csv").ok().out
    assert [row["label"] for row in csv_rows(tmp_path / "groups.csv")] == ["a", "b"]
    np.save(tmp_path / "other.npy", turned(89))
    dmlkit(*own[:2], tmp_path / "other.npy", *own[2:], "-o", tmp_path / "pairs.csv").ok()
    assert [(row["label"], row["other_label"]) for row in csv_rows(tmp_path / "pairs.csv")] == [("c", "")]


@pytest.mark.parametrize("space", [None, EUCLIDEAN])
def test_without_a_threshold_the_most_similar_pairs_and_a_proposal(dmlkit, tmp_path, space, monkeypatch):
    """Against all pairs by NumPy. Three images of one kind, two of another, and 15 others."""
    monkeypatch.setenv("COLUMNS", "80")
    generator = np.random.default_rng(2)
    points = generator.normal(size=(20, 8))
    points[5], points[9], points[12] = (points[row] + 0.01 * generator.normal(size=8) for row in (2, 2, 3))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    one = embeddings_at(tmp_path / "one", points, **({"manifold": space} if space else {}))
    other = embeddings_at(tmp_path / "other", points[:4], **({"manifold": space} if space else {}))
    exact = points.astype(np.float64)
    alike = -np.linalg.norm(exact[:, None] - exact, axis=2) if space else exact @ exact.T
    pairs = sorted(((alike[i, j], i, j) for i in range(20) for j in range(i + 1, 20)), reverse=True)
    result = dmlkit("duplicates", one).ok()
    rows = [line.split("│")[1:4] for line in result.out.splitlines() if line.startswith("│")]
    found = [(float(value), a.strip(), b.strip()) for value, a, b in rows]
    assert [row[1:] for row in found] == [(f"photos/{i}.jpg", f"photos/{j}.jpg") for _, i, j in pairs[:10]]
    assert [row[0] for row in found] == pytest.approx([value for value, *_ in pairs[:10]], abs=6e-5)
    nearest = np.sort((alike - 9 * np.eye(20)).max(axis=1))[::-1]
    threshold = (nearest[4] + nearest[5]) / 2  # 5 images have a near-duplicate
    assert f"proposal: --threshold {threshold:.6g}; 5 of 20 images reach it" in result.out
    assert "5 of them in 2 groups" in dmlkit("duplicates", one, "--threshold", f"{threshold:.6g}").out
    across = dmlkit("duplicates", one, other).out
    nearest = np.sort(alike[:, :4].max(axis=1))[::-1]
    place = np.argmax(nearest[:10] - nearest[1:11])
    threshold = (nearest[place] + nearest[place + 1]) / 2
    proposal = re.search(r"proposal: --threshold (\S+); (\d+) of 20 images reach it", across)
    assert proposal and float(proposal[1]) == pytest.approx(threshold, abs=1e-5) and int(proposal[2]) == place + 1
    assert "no threshold is proposed: half" in dmlkit("duplicates", other, one).out
    dmlkit("duplicates", one, "-o", tmp_path / "x.csv").refused(f"--output {tmp_path / 'x.csv'} needs --threshold")
    single = embeddings_at(tmp_path / "single", points[:1], **({"manifold": space} if space else {}))
    assert "has a single image; expected at least two" in dmlkit("duplicates", single).err


def test_many_equal_images_are_the_most_similar_pairs(tmp_path: Path, dmlkit: Cli):
    result = dmlkit("duplicates", embeddings_at(tmp_path / "e", turned(*[0] * 30, 50, 90)))
    assert result.code == 0 and result.out.count("1.0000") == 10 and "no threshold is proposed" in result.out


def test_nothing_alike_is_no_error(dmlkit: Cli, tmp_path: Path):
    source = embeddings_at(tmp_path / "e", turned(0, 90))
    result = dmlkit("duplicates", source, "--threshold", 0.9, "-o", tmp_path / "x.csv", "-o", tmp_path / "x.html")
    assert result.code == 0 and "0 of them in 0 groups of near-duplicates" in result.out
    assert csv_rows(tmp_path / "x.csv") == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{e}", "--threshold", "1.5"], "--threshold 1.5: expected at most 1, since the similarity is cosine"),
        (["{e}", "--threshold", "nan"], "--threshold nan: expected at most 1, since the similarity is cosine"),
        (["{e}", "--threshold", "0.9", "--split", "test"], "applies to a run"),
        (["{e}", "--threshold", "0.9", "--device", "cpu"], "applies to a run"),
        (["{e}", "--threshold", "0.9", "-o", "{folder}"], "expected a name that ends in .csv or .html"),
        (["{e}", "{model}", "--threshold", "0.9"], "embeddings of another model"),
        (["{empty}", "--threshold", "0.9"], "is empty"),
    ],
)
def test_bad_input_is_told_in_a_line(dmlkit: Cli, tmp_path: Path, words: list[str], message: str):
    places: dict[str, Path] = {"{folder}": tmp_path}
    places["{e}"] = embeddings_at(tmp_path / "e", turned(0, 1))
    places["{empty}"] = embeddings_at(tmp_path / "empty", turned())
    other = {"fingerprint": "0" * 64, "checkpoint": "best", "epoch": 1, "backbone": {"name": "small_cnn"}}
    places["{model}"] = embeddings_at(tmp_path / "model", turned(0, 1), model=other)
    dmlkit("duplicates", *(places.get(word, word) for word in words)).refused(message)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trained_once(folder)
    return folder / "run"


def test_a_run_embeds_its_split_and_shows_what_it_renders(run: Path, dmlkit: Cli, tmp_path: Path):
    result = dmlkit("duplicates", run, "--threshold", 0.9, "-o", tmp_path / "x.html", "--device", "cpu").ok()
    assert "placeholder" not in result.out and "data:image/jpeg" in (tmp_path / "x.html").read_text()


def test_data_check_tells_leaks_between_splits(run: Path, dmlkit: Cli, tmp_path: Path):
    rows = ["path,label,split"]
    for label, split in enumerate(("train", "train", "test", "test")):
        for index in range(3):
            trees.photo(tmp_path / "photos" / str(label) / f"{index}.png", 40 * label + 9 * index, (40, 40))
            rows.append(f"photos/{label}/{index}.png,{label},{split}")
    trees.photo(tmp_path / "photos" / "3" / "2.png", 0, (41, 41))  # photo 0 of class 0, of another size
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    result = dmlkit("data", "check", tmp_path / "table.csv", "--run", run, "--threshold", 0.9999, "--device", "cpu")
    assert result.code == 1, result.out + result.err
    lines = [line for line in result.out.splitlines() if "near-duplicate in two splits" in line]
    assert any("0/0.png" in line and "3/2.png" in line for line in lines)
    dmlkit("data", "check", tmp_path / "table.csv", "--run", run).refused("--run RUN needs --threshold SIMILARITY")


@pytest.mark.parametrize("space", [None, EUCLIDEAN], ids=["cosine", "distance"])
def test_equal_embeddings_are_equal_to_the_rounding_of_float32(dmlkit: Cli, tmp_path: Path, space: Any):
    """Their cosine in float64 is 1 - 4e-7 to 1 + 4e-7; those 0.1 degrees apart have 1 - 1.5e-6."""
    units = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    cosines = (units.astype(np.float64) ** 2).sum(1)
    assert cosines.min() < 1 < cosines.max()
    points = np.concatenate([units, units, turned(0, 0.1)])
    source = embeddings_at(tmp_path / "e", points, **({"manifold": space} if space else {}))
    result = dmlkit("duplicates", source, "--threshold", 0 if space else 1)
    assert result.code == 0 and "82 images: 80 of them in 40 groups of near-duplicates" in result.out, result.out


def test_a_source_takes_the_options_of_its_kind(run: Path, dmlkit: Cli, tmp_path: Path):
    stored, config = tmp_path / "stored", RunFolder(run).recipe().dataset
    dmlkit("embed", run, "--split", "test", "-o", stored, "--device", "cpu").ok()
    train, test = (len(config.build(split)) for split in ("train", "test"))
    assert train != test
    options = ("--threshold", 0.99, "--split", "train", "--device", "cpu")
    for sides, sizes in (((run, stored), (train, test)), ((stored, run), (test, train)), ((run, run), (train, train))):
        found = re.findall(r"of (\d+) images in a, \d+ of (\d+) in b", dmlkit("duplicates", *sides, *options).ok().out)
        assert [tuple(map(int, counts)) for counts in found] == [sizes]
    dmlkit("duplicates", stored, stored, *options).refused("--split train: applies to a run")


def test_a_threshold_that_nothing_reaches_is_refused_before_images_are_embedded(
    run: Path, dmlkit: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trees.birds(tmp_path / "photos", ("crow", "dove"), 2)
    monkeypatch.setattr("dmlkit.identify.duplicates.embedded_points", None)
    words = ("data", "check", tmp_path / "photos", "--run", run, "--threshold", 2, "--device", "cpu")
    dmlkit(*words).refused("--threshold 2: expected at most 1")
