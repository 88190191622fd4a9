"""The guides: their code runs, their figures are those of the studies, and the lines they quote are dmlkit's."""

import ast
import json
import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor

from dmlkit.metrics import retrieval_metrics
from dmlkit.recipe.schema import FAMILIES
from tests.conftest import ONE_EPOCH, ROOT
from tests.datasets import trees
from tests.docs.blocks import blocks_of, page, run_blocks
from tests.processes import Forked, run_code
from tests.test_architecture import PACKAGE, tree_of

IN_A_PROCESS = """
import sys
from types import SimpleNamespace
from dmlkit.cli.app import main
from tests.docs.blocks import blocks_of, page, run_blocks

def typed(*arguments):
    sys.argv = ["dmlkit", *arguments]
    try:
        main()
    except SystemExit as ended:
        return SimpleNamespace(code=ended.code or 0, out="", err="")

print(run_blocks(blocks_of(page("guides/adding"), "sh", "yaml", "python"), typed, lambda _: []))
"""


@pytest.mark.slow
def test_the_guide_to_first_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Callable[..., Any]):
    monkeypatch.chdir(tmp_path)
    run_blocks(blocks_of(page("guides/first_recipe"), "sh", "yaml", "python"), dmlkit, lambda _: [])
    assert Path("runs/sharper/summary.json").exists()


TINY = ["transform.size=16", "backbone={name: small_cnn, width: 4}", "embedding_dim=8", "training.epochs=1"]


