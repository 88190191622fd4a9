"""``dmlkit eval`` and ``dmlkit compare``: intervals, classes, bare arrays, paired tests, and their mistakes."""

import csv
import json

import numpy as np
import pytest
import torch

from dmlkit.metrics import retrieval_metrics
from tests.conftest import TINY_RECIPE


@pytest.fixture
def arrays(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 9
    points = rng.standard_normal((9, 8))[labels] + rng.standard_normal((90, 8))
    np.save(tmp_path / "x.npy", points.astype(np.float32))
    np.save(tmp_path / "y.npy", labels)
    np.save(tmp_path / "names.npy", np.array([f"bird {label}" for label in labels]))
    return tmp_path, points.astype(np.float32), labels


@pytest.fixture
def two_runs(dmlkit, tmp_path):
    """Two runs on the same test images, the second trained for longer."""
    (tmp_path / "r.yaml").write_text(TINY_RECIPE.replace("classes: 12", "classes: 24"))
    for name, epochs in (("a", 1), ("b", 4)):
        result = dmlkit(
            "train", tmp_path / "r.yaml", "-o", tmp_path / name, "--set", f"training.epochs={epochs}", "--device", "cpu"
        )
        assert result.code == 0, result.err
    return tmp_path / "a", tmp_path / "b"


def test_bare_arrays_as_json(dmlkit, arrays):
    folder, points, labels = arrays
    names = ["recall@1", "map@r", "ndcg@10", "nmi"]
    options = [word for name in names for word in ("--metric", name)]
    files = ("--embeddings", folder / "x.npy", "--labels", folder / "y.npy")
    result = dmlkit("eval", *files, *options, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["metrics"] == pytest.approx(retrieval_metrics(points, labels, metrics=names))
    assert (report["queries"], report["classes"]) == (90, 9)
    for name in names[:3]:
        low, high = report["intervals"][name]
        assert low < report["metrics"][name] < high
    worst = [score["metrics"]["ndcg@10"] for score in report["worst_classes"]]
    assert worst == sorted(worst) and len(worst) == 9
    assert sum(pair["queries"] for pair in report["confusions"]) <= 90


def test_arrays_by_distance_with_names_and_a_gallery(dmlkit, arrays):
    folder, points, labels = arrays
    np.save(folder / "q.npy", points[:30])
    np.save(folder / "qn.npy", np.array([f"bird {label}" for label in labels[:30]]))
    result = dmlkit(
        "eval", "--embeddings", folder / "q.npy", "--labels", folder / "qn.npy", "--gallery", folder / "x.npy",
        "--gallery-labels", folder / "names.npy", "--manifold", "euclidean", "--per-class", folder / "c.csv", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert json.loads(result.out)["metrics"]["recall@1"] == 1.0  # each query is in the gallery, and has no id there
    rows = list(csv.DictReader((folder / "c.csv").open()))
    assert {row["class"] for row in rows} == {f"bird {label}" for label in range(9)}
    assert all(row["recall@1"] == "1.0" for row in rows)


def test_table_of_arrays(dmlkit, arrays):
    folder, *_ = arrays
    result = dmlkit(
        "eval", "--embeddings", folder / "x.npy", "--labels", folder / "names.npy", "--metric", "recall@500"
    )
    assert result.code == 0, result.err
    assert "note: recall@500: only 89 items are ranked; k is clipped to that" in result.out
    assert "worst: bird" in result.out and "90 queries" in " ".join(result.out.split())  # a long path wraps


def test_a_folder_of_embeddings_equals_the_run(dmlkit, two_runs):
    run, _ = two_runs
    assert dmlkit("embed", run, "--split", "test", "-o", run / "e", "--device", "cpu").code == 0
    of_run = json.loads(dmlkit("eval", run, "--json", "--device", "cpu").out)
    names = [word for name in of_run["metrics"] for word in ("--metric", name)]
    of_folder = json.loads(dmlkit("eval", run / "e", *names, "--json").out)
    assert of_folder["metrics"] == of_run["metrics"]
    assert of_folder["intervals"] == of_run["intervals"]
    assert of_folder["worst_classes"] == of_run["worst_classes"]


def test_compare_reports_paired_differences(dmlkit, two_runs):
    first, second = two_runs
    result = dmlkit("compare", first, second, "--json", "--device", "cpu")
    assert result.code == 0, result.err
    a, b = json.loads(result.out)["runs"]
    for name, change in b["difference_to_first"].items():
        assert change["difference"] == pytest.approx(b["metrics"][name] - a["metrics"][name])
        assert change["low"] <= change["difference"] <= change["high"]
        assert 0 < change["p_value"] <= 1
    assert (first / "evaluations" / "test-best.npz").exists()
    table = dmlkit("compare", first, second, "--markdown", "--device", "cpu").out.splitlines()
    assert table[0].startswith("| metric | run | value | 95 % interval | difference |")
    assert len(table) == 2 + 2 * len(a["metrics"])
    latex = dmlkit("compare", first, second, "--latex", "--device", "cpu").out
    assert latex.startswith(r"\begin{tabular}") and latex.count(r"\\") == 1 + 2 * len(a["metrics"])
    assert "difference" in dmlkit("compare", first, second, "--device", "cpu").out


def test_compare_evaluates_again_when_the_weights_or_the_question_changed(dmlkit, two_runs):
    first, second = two_runs
    reports = [json.loads(dmlkit("compare", first, second, "--json", "--device", "cpu").out)["runs"][1]]
    path = second / "evaluations" / "test-best.json"
    for key, value in (("weights", "0" * 64), ("ties", "pessimistic"), ("metrics", ["recall@3"]), ("split", "all")):
        stored = json.loads(path.read_text())
        path.write_text(json.dumps({**stored, "question": {**stored["question"], key: value}}))
        reports.append(json.loads(dmlkit("compare", first, second, "--json", "--device", "cpu").out)["runs"][1])
    for damaged in ("{", "[]", json.dumps({**stored, "new": 1}), json.dumps({**stored, "format": 1})):
        path.write_text(damaged)
        reports.append(json.loads(dmlkit("compare", first, second, "--json", "--device", "cpu").out)["runs"][1])
    assert all(report == reports[0] for report in reports)
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "epoch": 77}))  # still of the same weights: read, not made again
    assert json.loads(dmlkit("compare", first, second, "--json", "--device", "cpu").out)["runs"][1]["epoch"] == 77


