"""Studies as tables for LaTeX: the numbers in them against results.json, names as text, and pdflatex itself."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dmlkit.study.report import read_results
from dmlkit.study.tables import MARK, best_cells, study_tables, write_tables
from dmlkit.study.verdicts import Tuned
from tests.conftest import ROOT
from tests.study.fakes import results_of

STUDIES = ROOT / "docs" / "studies"
SPECIALS = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\char34{}",
    "[": "{[}",
    "*": "{*}",
    "--": "-{}-",
    "---": "-{}-{}-",
    "``": "`{}`",
    "''": "'{}'",
    ",,": ",{},",
    "?`": "?{}`",
    "!`": "!{}`",
    "\n": r"\textbackslash{}n",
    "^^M": r"\textasciicircum{}\textasciicircum{}M",
    r"\input{x}": r"\textbackslash{}input\{x\}",
    "a-b 0.5": "a-b 0.5",
}


def tables_of(text: str) -> list[list[list[str]]]:
    """Read the cells of each tabular, below its head."""
    bodies = re.findall(r"\\midrule\n(.*?)\\bottomrule", text, re.DOTALL)
    return [[line.removesuffix(r" \\").split(" & ") for line in body.splitlines()] for body in bodies]


def numbers_of(cell: str) -> list[float]:
    plain = cell.replace("$-$", "-").replace("to", " ").replace(r"$\pm$", " ")
    return [float(word) for word in re.sub(r"\\textbf\{([^}]*)\}", r"\1", plain).split()]


def test_the_numbers_are_those_of_the_results_and_the_best_are_bold(dmlkit, tmp_path: Path):
    name = "photos_claims"  # which has differences below 0 too
    path, data = tmp_path / "new" / "tables.tex", json.loads((STUDIES / name / "results.json").read_text())
    assert dmlkit("report", STUDIES / name, "-o", path).ok().out.replace("\n", "") == f"wrote {path}"
    assert [file.name for file in path.parent.iterdir()] == ["tables.tex"]
    text = path.read_text()
    assert text.startswith(f"{MARK} ") and text.count(r"\begin{table}") == 2
    figures, verdicts = tables_of(text)
    variants = data["variants"]
    assert [row[0].replace(r"\_", "_") for row in figures] == list(variants)
    for row, variant in zip(figures, variants.values(), strict=True):
        for cell, metric in zip(row[1:], data["metrics"], strict=True):
            summary = variant["summary"][metric]
            assert numbers_of(cell) == pytest.approx([summary["mean"], summary["high"] - summary["mean"]], abs=5.1e-5)
            printed = [round(one["summary"][metric]["mean"], 4) for one in variants.values()]
            assert (r"\textbf{" in cell) == (round(summary["mean"], 4) == max(printed))
    judged = read_results(STUDIES / name).verdicts
    assert len(verdicts) == len(judged) and any(one.difference < 0 for one in judged)
    for row, one in zip(verdicts, judged, strict=True):
        assert row[0].replace(r"\_", "_") == f"{one.better} better than {one.than}"
        assert row[1] == one.metric and row[-1].startswith(one.verdict)
        found = [*numbers_of(row[2]), *numbers_of(row[3])]
        assert found == pytest.approx([one.difference, one.low, one.high], abs=5.1e-5)
    assert not re.search(r"(?<!\$)-[0-9]", text.partition("\n")[2])  # a hyphen is no minus


def test_smaller_errors_are_best_and_a_description_has_no_best():
    """Equal error rates, and a mean that is equal in the printed digits."""
    figures = {
        "a": [{"eer": 0.1, "separated map@r": 0.70001, "density": 2.0, "ari": -0.02}] * 2,
        "b": [{"eer": 0.2, "separated map@r": 0.70002, "density": 3.0, "ari": -0.3}] * 2,
        "c": [{"eer": 0.3, "separated map@r": 0.5, "density": 1.0, "ari": -0.4}] * 2,
    }
    assert best_cells(results_of(figures)) == {(1, 1), (1, 2), (2, 2), (1, 4)}
    (table,) = study_tables("a study_1%", results_of(figures))
    assert r"\textbf{$-$0.0200} $\pm$ 0.0000" in table and r"\label{tab:a-20study_1-25}" in table
    (alone,) = study_tables("one", results_of({name: runs[:1] for name, runs in figures.items()}))
    assert r"& \textbf{$-$0.0200} \\" in alone and r"\pm" not in alone and "Results with one seed." in alone


def test_studies_whose_names_differ_have_labels_that_differ():
    names = ("größe", "grüße", "a b", "a-b", "a%b")
    texts = ["".join(study_tables(name, results_of({"x": [{"map@r": 0.5}]}))) for name in names]
    labels = [label for text in texts for label in re.findall(r"\\label\{(.*?)\}", text)]
    assert len(set(labels)) == len(labels) == len(names) and all(label.isascii() for label in labels)


PLUGIN = """
from typing import ClassVar, Literal
from dmlkit.metrics import MetricConfig

