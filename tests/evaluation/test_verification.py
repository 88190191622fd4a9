"""Same or not, by the threshold of a run, against the similarity of the images' embeddings; and files of pairs."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from dmlkit.cli.console import percent
from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation import verification
from dmlkit.evaluation.calibration import calibrate_run
from dmlkit.evaluation.verification import ImagePair, JudgedPair, correctness, read_pairs
from dmlkit.run_folder.threshold import Threshold
from tests.conftest import csv_rows, refuses


@pytest.fixture(scope="module")
def photos(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated run, and four images of its test classes, two of each class, beside one that is broken."""
    from dmlkit.run_folder.folder import RunFolder

    folder = tmp_path_factory.mktemp("photos")
    run = Path(shutil.copytree(trained_run, folder / "run"))
    calibrate_run(run, far=0.1)
    dataset = RunFolder(run).recipe().dataset.build("test")
    for name, index in (("a1", 0), ("a2", 1), ("b1", 6), ("b2", 7)):
        Image.fromarray(dataset.sample(index).permute(1, 2, 0).numpy()).save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes(b"no image")
    (folder / "pairs.csv").write_text(
        "a,b,same\na1.png,a2.png,1\na1.png,b1.png,0\nb1.png,broken.png,0\nb1.png,b2.png,1\na2.png,a2.png,1\n"
    )
    return folder


def test_pairs_of_a_file_against_embeddings(dmlkit, photos: Path, tmp_path: Path):
    report = dmlkit("verify", photos / "run", photos / "pairs.csv", "--json", "-o", tmp_path / "o.csv").json()
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a1", "a2", "b1", "b2"):
        shutil.copy(photos / f"{name}.png", images)
    assert dmlkit("embed", photos / "run", images, "-o", tmp_path / "e").code == 0
    a1, a2, b1, b2 = np.load(tmp_path / "e" / "embeddings.npy").astype(np.float64)
    expected = [a1 @ a2, a1 @ b1, None, b1 @ b2, 1.0]
    threshold = json.loads((photos / "run" / "threshold.json").read_text())["threshold"]
    for pair, score in zip(report["pairs"], expected, strict=True):
        assert pair["score"] == (None if score is None else pytest.approx(score, abs=1e-6))
        assert pair["same"] == (None if score is None else bool(pair["score"] >= threshold))
    verdicts, stored = [pair["same"] for pair in report["pairs"]], Threshold.read(photos / "run" / "threshold.json")
    assert stored.probability is not None and report["prior"] == 0.5
    for pair in report["pairs"]:
        logit = stored.probability.slope * (pair["score"] or 0.0) + stored.probability.offset
        assert pair["probability"] == (None if pair["score"] is None else pytest.approx(1 / (1 + np.exp(-logit))))
    assert report["correctness"]["frr"] == pytest.approx(1 - np.mean([verdicts[0], verdicts[3], verdicts[4]]))
    assert report["correctness"]["far"] == float(verdicts[1])
    assert len(report["skipped"]) == 1 and "broken.png" in report["skipped"][0]
    rows = csv_rows(tmp_path / "o.csv")
    assert [row["verdict"] for row in rows][2] == "not read" and rows[0]["known"] == "same"
    assert rows[2]["probability"] == "" and float(rows[0]["probability"]) == report["pairs"][0]["probability"]
    again = dmlkit("verify", photos / "run", photos / "pairs.csv", "-o", tmp_path / "o.csv")
    assert again.code == 0 and "1 image could not be read; 1 pair without a verdict" in again.out
    assert "over 3 same-class and 1 different-class pairs" in again.out


def test_the_verdict_on_two_images_comes_first(dmlkit, photos: Path, monkeypatch: pytest.MonkeyPatch):
    stored, seen = json.loads((photos / "run" / "threshold.json").read_text()), set[str]()
    threshold, rate = stored["threshold"], f"false accept rate {stored['far']:g}"
    for other in ("a1", "a2", "b1", "b2"):
        pair = photos / "a1.png", photos / f"{other}.png"
        result = dmlkit("verify", photos / "run", *pair)
        (found,) = dmlkit("verify", photos / "run", *pair, "--json", "--prior", "0.2").json()["pairs"]
        score, odds = found["score"], found["probability"] / (1 - found["probability"]) * 4  # from 1 : 4 to 1 : 1
        verdict = "same class" if score >= threshold else "different classes"
        said = f"probability of the same class: {percent(odds / (1 + odds))}, at a prior of 0.5"
        assert result.code == 0
        assert result.out == f"{verdict}\ncosine {score:.6g}, threshold {threshold:.6g} ({rate})\n{said}\n"
        seen.add(verdict)
    assert seen == {"same class", "different classes"}
    dmlkit("verify", photos / "run", *pair, "--checkpoint", "last").ok()  # of one epoch: it has the same weights
    monkeypatch.setenv("COLUMNS", "500")  # the columns of text side by side
    table = dmlkit("verify", photos / "run", photos / "pairs.csv").out
    columns = [word.strip() for word in table.splitlines()[2].split("┃")[1:-1]]
    assert columns == ["verdict", "known", "probability", "score", "a", "b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a1.png"], "a1.png: expected two images, or a .csv or .txt file of pairs"),
        (["a1.png", "a2.png", "pairs.csv"], "expected two images, or one file of pairs, got 3 paths"),
        (["a1.png", "a2.png", "--root", "."], "--root .: applies to a file of pairs; remove --root"),
        (["a1.png", "a2.png", "--prior", "1"], "--prior 1: expected a share between 0 and 1"),
        (["a1.png", "broken.png"], "broken.png"),
        (["a1.png", "a2.png", "-o", "a1.png"], "a1.png: expected a name that ends in .csv"),
    ],
)
def test_what_cannot_be_verified(dmlkit, photos: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str):
    monkeypatch.chdir(photos)
    result = dmlkit("verify", "run", *words)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(("second", "warnings"), [(None, 1), (Path("other"), 0)])
