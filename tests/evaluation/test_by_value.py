"""Metrics per value of a column: NumPy loops, planted differences, tables, and mistakes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dmlkit.datasets import TableConfig
from dmlkit.evaluation.by_value import column_table, figures_by_value, read_column
from dmlkit.gallery.sources import open_points
from dmlkit.metrics.statistics import effective_number, holm, part_comparison, tail_of
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.points import in_memory
from tests.conftest import ROOT, TINY_RECIPE, Result, refuses
from tests.datasets import trees


def test_the_difference_against_numpy():
    """Draws of classes as `_resamples` does; Student's t by SciPy."""
    from scipy.stats import t

    generator = torch.Generator().manual_seed(1)
    values, classes = torch.rand(90, generator=generator), torch.randint(0, 12, (90,), generator=generator)
    part = torch.rand(90, generator=generator) < 0.4
    comparison = part_comparison(values, part, classes)
    order = list(dict.fromkeys(classes.tolist()))
    x, y, is_part = values.double().numpy(), classes.numpy(), part.numpy()
    draws = torch.randint(12, (2000, 12), generator=torch.Generator().manual_seed(0)).numpy()
    differences = []
    for draw in draws:
        rows = np.concatenate([np.flatnonzero(y == order[unit]) for unit in draw])
        differences.append(x[rows][is_part[rows]].mean() - x[rows][~is_part[rows]].mean())
    sizes = [[int((is_part == side)[y == code].sum()) for code in order] for side in (True, False)]
    count = min(effective_number(torch.tensor(side).double()) for side in sizes)
    low, high = np.quantile(differences, [tail_of(count), 1 - tail_of(count)])
    assert (comparison.low, comparison.high) == (pytest.approx(low), pytest.approx(high))
    assert comparison.difference == pytest.approx(x[is_part].mean() - x[~is_part].mean())
    error = np.std(differences, ddof=1) * (count / (count - 1)) ** 0.5
    assert comparison.p_value == pytest.approx(2 * t.sf(abs(comparison.difference) / error, count - 1))


def test_without_any_spread_the_p_value_is_0_or_1():
    part, classes = torch.arange(60) % 2 == 0, torch.arange(60) // 6
    assert part_comparison(torch.ones(60), part, classes).p_value == 1
    assert part_comparison(part.double(), part, classes).p_value == 0


def test_the_p_value_is_uniform_without_a_difference():
    """Cameras of 30 classes that share what makes them easy: p <= 0.05 in 5 % of 400 draws."""
    generator, rejected = torch.Generator().manual_seed(0), 0
    classes = torch.arange(30).repeat_interleave(8)
    for _ in range(400):
        ease = torch.rand(30, generator=generator)[classes]
        hits = (torch.rand(240, generator=generator) < ease).double()
        rejected += part_comparison(hits, torch.rand(240, generator=generator) < 0.5, classes).p_value <= 0.05
    assert 8 <= rejected <= 32  # outside with probability 0.003


def test_a_planted_value_is_worst_and_differs():
    generator = torch.Generator().manual_seed(2)
    classes, camera = torch.arange(20).repeat_interleave(15), torch.arange(300) % 3
    hits = (torch.rand(300, generator=generator) < torch.tensor([0.9, 0.9, 0.5])[camera]).double()
    names = [None if row == 7 else f"camera {one}" for row, one in enumerate(camera.tolist())]
    found = figures_by_value({"mrr": hits, "recall@1": hits}, classes, names, "camera")
    assert found.values[0].value == "camera 2" and found.without == 1
    worst = found.values[0].metrics["recall@1"]
    kept = [row for row in range(300) if row != 7 and camera[row] == 2]
    assert worst.mean == pytest.approx(float(hits[kept].mean())) and found.values[0].queries == len(kept)
    assert worst.interval is not None and worst.interval[0] < worst.mean < worst.interval[1]
    assert worst.difference < -0.2 and worst.corrected < 0.01
    order = sorted(found.values, key=lambda one: one.value)
    p_values = [figures.p_value for one in order for figures in one.metrics.values()]
    assert [figures.corrected for one in order for figures in one.metrics.values()] == holm(p_values)


def test_few_classes_have_no_interval():
    found = figures_by_value({"mrr": torch.rand(12)}, torch.arange(12) % 6, ["a", "b"] * 6, "species")
    assert all(value.metrics["mrr"].interval is None and value.metrics["mrr"].p_value == 1 for value in found.values)