class MissesConfig(MetricConfig, frozen=True):
    \"""Share of queries without an answer.\"""

    name: Literal["misses"] = "misses"
    key: ClassVar[str] = "misses@k"
    definition: ClassVar[str] = "misses@k: queries without an answer"
    smaller_is_better: ClassVar[bool] = True

    def per_query(self, ranking):
        return {}
"""


@pytest.mark.usefixtures("plugin")  # which removes its member
def test_the_figure_of_a_plugin_has_the_best_that_the_plugin_says(dmlkit, tmp_path: Path):
    shutil.copytree(STUDIES / "proxy_gml_parts", tmp_path / "study")
    for path in (tmp_path / "study").glob("*.json"):
        path.write_text(path.read_text().replace('"nmi"', '"misses@1"'))
    (tmp_path / "misses.py").write_text(PLUGIN)
    bold: list[str] = []
    for words in ([], ["--plugin", tmp_path / "misses.py"]):
        dmlkit("report", tmp_path / "study", "-o", tmp_path / "x.tex", *words).ok()
        figures, _ = tables_of((tmp_path / "x.tex").read_text())
        bold += [row[0] for row in figures if "textbf" in row[2]]
    assert bold == ["all", "softmax+regularizer"]


@pytest.mark.parametrize(("text", "escaped"), SPECIALS.items())
def test_what_tex_reads_as_a_command_is_text(text: str, escaped: str):
    (table,) = study_tables("s", results_of({text: [{f"m{text}": 0.5}], "b": [{f"m{text}": 0.4}]}, f"That {text} wins"))
    assert f"\n{escaped} & " in table
    assert f"variant & m{escaped} \\\\\n" in table
    assert rf"\caption{{That {escaped} wins. " in table


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_pdflatex_sets_the_tables(tmp_path: Path):
    studies = {folder.name: read_results(folder) for folder in sorted(STUDIES.iterdir())}
    named = {f"{name} x": [{"map@r": -0.5}] for name in SPECIALS}
    studies["of specials"] = results_of(named, f"Names: {' '.join(SPECIALS)} größer")
    write_tables(studies, tmp_path / "tables.tex", "x ^^M -o tables.tex")
    (tmp_path / "paper.tex").write_text(
        "\\documentclass{article}\n\\usepackage[a4paper,margin=1in]{geometry}\n\\usepackage{array,booktabs}\n"
        "\\begin{document}\n\\input{tables.tex}\n\\end{document}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", check=False)
    assert done.returncode == 0 and "Output written on paper.pdf" in done.stdout, done.stdout[-2000:]
    wide = [float(width) for width in re.findall(r"Overfull \\hbox \(([0-9.]+)pt too wide\)", done.stdout)]
    assert max(wide, default=0) < 6  # points, in 16 cm
    assert "Float too large for page" not in done.stdout


def test_edges_of_grids_are_told_once_below_the_verdicts():
    results = read_results(STUDIES / "photos_network_claims")
    edge = Tuned(chosen="lr=1", validation={}, edge={"optimizer.lr": "highest"})
    judged = [one.model_copy(update={"at_edge": (one.better,)}) for one in results.verdicts]
    variants = {name: one.model_copy(update={"tuned": edge}) for name, one in results.variants.items()}
    _, table = study_tables("x", results.model_copy(update={"verdicts": judged, "variants": variants}))
    assert table.count("the highest tried") == 1 and "tuned at the edge" not in table
    better = list(dict.fromkeys(one.better.replace("_", "\\_") for one in judged))
    assert f"Tuned at the edge: {' and '.join(better)} (optimizer.lr the highest tried)." in table


def test_a_page_is_told_by_a_suffix_in_capitals_too(dmlkit, tmp_path: Path):
    shown = dmlkit("report", STUDIES / "photos_claims", "-o", tmp_path / "RESULTS.MD").ok().out
    text = (tmp_path / "RESULTS.MD").read_text()
    assert "andtheplotsin" in "".join(shown.split()) and (tmp_path / "RESULTS" / "photos_claims.png").is_file()
    assert text.startswith("<!-- Written by: dmlkit report") and r"\begin{table}" not in text
    assert "](RESULTS/photos_claims.png)" in text
