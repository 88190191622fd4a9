"""``dmlkit report-bug``: what it prints fits the form for bugs, and names nobody and no place."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, TINY_RECIPE, Cli

PRIVATE = """\
# of Ada's birds
dataset: {name: table, file: /home/ada/secret birds/list.csv, columns: {label: wing_of_eve}, levels: [clan]}
backbone: {name: timm, model: vit_small_patch14_dinov2.lvd142m}
loss: {name: proxy_anchor, margin: 0.25}
metrics: [recall@1, map@r]
"""
WORDS = ("ada", "secret", "birds", "wing_of_eve", "clan", "list.csv")


def sections_of(text: str) -> dict[str, str]:
    parts = ("\n" + text).split("\n# ")[1:]
    return {title: body.strip() for title, _, body in (part.partition("\n") for part in parts)}


def test_its_parts_are_fields_of_the_form(tiny_recipe: Path, dmlkit: Cli):
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text("utf-8"))
    labels = [part["attributes"]["label"] for part in form["body"]]
    sections = sections_of(dmlkit("report-bug", tiny_recipe).out)
    assert len(sections) == 3 and all(any(label.startswith(title) for label in labels) for title in sections)
    assert sections["Output of dmlkit --version"].startswith(dmlkit("--version").out.strip())
    assert "torch 2." in sections["Output of dmlkit --version"]
    assert yaml.safe_load(sections["The recipe"]) == yaml.safe_load(TINY_RECIPE)  # nothing of it is private
    assert "# The recipe\nnone" in dmlkit("report-bug").out


def test_paths_and_names_are_hidden_and_names_of_dmlkit_are_not(tmp_path: Path, dmlkit: Cli):
    folder = tmp_path / "ada"
    folder.mkdir()
    (folder / "birds.yaml").write_text(PRIVATE)
    result = dmlkit("report-bug", folder / "birds.yaml")
    assert result.code == 0 and [word for word in (*WORDS, str(tmp_path)) if word in result.out] == []
    recipe = yaml.safe_load(sections_of(result.out)["The recipe"])
    assert recipe["dataset"] == {"name": "table", "file": "...", "columns": {"label": "..."}, "levels": ["..."]}
    assert recipe["loss"] == {"name": "proxy_anchor", "margin": 0.25}
    assert recipe["backbone"]["model"] == "vit_small_patch14_dinov2.lvd142m"
    assert recipe["metrics"] == ["recall@1", "map@r"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "loss: {name: triplet, margn: 0.2}\ndataset: {name: folder, root: /home/ada/birds}\n",
            ":1: loss.margn: unknown",
        ),
        ("loss: {name: triplet\ndataset: {root: /home/ada/birds}\n", "...:1: not valid YAML"),
        ("dataset: {name: folder, root: /home/ada/birds, split: ada}\nloss: {name: triplet}", "dataset.split"),
    ],
)
def test_the_first_error_is_that_of_the_recipe_without_its_path(text: str, said: str, tmp_path: Path, dmlkit: Cli):
    (tmp_path / "ada.yaml").write_text(text)
    result = dmlkit("report-bug", tmp_path / "ada.yaml")
    assert result.code == 0 and said in sections_of(result.out)["The first line of the error"]
    assert "ada" not in result.out and "birds" not in result.out and str(tmp_path) not in result.out


@pytest.mark.slow
def test_a_run_is_reported_by_its_recipe(tmp_path: Path, trained_once: Callable[..., Path], dmlkit: Cli):
    result = dmlkit("report-bug", trained_once(tmp_path / "hedwig"))
    assert result.code == 0 and "name: proxy_anchor" in result.out and "hedwig" not in result.out
    assert dmlkit("report-bug", tmp_path / "hedwig").err.startswith("error: ")  # no run