def test_images_are_found_in_a_table(tmp_path: Path):
    table = tmp_path / "boxes.csv"
    table.write_text(
        "path,camera,x1,y1,x2,y2\na.jpg,front,0,0,5,5\na.jpg,back,5,0,9,5\nb.jpg,front,,,,\n./c/../c.jpg,,,,,\n"
    )
    images = [f"{tmp_path}/a.jpg (5.0, 0.0, 9.0, 5.0)", f"{tmp_path}/b.jpg", f"{tmp_path}/c.jpg", "other.jpg"]
    assert read_column(images, TableConfig(file=str(table)), "camera") == ["back", "front", None, None]
    for wrong, column, message in (
        ([f"{tmp_path}/a.jpg"], "camera", "boxes of .*a.jpg have different values of camera"),
        (images, "camra", "did you mean 'camera'"),
        (["d.jpg"], "camera", "has none of the 1 evaluated images"),
    ):
        refuses(message, read_column, wrong, TableConfig(file=str(table)), column)
    table.write_text("path,camera\na.jpg,front\n,back\n")
    refuses(
        r"boxes\.csv:3: no path; add it", read_column, [f"{tmp_path}/a.jpg"], TableConfig(file=str(table)), "camera"
    )


@pytest.mark.parametrize(("place", "head"), [("photos", "img,camera"), ("elsewhere", "Image,camera")])
def test_another_table_has_the_names_of_columns_of_the_recipe(place: str, head: str, tmp_path: Path):
    """As far as it has them; its paths may lead from its own folder or from that of the recipe's table."""
    trees.photos(tmp_path / "photos", (f"{number}.jpg" for number in range(2)))
    own = {"name": "table", "file": str(tmp_path / "photos" / "t.csv"), "root": None}
    own["columns"] = {"path": "img", "label": "species", "group": "site"}
    Path(own["file"]).write_text("img,species,site\n0.jpg,fox,a\n1.jpg,owl,b\n")
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "u.csv").write_text(f"{head}\n0.jpg,front\n1.jpg,back\n")
    source = column_table("camera", tmp_path / place / "u.csv", own)
    images = [f"{tmp_path}/photos/{number}.jpg" for number in (1, 0)]
    assert read_column(images, source, "camera") == ["back", "front"]


def test_mistakes():
    hits, classes = {"mrr": torch.ones(3)}, torch.arange(3)
    refuses("--by camera: the only value is 'a'", figures_by_value, hits, classes, ["a", "a", None], "camera")
    refuses("none of the metrics has a value per query", figures_by_value, {}, classes, ["a", "b", "a"], "camera")
    refuses("run is glyphs, which has no columns; name a table", column_table, "camera", None, {"name": "glyphs"})


@pytest.mark.slow
def test_a_run_and_its_embeddings_by_column(tmp_path: Path, dmlkit: Callable[..., Result]):
    run, folder, table = tmp_path / "run", tmp_path / "embeddings", tmp_path / "photos" / "table.csv"
    lines = ["path,label,side"]
    trees.photos(tmp_path / "photos", (f"{row}.jpg" for row in range(72)), side=(16, 16))
    lines += [f"{row}.jpg,class{row % 12:02},{('left', 'right', '')[row // 12 % 3]}" for row in range(72)]
    table.write_text("\n".join(lines))
    recipe = tmp_path / "recipe.yaml"
    first, _, rest = TINY_RECIPE.partition("dataset:")
    recipe.write_text(f"{first}dataset: {{name: table, file: {table}}}\n{rest.partition(chr(10))[2]}")
    words = ("--set", "training.epochs=1", "--set", "training.workers=0", "--device", "cpu")
    dmlkit("train", recipe, "-o", run, *words).ok()
    assert dmlkit("embed", run, "--split", "test", "-o", folder, "--device", "cpu").code == 0
    before = sorted(run.rglob("*"))
    for words in (("eval", run, "--split", "validation"), ("calibrate", run)):
        wrong = dmlkit(*words, "--by", "sides", "--device", "cpu")
        assert wrong.code == 2 and "did you mean 'side'" in wrong.err, wrong.err
    assert sorted(run.rglob("*")) == before  # refused before anything was embedded, measured or written
    report = json.loads(dmlkit("eval", run, "--by", "side", "--json", "--device", "cpu").out)
    by = report["by"]["values"]
    assert [sorted(one["value"] for one in by), report["by"]["without"]] == [["left", "right"], 12]
    again = json.loads(dmlkit("eval", folder, "--by", f"{table}:side", "--metric", "map@r", "--json").out)
    assert [one["queries"] for one in again["by"]["values"]] == [12, 12]
    means = [
        {one["value"]: one["metrics"]["map@r"]["mean"] for one in each["by"]["values"]} for each in (report, again)
    ]
    assert means[0] == pytest.approx(means[1])
    shown = dmlkit("eval", folder, "--by", "side")  # the table of its run
    assert "per side, worst first" in shown.out and "12 queries have no side" in shown.out
    wrong = dmlkit("eval", folder, "--by", "sides")
    assert wrong.code == 2 and "did you mean 'side'" in wrong.err, wrong.err
    other_images_by_side(run, tmp_path, dmlkit)
    pairs_by_side(run, folder, dmlkit)
    answers_by_side(run, table, tmp_path / "gallery", dmlkit)