def test_another_question_has_a_file_of_its_own(dmlkit, two_runs):
    run = two_runs[0]
    assert dmlkit("eval", run, "--device", "cpu").code == 0
    own = run / "evaluations" / "test-best.json"
    before = own.read_text()
    for change in (["--set", "transform.size=8"], ["--ties", "pessimistic"], ["--metric", "recall@1"]):
        assert dmlkit("eval", run, "--device", "cpu", *change).code == 0
    assert own.read_text() == before
    questions = [json.loads(path.read_text())["question"] for path in own.parent.glob("test-best*.json")]
    assert len(questions) == 4 and all(questions.count(question) == 1 for question in questions)
    assert sorted(question["transform"]["size"] for question in questions) == [8, 16, 16, 16]


UNREAD = ("loss.margin=0.2", "backbone.width=8", "embedding_dim=4", "manifold={name: euclidean}", "seed=1")
UNREAD += ("transform.mean=[0, 0, 0]", "transform={name: plain}", "head={name: linear}", "sampler.batch_size=4")
UNREAD += ("optimizer.lr=1", "training.epochs=1")


@pytest.mark.parametrize("key", UNREAD)
def test_keys_that_evaluation_does_not_read_are_refused(dmlkit, two_runs, key: str):
    refused(dmlkit("eval", two_runs[0], "--set", key), f"evaluation does not read {key.partition('=')[0]}")


def test_options_that_do_not_apply_are_refused(dmlkit, two_runs, tmp_path):
    run = two_runs[0]
    assert dmlkit("embed", run, "--split", "test", "-o", tmp_path / "e", "--device", "cpu").code == 0
    np.save(tmp_path / "x.npy", np.eye(4, dtype=np.float32))
    np.save(tmp_path / "y.npy", np.array([0, 0, 1, 1]))
    arrays = ("--embeddings", tmp_path / "x.npy", "--labels", tmp_path / "y.npy")
    options = (["--split", "train"], ["--checkpoint", "last"], ["--dataset-root", "nowhere"], ["--set", "nonsense"])
    for option in (*options, ["--device", "cuda"]):
        refused(dmlkit("eval", tmp_path / "e", *option), option[0], "does not apply to a folder of embeddings")
        refused(dmlkit("eval", *arrays, *option), option[0], "does not apply to arrays")
    refused(dmlkit("eval", tmp_path / "e", "--manifold", "euclidean"), "--manifold does not apply")
    refused(dmlkit("eval", run, "--manifold", "euclidean"), "--manifold does not apply to a run")
    refused(dmlkit("eval", run, "--dataset-root", tmp_path, "--set", "dataset.classes=12"), "takes the place of")
    refused(dmlkit("export", tmp_path / "e", "--format", "npz", "--checkpoint", "last"), "--checkpoint does not apply")
    refused(dmlkit("curvature", tmp_path / "e", "--split", "test"), "--split does not apply")