def test_a_threshold_of_some_images_is_told_unless_it_is_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: Path | None, warnings: int
):
    def stop(*_: object) -> None:
        raise InterruptedError

    printed: list[str] = []
    trained = SimpleNamespace(fingerprint="x", computation=None, manifold=None)
    monkeypatch.setattr(verification, "load_model", lambda *_: trained)
    monkeypatch.setattr(verification, "threshold_of", lambda *_: SimpleNamespace(where="side=left"))
    monkeypatch.setattr(verification, "warn_once", printed.append)
    for name in ("choose_fusion", "embed_files"):  # what comes next
        monkeypatch.setattr(verification, name, stop)
    with pytest.raises(InterruptedError):
        verification.verify(tmp_path, [], second=second, ranks=start_ranks("cpu"))
    assert len(printed) == warnings


def test_rates_without_one_kind_of_pair():
    pairs = [
        JudgedPair(a="a", b="b", score=s, same=s >= 0.5, known=True, probability=None) for s in (0.4, 0.5, 0.6, 0.7)
    ]
    correct = correctness(pairs)
    assert correct is not None and (correct.accuracy, correct.frr, correct.far) == (0.75, 0.25, None)
    assert correctness([pairs[0].model_copy(update={"known": None})]) is None


def test_tables_with_and_without_answers(tmp_path: Path):
    path = tmp_path / "pairs.csv"
    path.write_text('b,a,same\n"x, y.png",é.png,1\nz.png,/abs/w.png,Different\n', encoding="utf-8")
    folder = str(tmp_path)
    assert read_pairs([path]) == [
        ImagePair(f"{folder}/é.png", f"{folder}/x, y.png", same=True),
        ImagePair("/abs/w.png", f"{folder}/z.png", same=False),
    ]
    path.write_text("A;B;Same\nc00\\x.png;c01\\y.png;1\n", encoding="utf-16")
    assert read_pairs([path]) == [ImagePair(f"{folder}/c00/x.png", f"{folder}/c01/y.png", same=True)]
    path.write_text("\ufeffa,b\nx.png,y.png\n", encoding="utf-8")
    assert read_pairs([path], Path("photos")) == [ImagePair("photos/x.png", "photos/y.png")]


def test_the_file_of_lfw(tmp_path: Path):
    path = tmp_path / "pairs.txt"
    path.write_text("1\t2\nAbel_Pacheco\t1\t4\nAkhmed_Zakayev\t1\tAlan Greenspan\t12\n")
    assert read_pairs([path], Path("lfw")) == [
        ImagePair("lfw/Abel_Pacheco/Abel_Pacheco_0001.jpg", "lfw/Abel_Pacheco/Abel_Pacheco_0004.jpg", same=True),
        ImagePair(
            "lfw/Akhmed_Zakayev/Akhmed_Zakayev_0001.jpg", "lfw/Alan Greenspan/Alan Greenspan_0012.jpg", same=False
        ),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.tsv", b"", "a .csv or .txt file"),
        ("p.csv", b"a,b\n", "this file has no pairs"),
        ("p.csv", b"a,c\nx,y\n", "got the columns a, c; expected a, b"),
        ("p.csv", b"a,b,same,why\nx,y,1,z\n", "got the columns a, b, same, why; expected a, b"),
        ("p.csv", b"a,a,b\nx,y,z\n", "got the columns a, a, b; expected a, b"),
        ("p.csv", b"a,b\nx\n", "p.csv:2: expected 2 cells, a, b"),
        ("p.csv", b"a,b\nx,\n", "p.csv:2: expected 2 cells, a, b"),
        ("p.csv", b"a,b\nx,y,z\n", "p.csv:2: a row has 3 cells, expected 2 (a, b): 'x,y,z'"),
        ("p.csv", b"a,b,same\nx,y,maybe\n", "p.csv:2: same: got 'maybe', expected 1 or 0"),
        ("p.csv", b"a,b\n\xff\xc3\xb6,y\n", "line 2 is not UTF-8"),
        ("p.csv", b"x.png,y.png\n", "has no header: its first line is 'x.png,y.png'"),
        ("p.txt", b"10 300\n", "this file has no pairs"),
        ("p.txt", b"10 300\nAbel 1\n", "p.txt:2: got 'Abel 1', expected NAME 1 2 or NAME 1 OTHER 3"),
        ("p.txt", b"Abel 1 two\n", "p.txt:1: got 'Abel 1 two', expected NAME 1 2"),
    ],
)
def test_what_is_no_file_of_pairs(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).write_bytes(content)
    refuses(re.escape(message), read_pairs, [tmp_path / name])