def other_images_by_side(run: Path, place: Path, dmlkit: Callable[..., Result]) -> None:
    """Embeddings of other images have the sides of the table that was embedded, not of the run's, or none."""
    others = place / "others" / "new.csv"
    rows = [f"{row}.jpg,class{row % 6},{'up' if row < 18 else 'down'}" for row in range(36)]
    trees.photos(others.parent, (f"{row}.jpg" for row in range(36)), first=100, side=(16, 16))
    others.write_text("\n".join(["path,label,side", *rows]))
    for images, folder in ((others, "of_table"), (others.parent, "of_folder")):
        dmlkit("embed", run, images, "-o", place / folder, "--device", "cpu").ok()
    answer = json.loads(dmlkit("eval", place / "of_table", "--by", "side", "--json").out)["by"]
    assert (sorted(value["value"] for value in answer["values"]), answer["without"]) == (["down", "up"], 0)
    assert [value["queries"] for value in answer["values"]] == [18, 18]
    moved = others.rename(others.with_name("moved.csv"))
    for folder, message in (
        ("of_table", "is no longer there; name a table"),
        ("of_folder", "is no table; name a table"),
    ):
        wrong = dmlkit("eval", place / folder, "--by", "side")
        assert wrong.code == 2 and message in wrong.err, wrong.err
    assert dmlkit("eval", place / "of_table", "--by", f"{moved}:side").code == 0


