"""``dmlkit why`` on a trained run: against the similarity that search prints."""

from pathlib import Path

import pytest
from PIL import Image

from dmlkit.run_folder.folder import RunFolder
from tests.processes import command_line, run_on_ranks


def test_the_command_explains_the_score_of_search(dmlkit, trained_run: Path, tmp_path: Path):
    dataset = RunFolder(trained_run).recipe().dataset.build("test")
    for name, index in (("a", 0), ("b", 1)):
        Image.fromarray(dataset.sample(index).permute(1, 2, 0).numpy()).save(tmp_path / f"{name}.png")
    pair = tmp_path / "a.png", tmp_path / "b.png"
    report = dmlkit("why", trained_run, *pair, "--json", "-o", tmp_path / "why.svg").json()
    assert dmlkit("embed", trained_run, pair[0], "-o", tmp_path / "one").code == 0
    searched = dmlkit("search", tmp_path / "one", pair[1], "--json").json()
    (score,) = (neighbor["similarity"] for query in searched["queries"] for neighbor in query["neighbors"])
    assert sum(map(sum, report["contributions"])) == pytest.approx(score, abs=1e-5)
    assert "a.png" in (tmp_path / "why.svg").read_text() and report["threshold"] is None
    shown = dmlkit("why", trained_run, *pair, "-n", "2")
    best = max(max(row) for row in report["contributions"])
    assert shown.code == 0 and f"{best:.4f}" in shown.out and "sum to the cosine" in shown.out
    (tmp_path / "c.png").write_bytes(b"no image")
    for bad, message in ((tmp_path, "this is a folder"), (tmp_path / "d.png", "no such file"), ("c", "c.png")):
        dmlkit("why", trained_run, pair[0], tmp_path / "c.png" if bad == "c" else bad).refused(message)


@pytest.mark.heavy
def test_one_of_two_ranks_prints(trained_run: Path, tmp_path: Path):
    image, output = tmp_path / "a.png", tmp_path / "why.png"
    Image.new("RGB", (32, 32), "red").save(image)
    words = ("why", trained_run, image, image, "-o", output, "--device", "cpu")
    printed = run_on_ranks(2, command_line, *map(str, words))
    assert "".join(printed).count(f"written to {output}") == 1 and output.exists()
