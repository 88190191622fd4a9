"""``dmlkit eval`` and ``dmlkit compare``: intervals, classes, bare arrays, paired tests, and their mistakes."""

import json
import os
import shutil
from dataclasses import replace
from errno import EROFS
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import ExifTags, Image

from dmlkit.cli import evaluate
from dmlkit.cli.compare import notes_of
from dmlkit.cli.console import say
from dmlkit.datasets.base import DatasetConfig
from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation.compare import compare_runs
from dmlkit.evaluation.evaluate import Evaluation
from dmlkit.evaluation.run import Scope, with_scope
from dmlkit.metrics import retrieval_metrics
from dmlkit.metrics.scoring import Scores
from dmlkit.metrics.statistics import bootstrap_intervals, holm, paired_comparison
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.train import train
from tests.conftest import ONE_EPOCH, TINY_RECIPE, csv_rows, refuses
from tests.datasets import trees


@pytest.fixture
def arrays(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 9
    points = rng.standard_normal((9, 8))[labels] + rng.standard_normal((90, 8))
    np.save(tmp_path / "x.npy", points.astype(np.float32))
    np.save(tmp_path / "y.npy", labels)
    np.save(tmp_path / "names.npy", np.array([f"bird {label}" for label in labels]))
    return tmp_path, points.astype(np.float32), labels


def test_only_the_first_rank_prints(dmlkit, tmp_path, monkeypatch):
    for name in ("recipe.yaml", "environment.json"):
        (tmp_path / name).touch()
    monkeypatch.setattr(evaluate, "tell_run", lambda *_: say("embedding: 9 of 99"))
    for is_first, printed in ((True, "embedding: 9 of 99\n"), (False, "")):
        rank = SimpleNamespace(is_global_zero=is_first)
        monkeypatch.setattr("dmlkit.distributed.launch.start_ranks", lambda _, rank=rank: rank)
        assert dmlkit("eval", tmp_path).out == printed


def test_every_rank_measures_the_rates_per_value_of_a_column(dmlkit, tmp_path, monkeypatch):
    """Rank 0 alone would wait for the parts of the others."""
    for name in ("recipe.yaml", "environment.json"):
        (tmp_path / name).touch()
    rank, asked = SimpleNamespace(is_global_zero=False), []
    monkeypatch.setattr("dmlkit.distributed.launch.start_ranks", lambda _: rank)
    monkeypatch.setattr("dmlkit.run_folder.folder.RunFolder.recipe", lambda *_: parse_recipe(TINY_RECIPE, "r.yaml"))
    monkeypatch.setattr("dmlkit.evaluation.by_value.column_table", lambda *_: None)
    monkeypatch.setattr("dmlkit.evaluation.calibration.calibrate_run", lambda *_, **__: None)
    measured = "dmlkit.evaluation.rates_by_value.pair_rates_by_value"
    monkeypatch.setattr(measured, lambda *_, ranks, **__: asked.append(ranks))
    assert dmlkit("calibrate", tmp_path, "--by", "camera").ok().out == ""
    assert asked == [rank]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    (folder / "r.yaml").write_text(TINY_RECIPE.replace("classes: 12", "classes: 24"))
    for name, epochs in (("a", 1), ("b", 4)):
        sets = [f"training.epochs={epochs}", "training.workers=0"]
        train(folder / "r.yaml", folder / name, overrides=sets, device="cpu")
    return folder


@pytest.fixture
def two_runs(trained, tmp_path):
    """Two runs on the same test images, the second trained for longer."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path / "a", tmp_path / "b"


def test_bare_arrays_as_json(dmlkit, arrays):
    folder, points, labels = arrays
    names = ["recall@1", "map@r", "ndcg@10", "nmi"]
    options = [word for name in names for word in ("--metric", name)]
    files = (folder / "x.npy", "--labels", folder / "y.npy")
    report = dmlkit("eval", *files, *options, "--json").json()
    assert report["metrics"] == pytest.approx(retrieval_metrics(points, labels, metrics=names))
    assert (report["queries"], report["classes"]) == (90, 9)
    for name in names[:3]:
        low, high = report["intervals"][name]
        assert low < report["metrics"][name] < high
    worst = [score["metrics"]["ndcg@10"] for score in report["worst_classes"]]
    assert worst == sorted(worst) and len(worst) == 9


def test_arrays_by_distance_with_names_and_a_gallery(dmlkit, arrays):
    folder, points, labels = arrays
    np.save(folder / "q.npy", points[:30])
    np.save(folder / "qn.npy", np.array([f"bird {label}" for label in labels[:30]]))
    result = dmlkit(
        "eval", folder / "q.npy", "--labels", folder / "qn.npy", folder / "x.npy",
        "--labels", folder / "names.npy", "--manifold", "euclidean", "--output", folder / "c.csv", "--json",
    )  # fmt: skip
    assert result.code == 0 and f"wrote {folder / 'c.csv'}\n" in result.err
    assert json.loads(result.out)["metrics"]["recall@1"] == 1.0  # each query is in the gallery, and has no id there
    rows = csv_rows(folder / "c.csv")
    assert {row["class"] for row in rows} == {f"bird {label}" for label in range(9)}
    assert all(row["recall@1"] == "1.0" for row in rows)


def test_numbers_find_labels_of_a_gallery_that_also_has_names(dmlkit, arrays):
    folder, points, labels = arrays
    rng = np.random.default_rng(1)
    items = np.concatenate([points + rng.standard_normal(points.shape), rng.standard_normal((5, 8))]).astype(np.float32)
    names = np.array([*labels.astype(str), *["other"] * 5])
    np.save(folder / "items.npy", items)
    np.save(folder / "items_y.npy", names)
    words = ("--labels", folder / "y.npy", "--labels", folder / "items_y.npy", "--metric", "recall@1", "--json")
    report = dmlkit("eval", folder / "x.npy", folder / "items.npy", *words).json()
    cosines = (points @ items.T) / np.linalg.norm(items, axis=1)
    assert report["metrics"]["recall@1"] == pytest.approx(np.mean(names[cosines.argmax(1)] == labels.astype(str)))


def test_table_of_arrays(dmlkit, arrays):
    folder, *_ = arrays
    result = dmlkit("eval", folder / "x.npy", "--labels", folder / "names.npy", "--metric", "recall@500").ok()
    assert "note: recall@500: only 89 items are ranked; k is clipped to that" in result.out
    assert "worst class: bird" in result.out and "90 queries" in " ".join(result.out.split())  # a long path wraps


def test_a_folder_of_embeddings_equals_the_run(dmlkit, two_runs):
    run, _ = two_runs
    assert dmlkit("embed", run, "--split", "test", "-o", run / "embeddings" / "e", "--device", "cpu").code == 0
    of_run = dmlkit("eval", run, "--json", "--device", "cpu").json()
    names = [word for name in of_run["metrics"] for word in ("--metric", name)]
    of_folder = dmlkit("eval", run / "embeddings" / "e", *names, "--json").json()
    assert of_folder["metrics"] == of_run["metrics"]
    assert of_folder["intervals"] == of_run["intervals"]
    assert of_folder["worst_classes"] == of_run["worst_classes"]


def test_compare_reports_paired_differences(dmlkit, two_runs, tmp_path):
    first, second = two_runs
    result = dmlkit("compare", first, second, "--json", "--device", "cpu").ok()
    a, b = json.loads(result.out)["runs"]
    for name, change in b["difference_to_first"].items():
        assert change["difference"] == pytest.approx(b["metrics"][name] - a["metrics"][name])
        assert change["low"] <= change["difference"] <= change["high"]
        assert 0 < change["p_value"] <= 1
        values = [np.load(run / "evaluations" / "test-best.npz") for run in (first, second)]
        changes, classes = values[1][name] - values[0][name], values[0]["class"]
        assert np.array_equal(classes, values[1]["class"]) and len(np.unique(classes)) == a["classes"] == 12
        # the exact p of an exchange within each class, and the variance of a mean whose classes vary (Liang & Zeger)
        sums = np.array([changes[classes == one].sum() for one in np.unique(classes)])
        exchanged = np.array(list(product((-1, 1), repeat=12))) @ sums
        assert change["p_value"] == pytest.approx(np.mean(np.abs(exchanged) >= abs(sums.sum()) - 1e-9), abs=0.02)
        residuals = sums - changes.mean() * len(changes) / 12
        half = 2.2 * (residuals @ residuals * 12 / 11) ** 0.5 / len(changes)  # Student's t of 11 degrees of freedom
        assert (change["high"] - change["low"]) / 2 == pytest.approx(half, rel=0.15)
    corrected = holm([change["p_value"] for change in b["difference_to_first"].values()])
    assert [change["corrected_p_value"] for change in b["difference_to_first"].values()] == corrected
    assert a["intervals_by"] == b["intervals_by"] == json.loads(result.out)["by"] == "classes"
    for file in ("t.md", "t.tex"):
        assert "difference" in dmlkit("compare", first, second, "-o", tmp_path / file, "--device", "cpu").out
    table = (tmp_path / "t.md").read_text().splitlines()
    assert table[0].startswith("| metric | run | value | 95 % interval | difference |")
    assert len(table) == 2 + 2 * len(a["metrics"]) and "| Holm's p |" in table[0]
    latex = (tmp_path / "t.tex").read_text()
    assert latex.startswith(r"\begin{tabular}") and latex.count(r"\\") == 1 + 2 * len(a["metrics"])


def test_compare_by_queries_draws_queries(dmlkit, two_runs):
    first, second = two_runs
    result = dmlkit("compare", first, second, "--by", "queries", "--json", "--device", "cpu")
    a, b = json.loads(result.out)["runs"]
    values = [np.load(run / "evaluations" / "test-best.npz") for run in (first, second)]
    for name, change in b["difference_to_first"].items():
        alone = paired_comparison(*(torch.from_numpy(value[name]) for value in values), None)
        assert {key: change[key] for key in alone.as_dict()} == alone.as_dict()
        interval = bootstrap_intervals({name: torch.from_numpy(values[0][name])}, None)[name]
        assert a["intervals"][name] == pytest.approx(list(interval.ends or ()), abs=1e-12)
    assert a["intervals_by"] == b["intervals_by"] == json.loads(result.out)["by"] == "queries"
    assert result.err == ""
    output = dmlkit("compare", first, second, "--by", "queries", "--device", "cpu").out
    assert "over 72 queries, as if independent" in output
    assert "over 12 classes (72 queries)" in dmlkit("compare", first, second, "--device", "cpu").out
    stored = json.loads((first / "evaluations" / "test-best.json").read_text())
    assert stored["intervals_by"] == "classes" and stored["intervals"] != a["intervals"]


def test_a_comparison_fits_into_80_columns_with_its_names_apart(dmlkit, two_runs, monkeypatch):
    names = [two_runs[0].parent / f"grocery_tuned_{name}" for name in ("mpa", "isa", "proxy_anchor", "gml", "mpa_2")]
    for place, path in enumerate(names):
        shutil.copytree(two_runs[place % 2], path)
    monkeypatch.setenv("COLUMNS", "80")
    shown = dmlkit("compare", *names, "--device", "cpu").out
    lines = [line for line in shown.splitlines() if line[:1] in "│┃┏┡└"]
    assert max(map(len, lines)) <= 80
    cells = [line.split("│")[2].strip() for line in lines if line.startswith("│ map@r")]
    assert cells[: len(names)] == [path.name.removeprefix("grocery_tuned_") for path in names]
    assert f"mpa: {names[0]}" in "".join(shown.splitlines())


def test_few_classes_are_told(dmlkit, arrays):
    folder, points, labels = arrays
    for name, values in (("q", points[labels < 4]), ("l", labels[labels < 4])):
        np.save(folder / f"{name}.npy", values)
    message = "no intervals over 4 classes"
    gallery = (folder / "x.npy", "--labels", folder / "y.npy", "--metric", "map@r")
    words = ("eval", folder / "q.npy", "--labels", folder / "l.npy", *gallery)
    assert f"note: {message}" in dmlkit(*words).out
    report = dmlkit(*words, "--json").json()
    assert report["intervals"]["map@r"] is None and any(message in note for note in report["notes"])


def test_compare_evaluates_again_when_the_weights_or_the_question_changed(dmlkit, two_runs):
    first, second = two_runs
    reports = [dmlkit("compare", first, second, "--json", "--device", "cpu").json()["runs"][1]]
    path = second / "evaluations" / "test-best.json"
    for key, value in (("weights", "0" * 64), ("metrics", ["recall@3"])):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "question": {**stored["question"], key: value}}))
        reports.append(dmlkit("compare", first, second, "--json", "--device", "cpu").json()["runs"][1])
    assert all(report == reports[0] for report in reports)
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "epoch": 77}))  # still of the same weights: read, not made again
    assert dmlkit("compare", first, second, "--json", "--device", "cpu").json()["runs"][1]["epoch"] == 77


def test_another_question_has_a_file_of_its_own(dmlkit, two_runs):
    run = two_runs[0]
    assert dmlkit("eval", run, "--device", "cpu").code == 0
    own = run / "evaluations" / "test-best.json"
    before = own.read_text()
    for change in (["--set", "transform.size=8"], ["--metric", "recall@1"]):
        assert dmlkit("eval", run, "--device", "cpu", *change).code == 0
    assert own.read_text() == before
    questions = [json.loads(path.read_text())["question"] for path in own.parent.glob("test-best*.json")]
    assert len(questions) == 3 and all(questions.count(question) == 1 for question in questions)
    assert sorted(question["transform"]["size"] for question in questions) == [8, 16, 16]


def test_options_that_do_not_apply_are_refused(dmlkit, two_runs, tmp_path):
    run = two_runs[0]
    assert dmlkit("embed", run, "--split", "test", "-o", tmp_path / "e", "--device", "cpu").code == 0
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32))
    np.save(tmp_path / "y.npy", np.array([0, 0, 1, 1]))
    arrays = (tmp_path / "x.npy", "--labels", tmp_path / "y.npy")
    options = (["--split", "train"], ["--checkpoint", "last"], ["--set", "nonsense"])
    for option in (*options, ["--device", "cuda"]):
        dmlkit("eval", tmp_path / "e", *option).refused(option[0], "applies to a run", "is a folder of embeddings")
        dmlkit("eval", *arrays, *option).refused(option[0], "applies to a run")
    dmlkit("eval", tmp_path / "e", "--manifold", "euclidean").refused(
        "--manifold euclidean: applies to a file of vectors"
    )
    dmlkit("eval", run, "--manifold", "euclidean").refused("--manifold euclidean: applies to a file of vectors")
    dmlkit("eval", run, tmp_path, "--set", "dataset.classes=12").refused("replaces the dataset; use only one of them")
    for key in ("loss.margin", "transform.mean"):
        dmlkit("eval", run, "--set", f"{key}=0.2").refused(f"evaluation does not read {key}")
    for others, message in (
        ([], "at least two runs, got 1"),
        ([run], "got the same run twice"),
        ([tmp_path / "x"], "no run here"),
    ):
        dmlkit("compare", run, *others, "--device", "cpu").refused(message)
    dmlkit("export", tmp_path / "e", "--format", "npz", "--checkpoint", "last").refused(
        "--checkpoint last: applies to a run"
    )
    dmlkit("curvature", tmp_path / "e", "--split", "test").refused("--split test: applies to a run")


@pytest.mark.parametrize(("option", "value"), [("--by", "camera"), ("--metric", "recal@1")])
def test_a_question_without_an_answer_is_refused_before_runs_are_fused(dmlkit, two_runs, monkeypatch, option, value):
    monkeypatch.setattr("dmlkit.evaluation.second.split_embeddings", lambda *_, **__: pytest.fail("embeds"))
    dmlkit("eval", two_runs[0], "--with", two_runs[1], option, value).refused(value)


def test_where_the_report_cannot_be_written_the_figures_are_printed(dmlkit, two_runs, monkeypatch, caplog):
    expected = dmlkit("eval", two_runs[0], "--json").json()["metrics"]

    def fail(*_, **__):
        raise OSError(EROFS, os.strerror(EROFS))

    monkeypatch.setattr("dmlkit.evaluation.run.store", fail)
    result = dmlkit("eval", two_runs[0])
    assert result.code == 0 and f"{expected['map@r']:.4f}" in result.out and "written to" not in result.out
    assert "test-best.json: cannot write this report: Read-only file system; it is not kept" in caplog.text


def test_metrics_without_the_one_that_chose_the_checkpoint_are_measured(dmlkit, two_runs):
    expected = dmlkit("eval", two_runs[0], "--device", "cpu", "--json").json()["metrics"]
    found = dmlkit("eval", two_runs[0], "--device", "cpu", "--json", "--set", "metrics=[recall@1]").json()["metrics"]
    assert len(expected) > 1 and found == {"recall@1": expected["recall@1"]}


def test_compare_tells_that_runs_may_leave_out_other_groups(dmlkit, two_runs):
    assert "own group" not in dmlkit("compare", *two_runs, "--device", "cpu").ok().out
    results = compare_runs(two_runs, ranks=start_ranks("cpu"))
    question = results[1].report.question
    pattern = {"label": r"(?P<label>[0-9]+)_(?P<group>c[0-9])"}
    for keys in ({"group": "day"}, {"columns": {"group": "burst"}}, {"columns": pattern}):
        changed = question.model_copy(update={"dataset": question.dataset | keys})
        other = replace(results[1], report=results[1].report.model_copy(update={"question": changed}))
        notes = [*notes_of([results[0], other], [], with_units=False)]
        assert f"{other.name} and {results[0].name} may leave out different images" in notes[-1]
        assert not [note for note in notes_of([other, other], [], with_units=False) if "own group" in note]


def test_compare_of_other_test_images_gives_no_difference(dmlkit, two_runs, trained_once, tmp_path):
    other = trained_once(tmp_path / "other")
    result = dmlkit("compare", two_runs[0], other, "-o", tmp_path / "t.md", "--device", "cpu")
    assert "was tested on different images" in " ".join(result.out.split())
    assert all(line.endswith("|  |  |  |") for line in (tmp_path / "t.md").read_text().splitlines()[2:])


def test_bad_input_of_eval(dmlkit, arrays):
    folder, points, labels = arrays
    x, y = folder / "x.npy", folder / "y.npy"
    np.save(folder / "q.npy", points[:30])
    np.save(folder / "l.npy", labels[:30])
    for words in ([x], [x, x], [folder / "q.npy", x, "--labels", folder / "l.npy"]):
        dmlkit("eval", *words).refused(f"{x}: none of 90 items has a label; add --labels FILE")
    dmlkit("eval", x, "--labels", y, "--labels", y).refused("2 files for the labels of 1; remove it")
    dmlkit("eval", y, "--labels", y).refused("has shape (90,); expected an array of 2 dimensions")
    np.save(folder / "pickle.npy", np.array([{}, 1]), allow_pickle=True)
    dmlkit("eval", x, "--labels", folder / "pickle.npy").refused("holds Python objects")
    np.save(folder / "short.npy", labels[:50])
    dmlkit("eval", x, "--labels", folder / "short.npy").refused("has 50 labels, but")
    np.save(folder / "float.npy", labels.astype(np.float32))
    dmlkit("eval", x, "--labels", folder / "float.npy").refused("has type float32; expected integers or text")
    np.save(folder / "one.npy", labels * 0)
    dmlkit("eval", x, "--labels", folder / "one.npy").refused("all 90 embeddings are of one class")
    for name in ("x.npy", "copy.npy", "link.npy"):
        if name == "copy.npy":
            np.save(folder / name, points.astype(">f4"))
        elif name == "link.npy":
            (folder / name).symlink_to(x)
        gallery = (folder / name, "--labels", y)
        dmlkit("eval", x, "--labels", y, *gallery).refused(name, "every query would find itself")
    np.save(folder / "text.npy", points.astype(str))
    dmlkit("eval", folder / "text.npy", "--labels", y).refused("text.npy: expected real numbers")
    for text in ([b"\xff", b"b"], ["\ud800", "b"]):
        np.save(folder / "bytes.npy", np.array(text * 45))
        dmlkit("eval", x, "--labels", folder / "bytes.npy").refused("bytes.npy: expected text in UTF-8: ")
    np.save(folder / "zero.npy", points * (np.arange(90) != 7)[:, None])
    dmlkit("eval", folder / "zero.npy", "--labels", y).refused("zero.npy: 1 of 90 rows are zero", "is row 7")
    assert dmlkit("eval", folder / "zero.npy", "--labels", y, "--manifold", "euclidean").code == 0
    points[3, 3] = np.nan
    np.save(folder / "nan.npy", points)
    dmlkit("eval", folder / "nan.npy", "--labels", y).refused("1 of 90 rows hold NaN or infinity", "row 3")
    dmlkit("eval", x, "--labels", y, "--metric", "recal").refused("unknown metric 'recal'", "recall@k")
    dmlkit("eval", x, "--labels", y, "--metric", "nmi", "--output", folder / "c.csv").refused(
        "none of the metrics has a value per query"
    )


def test_arrays_are_compared_by_direction_however_long_their_rows_w11(dmlkit, arrays):
    folder, points, _ = arrays
    np.save(folder / "scaled.npy", points * np.float32(3e19))
    found = [
        dmlkit("eval", folder / name, "--labels", folder / "y.npy", "--json").json()["metrics"]
        for name in ("x.npy", "scaled.npy")
    ]
    assert found[1] == pytest.approx(found[0], abs=1e-3)


def test_a_damaged_evaluation_is_made_again_and_told_t6(dmlkit, two_runs):
    command, folder = ("compare", *two_runs, "--json", "--device", "cpu"), two_runs[1] / "evaluations"
    expected = dmlkit(*command)
    assert expected.code == 0 and "note" not in expected.err
    for name, damage in (
        ("test-best.json", lambda path: path.write_text("{}")),
        ("test-best.npz", lambda path: path.write_bytes(path.read_bytes()[:99])),
        ("test-best.npz", lambda path: save_queries(path, lambda values: values * 0)),
        ("test-best.npz", lambda path: save_queries(path, lambda values: values * np.nan)),
        ("test-best.npz", lambda path: path.unlink()),
    ):
        damage(folder / name)
        result = dmlkit(*command)
        assert result.code == 0 and result.out == expected.out
        assert "".join(result.err.splitlines()).startswith(f"note: {folder / name}: ")
        assert result.err.count("note") == 1 and "evaluated again" in result.err
    assert dmlkit(*command).err == ""


def save_queries(path, change):
    with np.load(path) as stored:
        arrays = {name: change(stored[name]) for name in stored.files}
    with path.open("wb") as file:
        np.savez(file, **arrays)


def test_compare_shows_what_any_run_has_and_names_as_they_are_w16(dmlkit, two_runs, tmp_path):
    names = [tmp_path / "m[a]", tmp_path / "m[b]", tmp_path / "m[red]"]
    asked = (["recall@1", "map@r"], ["map@r", "ndcg@3"], ["ndcg@3"])
    for name, run, metrics in zip(names, (*two_runs, two_runs[0]), asked, strict=True):
        place = shutil.copytree(run, name) / "recipe.yaml"
        recipe = yaml.safe_load(place.read_text())
        recipe["metrics"], recipe["training"]["select_by"] = metrics, metrics[0]
        place.write_text(yaml.safe_dump(recipe))
    for order in (names[:2], names[1::-1]):
        assert "note" not in dmlkit("compare", *order, "-o", tmp_path / "t.md", "--device", "cpu").ok().out
        lines = (tmp_path / "t.md").read_text().replace("\\", "").splitlines()[2:]  # Markdown's brackets are escaped
        cells = [[cell.strip() for cell in line[1:-1].split(" |")] for line in lines]
        found = {(row[0], row[1]): row[2] for row in cells}
        assert found["recall@1", names[1].name] == found["ndcg@3", names[0].name] == "-" and len(cells) == 6
        assert all(value != "-" for (metric, _), value in found.items() if metric == "map@r")
        assert [row[4] != "" for row in cells if row[0] == "map@r"] == [False, True]
    output = " ".join(dmlkit("compare", names[0], names[2], "--device", "cpu").out.split())
    assert "share no per-query metric" in output and "other images" not in output and f"note: {names[2]} and" in output


def test_other_folders_of_the_same_name_have_evaluations_of_their_own_w17(dmlkit, two_runs, tmp_path):
    run = two_runs[0]
    for year in (2023, 2024):
        names = (f"c{label}/{number}.png" for label in range(3) for number in range(3))
        root = trees.photos(tmp_path / str(year) / "photos", names, first=year)
        assert dmlkit("eval", run, root, "--device", "cpu").code == 0
    stored = list((run / "evaluations").glob("all-best*.json"))
    assert len(stored) == 2 and all(path.with_suffix(".npz").exists() for path in stored)
    roots = {json.loads(path.read_text())["question"]["dataset"]["root"] for path in stored}
    assert roots == {str(tmp_path / str(year) / "photos") for year in (2023, 2024)}


def test_items_without_a_label_are_left_out(dmlkit, tmp_path):
    """The same figures as those of the labeled rows alone; labels as numbers, decimals and text are one."""
    random = np.random.default_rng(0)
    points, labels = random.normal(size=(40, 8)).astype(np.float32), random.integers(0, 6, 40)
    given = np.array([f"{label}.0" if row % 2 else f" {label}" for row, label in enumerate(labels)], dtype="U9")
    given[labels == 0] = "Unknown"
    given[labels == 1] = ""
    kept = labels > 1
    reports = []
    for rows, names in ((points, given), (points[kept], labels[kept])):
        np.save(tmp_path / "points.npy", rows)
        np.save(tmp_path / "labels.npy", names)
        metrics = ("--metric", "map@r", "--metric", "auroc_unknown", "--json")
        result = dmlkit("eval", tmp_path / "points.npy", "--labels", tmp_path / "labels.npy", *metrics).ok()
        reports.append(json.loads(result.out)["metrics"])
        assert ("images have no label (empty or 'unknown')" in result.err) == (rows is points)
    assert reports[0] == reports[1]


def test_evaluation_does_not_depend_on_the_threads(arrays):
    _, points, labels = arrays
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    three = retrieval_metrics(points, labels)
    torch.set_num_threads(before)
    assert three == retrieval_metrics(points, labels)


def test_a_table_of_images_is_evaluated_as_the_same_images_in_folders(dmlkit, two_runs, tmp_path):
    photos = trees.birds(tmp_path / "photos", ["ant", "bee", "cat"], 4)
    table = tmp_path / "t.csv"
    rows = [f"photos/{path.parent.name}/{path.name},{path.parent.name}" for path in sorted(photos.glob("*/*"))]
    table.write_text("\n".join(["path,label", *rows]))
    reports = [dmlkit("eval", two_runs[0], images, "--json", "--device", "cpu").json() for images in (photos, table)]
    assert reports[0]["queries"] == 12 and reports[0]["metrics"] == reports[1]["metrics"]
    wrong = dmlkit("eval", two_runs[0], photos / "ant" / "0.jpg", "--device", "cpu")
    assert wrong.code == 2 and "0.jpg: expected a table (.csv" in wrong.err


def test_compare_evaluates_again_what_has_changed_and_reads_what_is_stored_of_data_that_are_gone(
    dmlkit, trained_once, tmp_path
):
    photos = trees.photos(tmp_path / "photos", (f"{row}.jpg" for row in range(72)), side=(16, 16))
    table = photos / "t.csv"
    table.write_text("\n".join(["path,label", *(f"{row}.jpg,class{row % 12:02}" for row in range(72))]))
    start, _, rest = ONE_EPOCH.partition("dataset:")
    run = trained_once(tmp_path / "a", f"{start}dataset: {{name: table, file: {table}}}\n{rest.partition(chr(10))[2]}")
    compare = ("compare", run, shutil.copytree(run, tmp_path / "b"), "--json", "--device", "cpu")
    seen = [dmlkit(*compare).json()]
    table.write_text(table.read_text().replace("6.jpg,class06", "6.jpg,class07", 1))
    seen.append(dmlkit(*compare).json())
    trees.photo(photos / "7.jpg", 99, (16, 16))
    seen.append(dmlkit(*compare).json())
    metrics = [[result["metrics"] for result in answer["runs"]] for answer in seen]
    assert metrics[0] != metrics[1] != metrics[2] and all(one == two for one, two in metrics)
    shutil.rmtree(run / "evaluations")
    assert dmlkit("eval", run, "--json", "--device", "cpu").json()["metrics"] == metrics[2][0]
    for photo in photos.glob("*.jpg"):
        photo.unlink()
    assert dmlkit(*compare).json() == seen[2]
    table.write_text("nothing\n")
    dmlkit(*compare).refused("t.csv")
    table.unlink()
    assert dmlkit(*compare).json() == seen[2]


def on_other_images(options: str, images: Path) -> DatasetConfig:
    """The dataset that replaces that of a recipe with some options."""
    recipe = parse_recipe(f"dataset: {{{options}}}\nloss: {{name: triplet}}", "recipe.yaml")
    return with_scope(recipe, Scope(images=images)).dataset


@pytest.mark.parametrize("name", ["photos", "t.csv"])
def test_other_images_are_read_by_the_limits_and_groups_of_the_run(name: str, tmp_path: Path):
    rows = list[str]()
    for row, path in enumerate(("ant/0.jpg", "ant/1.jpg", "bee/0.jpg", "bee/1.jpg")):
        day, data = f"2026-05-0{1 + row // 3}", Image.Exif()
        data[ExifTags.IFD.Exif] = {36867: f"{day.replace('-', ':')} 12:00:00"}
        (tmp_path / "photos" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30)).save(tmp_path / "photos" / path, exif=data)
        rows.append(f"photos/{path},{path[:3]},{day}")
    (tmp_path / "t.csv").write_text("\n".join(["path,label,time", *rows]))
    images = on_other_images("name: folder, root: none, group: day, max_pixels: 700", tmp_path / name).searched("all")
    assert images.groups is not None and images.groups.tolist() == [0, 0, 1, 2]  # bee was seen on two days
    assert images.sample(0).shape == (3, 15, 20)  # 1,200 pixels, decoded at half the width and height


def test_labels_that_connect_all_other_images_are_evaluated_together(tmp_path: Path):
    trees.photos(tmp_path, (f"{row}.jpg" for row in range(3)))
    (tmp_path / "t.csv").write_text("path,label\n0.jpg,a|b\n1.jpg,b|c\n2.jpg,c|a\n")
    images = on_other_images('name: table, file: none.csv, separator: "|"', tmp_path / "t.csv").searched("all")
    assert sorted(images.class_names) == ["a|b", "a|c", "b|c"] and len(images) == 3


def test_other_images_at_a_name_that_is_not_utf_8_are_refused(tmp_path: Path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xf6we"))
    trees.photo(folder / "ant" / "0.jpg", 0)
    refuses("this name is not UTF-8; rename the file or folder", on_other_images, "name: folder, root: none", folder)


def test_breakdown_against_loops():
    rng = np.random.default_rng(3)
    labels, nearest, values = rng.integers(0, 9, 200), rng.integers(0, 9, 200), rng.random(200)
    names = [f"class {c}" for c in range(9)]
    rows = torch.arange(200)
    scores = Scores({}, {}, {"x": torch.from_numpy(values)}, rows, rows, 0, ())
    rescoring: Any = None
    sides = torch.from_numpy(labels), torch.from_numpy(nearest)
    evaluation = Evaluation(scores, *sides, names, [""] * 200, 9, [], None, rescoring)
    found = evaluation.class_figures()
    assert [one.metrics["x"] for one in found] == pytest.approx([values[labels == c].mean() for c in range(9)])
    assert [(one.name, one.queries) for one in found] == [(names[c], (labels == c).sum()) for c in range(9)]
    pairs = evaluation.confusions()
    assert sum(pair.queries for pair in pairs) == (labels != nearest).sum()
    assert [pair.queries for pair in pairs] == sorted((pair.queries for pair in pairs), reverse=True)
    for pair in pairs:
        own, other = names.index(pair.name), names.index(pair.taken_for)
        assert pair.queries == ((labels == own) & (nearest == other)).sum()
        assert pair.share == pair.queries / (labels == own).sum()