@pytest.mark.slow
def test_one_hierarchy_from_a_folder_tree_to_h_ap(tmp_path, monkeypatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    for place, path in enumerate(product(("corvids", "gulls"), "ab", "xyzw")):
        for index in range(2):
            trees.photo(Path("photos", *path) / f"{index}.jpg", 2 * place + index)
    tiny = [part for key in [*TINY, "training.workers=0"] for part in ("--set", key)]
    blocks = blocks_of(page("guides/hierarchy"), "sh", "yaml", "python")
    printed = run_blocks(blocks, dmlkit, lambda words: tiny if "birds.yaml" in words else [])
    assert "map@r:family" in printed and "h_ap" in printed and "'recall@1:genus': 1.0" in printed


@pytest.mark.slow
def test_a_tracked_video_with_named_individuals(tmp_path, monkeypatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(ONE_EPOCH)
    assert dmlkit("train", "recipe.yaml", "-o", "runs/tracker").code == 0
    random, photos = np.random.default_rng(0), dict[str, list[Image.Image]]()
    for name in ("red", "lime", "blue", "yellow", "white", "black", "cyan", "magenta"):  # a pet is of one color
        Path("known", name).mkdir(parents=True)
        color = np.array(ImageColor.getrgb(name))
        noisy = (color + random.normal(0, 12, (8, 16, 16, 3))).clip(0, 255).astype(np.uint8)
        photos[name] = [Image.fromarray(photo) for photo in noisy]
        for row, photo in enumerate(photos[name]):
            photo.save(Path("known", name, f"{row}.png"))
    for folder in ("frames", "tracked/labels"):
        Path(folder).mkdir(parents=True)
    shown = {3: "red", 8: "cyan"}  # pets by track
    for number in range(1, 5):  # frames of 100 x 40, which the two cross
        frame, lines = Image.new("RGB", (100, 40), "gray"), list[str]()
        for track, pet in shown.items():
            left, top = (10 * number if track == 3 else 80 - 10 * number), 4 if track == 3 else 22
            frame.paste(photos[pet][number], (left, top))
            lines.append(f"0 {(left + 8) / 100} {(top + 8) / 40} 0.16 0.4 0.9 {track}")
        frame.save(f"frames/clip_{number}.png")
        Path(f"tracked/labels/clip_{number}.txt").write_text("\n".join(lines))
    run_blocks(blocks_of(page("guides/reid"), "sh"), dmlkit, lambda _: [])
    names = Path("labels.txt").read_text().split()
    rows = [line.split(",") for line in Path("clip.txt").read_text().splitlines()]
    assert [(int(row[0]), row[1]) for row in rows] == [
        (number, track) for number in range(1, 5) for track in ("3", "8")
    ]
    assert [names[int(row[7]) - 1] for row in rows] == ["red", "cyan"] * 4


@pytest.mark.heavy
def test_what_the_guide_adds_trains_is_exported_and_keeps_its_contracts(tmp_path: Path):
    """In processes of their own: what a plug-in adds stays in the families."""
    printed = ""
    for text in (IN_A_PROCESS, "import runpy; runpy.run_path('check_mine.py', run_name='__main__')"):
        process = Forked(run_code, str(tmp_path), text)
        output = process.communicate()[0]
        assert process.returncode == 0, output
        printed += output
    assert "(896, 32)" in printed  # rows, and bytes of 8 numbers


def test_both_sides_of_the_guide_from_pml_agree():
    pytest.importorskip("pytorch_metric_learning")
    sides: list[dict[str, object]] = []
    for _, body in blocks_of(page("guides/from_pml"), "python"):
        scope: dict[str, object] = {}
        exec(compile(body, "docs/guides/from_pml.md", "exec"), scope)
        sides.append(scope)
    theirs, ours, their_figures, our_figures = sides
    with torch.no_grad():
        ours["loss"].proxies.copy_(theirs["loss"].proxies)
    points = ours["sphere"].from_features(ours["features"])
    torch.testing.assert_close(
        ours["loss"](points, ours["labels"]), theirs["loss"](theirs["embeddings"], theirs["labels"])
    )
    expected, found = their_figures["figures"], our_figures["figures"]
    assert found["recall@1"] == pytest.approx(expected["precision_at_1"])
    assert found["map@r"] == pytest.approx(expected["mean_average_precision_at_r"])


def test_the_metrics_of_the_guide_from_oml_exist():
    names = re.findall(r"`((?:precision|map)@)k:oml`", page("guides/from_oml"))
    assert names
    points = np.eye(4, dtype=np.float32)[[0, 0, 1, 1]]
    retrieval_metrics(points, [0, 0, 1, 1], metrics=[f"{name}2:oml" for name in names])


def test_a_table_of_oml_is_read_as_the_guide_says(tmp_path, monkeypatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(page("guides/from_oml"), "csv", "yaml", "sh")
    Path("df.csv").write_text(blocks[0].body)
    run_blocks(blocks[1:], dmlkit, lambda _: [])


COLUMNS = {"query", "gallery", "group", "super_class"}  # of tables


@pytest.mark.parametrize("guide", ["from_pml", "from_oml", "which_loss"])
def test_members_and_keys_that_guides_name_exist(guide: str):
    rows = re.findall(r"^\| .* \|$", page(f"guides/{guide}"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[2])}
    members = (member for root in FAMILIES.values() for member in root.variants.items())
    known = {word for name, config in members for word in (name, *config.model_fields)}
    assert len(named) >= 10 and named - known <= COLUMNS


def cells_of(study: str) -> dict[str, list[str]]:
    """R@1 and MAP@R of each loss; bold if it is decided that proxy_anchor differs, or if it is not trained."""
    results = json.loads((ROOT / "docs/results" / study / "results.json").read_text("utf-8"))
    decided = {
        (verdict["than"], verdict["metric"])
        for verdict in results["verdicts"]  # that proxy_anchor is better than each
        if verdict["corrected_verdict"] in ("holds", "does not hold", "not trained")
    }
    cells: dict[str, list[str]] = {}
    for name, variant in results["variants"].items():
        for metric in ("recall@1", "map@r"):
            mean, high = (variant["summary"][metric][key] for key in ("mean", "high"))
            text = f"{mean:.3f} ± {high - mean:.3f}"
            cells.setdefault(name, []).append(f"**{text}**" if (name, metric) in decided else text)
    return cells


def test_the_figures_of_losses_are_those_of_the_studies():
    rows = re.findall(r"^\| `(\w+)` \|((?:[^|]*\|){6})$", page("results"), re.MULTILINE)
    found = {name: [cell.strip() for cell in cells.split("|")[:-1]] for name, cells in rows}
    studies = [cells_of(study) for study in ("which_loss", "which_loss_glyphs", "which_loss_modes")]
    assert found == {name: [cell for one in studies for cell in one[name]] for name in studies[0]}
    assert len(found) == 27


def test_the_figures_of_photos_are_those_of_tuning():
    tuning = page("tuning")
    figures = re.findall(r"^\| [^|`]+ \| (0\.\d+[^|]*?) \| `dmlkit", page("guides/which_loss"), re.MULTILINE)
    assert len(figures) >= 3 and [figure for figure in figures if figure not in tuning] == []


@cache
def texts() -> list[list[str | None]]:
    """Every text in dmlkit's source, in parts: None is what it fills in."""
    found = list[list[str | None]]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                found.append([str(part.value) if isinstance(part, ast.Constant) else None for part in node.values])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append([node.value])
    return found


def templates(lines: str) -> list[re.Pattern[str]]:
    """Every text in dmlkit's source with at least 10 fixed characters, as a pattern with gaps for what it fills in.

    Those with fixed characters that are not in ``lines`` are left out.
    """
    found = list[re.Pattern[str]]()
    for parts in texts():
        fixed = [part for part in parts if part is not None]
        if len("".join(fixed)) >= 10 and all(text in lines for text in fixed):
            found.append(re.compile("".join(".+?" if part is None else re.escape(part) for part in parts)))
    return found


def quoted() -> list[str]:
    return re.findall(r"^    error: (.*)$", page("guides/troubleshooting"), re.MULTILINE)


def test_the_lines_of_troubleshooting_are_in_the_source():
    """Two thirds of a line, at least, are texts of the source with what they fill in; the rest is its place."""
    patterns = templates("\n".join(quoted()))
    for line in quoted():
        spans = [match.span() for pattern in patterns for match in [pattern.search(line)] if match]
        assert len(set[int]().union(*(range(*span) for span in spans))) >= len(line) * 2 / 3, line
    assert len(quoted()) >= 15