def test_compare_of_other_test_images_gives_no_difference(dmlkit, two_runs, tmp_path):
    (tmp_path / "other.yaml").write_text(TINY_RECIPE)
    assert dmlkit("train", tmp_path / "other.yaml", "-o", tmp_path / "c", "--device", "cpu").code == 0
    result = dmlkit("compare", two_runs[0], tmp_path / "c", "--markdown", "--device", "cpu")
    assert "was tested on other images" in result.err
    assert all(line.endswith("|  |  |  |") for line in result.out.splitlines()[2:])


def refused(result, *parts):
    assert result.code == 2
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


def test_bad_input_of_eval(dmlkit, arrays):
    folder, points, labels = arrays
    x, y = folder / "x.npy", folder / "y.npy"
    refused(dmlkit("eval"), "give a RUN")
    refused(dmlkit("eval", folder, "--embeddings", x, "--labels", y), "give a RUN")
    refused(dmlkit("eval", "--embeddings", x), "expected --embeddings and --labels")
    refused(dmlkit("eval", "--embeddings", x, "--labels", y, "--gallery", x), "both of --gallery or neither")
    refused(dmlkit("eval", "--embeddings", folder / "no.npy", "--labels", y), "no such file")
    refused(dmlkit("eval", "--embeddings", y, "--labels", y), "expected an array of 2 dimensions, got (90,)")
    (folder / "text.npy").write_text("hello")
    refused(dmlkit("eval", "--embeddings", folder / "text.npy", "--labels", y), "cannot read this NumPy array")
    np.save(folder / "pickle.npy", np.array([{}, 1]), allow_pickle=True)
    refused(dmlkit("eval", "--embeddings", x, "--labels", folder / "pickle.npy"), "cannot read this NumPy array")
    np.save(folder / "short.npy", labels[:50])
    refused(dmlkit("eval", "--embeddings", x, "--labels", folder / "short.npy"), "shape (90,), got (50,)")
    np.save(folder / "float.npy", labels.astype(np.float32))
    refused(dmlkit("eval", "--embeddings", x, "--labels", folder / "float.npy"), "integers or strings, got float32")
    np.save(folder / "one.npy", labels * 0)
    refused(dmlkit("eval", "--embeddings", x, "--labels", folder / "one.npy"), "all 90 are of one class")
    points[3, 3] = np.nan
    np.save(folder / "nan.npy", points)
    refused(
        dmlkit("eval", "--embeddings", folder / "nan.npy", "--labels", y), "1 of 90 rows hold NaN or infinity", "row 3"
    )
    refused(dmlkit("eval", "--embeddings", x, "--labels", y, "--metric", "recall@0"), "k must be at least 1")
    refused(dmlkit("eval", "--embeddings", x, "--labels", y, "--metric", "recal"), "'recal' is unknown", "recall@k")
    refused(dmlkit("eval", "--embeddings", x, "--labels", y, "--per-class", folder / "no" / "c.csv"), "no such folder")
    refused(
        dmlkit("eval", "--embeddings", x, "--labels", y, "--metric", "nmi", "--per-class", folder / "c.csv"),
        "none of the metrics is made of single queries",
    )


def test_bad_input_of_compare(dmlkit, tmp_path):
    refused(dmlkit("compare", tmp_path, "--device", "cpu"), "at least two runs, got 1")
    refused(dmlkit("compare", tmp_path, tmp_path, "--device", "cpu"), "a run is given twice")
    refused(dmlkit("compare", tmp_path, tmp_path / "x", "--device", "cpu"), "no run here")
    refused(dmlkit("compare", tmp_path, tmp_path / "x", "--json", "--latex"), "give one of")


def test_unlabelled_embeddings_cannot_be_scored(dmlkit, two_runs, tmp_path):
    from PIL import Image

    run, _ = two_runs
    (tmp_path / "photos").mkdir()
    for index in range(3):
        Image.new("RGB", (20, 20), (index, 0, 0)).save(tmp_path / "photos" / f"{index}.png")
    assert dmlkit("embed", run, tmp_path / "photos", "-o", tmp_path / "e", "--device", "cpu").code == 0
    refused(dmlkit("eval", tmp_path / "e"), "3 of 3 items have no label")


def test_evaluation_does_not_depend_on_the_threads(arrays):
    _, points, labels = arrays
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    three = retrieval_metrics(points, labels)
    torch.set_num_threads(before)
    assert three == retrieval_metrics(points, labels)