def pairs_by_side(run: Path, folder: Path, dmlkit: Callable[..., Result]) -> None:
    """FAR and FRR of a run per value, by a loop over its test images."""
    words = ("calibrate", run, "--far", "0.3", "--by", "side", "--device", "cpu")
    report = json.loads(dmlkit(*words, "--json").out)
    points = np.load(folder / "embeddings.npy").astype(float)
    items = EmbeddingFolder(folder).items
    labels, rows = np.array(items["label"].to_pylist()), [int(Path(path).stem) for path in items["path"].to_pylist()]
    accepted = points @ points.T >= report["threshold"]
    far: dict[str, list[float]] = {"left": [], "right": []}
    frr: dict[str, list[float]] = {"left": [], "right": []}
    for place, row in enumerate(rows):
        if (side := ("left", "right", "")[row // 12 % 3]) == "":
            continue
        others = np.arange(len(rows)) != place
        far[side].append(accepted[place][labels != labels[place]].mean())
        frr[side].append(1 - accepted[place][others & (labels == labels[place])].mean())
    by = report["by"]["values"]
    for one in by:
        assert one["metrics"]["far"]["mean"] == pytest.approx(np.mean(far[one["value"]]), abs=0.01)  # float32
        assert one["metrics"]["frr"]["mean"] == pytest.approx(np.mean(frr[one["value"]]), abs=0.01)
    assert by[0]["metrics"]["frr"]["mean"] >= by[1]["metrics"]["frr"]["mean"]
    assert dmlkit(*words).out.count("per side, worst first") == 2
    sides = np.array([("left", "right", row)[row // 12 % 3] for row in rows], dtype=object)  # those without are apart
    apart = np.triu(sides[:, None] != sides, 1)
    grouped = dmlkit(*words[:2], "--far", "0.5", "--set", "dataset.columns={group: side}", "--json").json()["test"]
    same = labels[:, None] == labels
    assert (grouped["same"], grouped["different"]) == ((apart & same).sum(), (apart & ~same).sum())
    photos = folder.with_name("photos")
    moved = photos.rename(folder.with_name("moved"))
    again = dmlkit(*words, "--set", f"dataset.file={moved / 'table.csv'}", "--json").json()
    assert moved.rename(photos) and again["by"]["values"] == by


def answers_by_side(run: Path, table: Path, gallery: Path, dmlkit: Callable[..., Result]) -> None:
    """FPIR and FNIR of a gallery per value, by a loop over its images."""
    (flanks := table.with_name("flanks.csv")).write_text(table.read_text().replace("side", "flank"))
    assert dmlkit("gallery", "create", run, flanks, "-o", gallery, "--device", "cpu").code == 0
    columns = ("Flank", f"{table}:side")  # the gallery's own, which the table of the run does not have, and a table's
    own, of_table = (json.loads(dmlkit("eval", gallery, "--by", name, "--json").out)["by"] for name in columns)
    assert own["values"] == of_table["values"] and own["without"] == of_table["without"] == 24
    report = json.loads(
        dmlkit("calibrate", gallery, "--fpir", "0.3", "--by", f"{table}:side", "--json", "--device", "cpu").out
    )
    opened = open_points(gallery)
    x, labels = in_memory(opened).points.double().numpy(), np.array(opened.labels)
    rates: dict[tuple[str, str], list[bool]] = {}
    fit = report["fits"][0]
    trained = set(() if report["is_optimistic"] else report["trained_labels"])
    for place, path in enumerate(opened.paths):
        side = ("left", "right", "")[int(Path(path).stem) // 12 % 3]
        if side == "" or labels[place] in trained:
            continue
        for name, kept in (("fnir", np.arange(len(x)) != place), ("fpir", labels != labels[place])):
            best = {label: (x[kept & (labels == label)] @ x[place]).max() for label in set(labels[kept])}
            guess, second = sorted(best, key=best.__getitem__, reverse=True)[:2]
            logit = fit["margin_slope"] * (best[guess] - best[second]) + fit["score_slope"] * best[guess]
            accepted = 1 / (1 + np.exp(-logit - fit["offset"])) >= fit["threshold"]
            wrong = accepted if name == "fpir" else not (accepted and guess == labels[place])
            rates.setdefault((side, name), []).append(wrong)
    for value in report["by"]["values"]:
        assert value["queries"] == len(rates[value["value"], "fnir"])
        for name in ("fpir", "fnir"):
            assert value["metrics"][name]["mean"] == pytest.approx(np.mean(rates[value["value"], name]), abs=0.09)


def test_embeddings_keep_the_root_and_the_columns_of_their_table(
    tmp_path: Path, dmlkit: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
):
    """Also where they are limited, given by relative paths, and for the names of columns of another table."""
    files = Path(shutil.copytree(ROOT / "tests/fixtures/0.1.0", tmp_path / "files"))
    photos = sorted(path.relative_to(files / "photos") for path in (files / "photos").glob("*/*.png"))
    rows = [f"{path},{path.parent},{('left', 'right')[int(path.stem) % 2]}" for path in photos]
    table, folder = tmp_path / "lists" / "photos.csv", tmp_path / "embeddings"
    table.parent.mkdir()
    table.write_text("\n".join(["shot,letter,side", *rows]))
    monkeypatch.chdir(table.parent)
    words = ("--root", "../files/photos", "--column", "path=shot", "--column", "label=letter", "--device", "cpu")
    dmlkit("embed", files / "run", table.name, *words, "-o", folder).ok()
    counts = {"left": 24, "right": 16}  # of five photos of each of eight letters
    for column, options, expected in (
        ("side", (), counts),
        ("side", ("--where", "label in A, B, C"), {"left": 9, "right": 6}),
        (f"{table}:side", (), counts),
    ):
        answer = dmlkit("eval", folder, "--by", column, *options, "--metric", "recall@1", "--json").json()
        assert {value["value"]: value["queries"] for value in answer["by"]["values"]} == expected
    table.unlink()
    dmlkit("eval", folder, "--by", "my side").refused("is no longer there; name a table", "--by 'FILE:my side'")
