"""What is noted of a study before it runs."""

from pathlib import Path

import pytest

from dmlkit.errors import UserError
from dmlkit.study.definition.file import read_study, study_notes
from tests.conftest import Cli
from tests.study.fakes import STUDY, write_study
from tests.study.test_plan import TUNED


def notes(folder: Path, text: str, **classes: int) -> list[str]:
    return study_notes(read_study(write_study(folder, text)), classes)


def test_few_validation_classes_and_few_tuning_seeds_are_noted(tmp_path: Path):
    assert notes(tmp_path, STUDY, small=30, large=41) == []
    assert notes(tmp_path, STUDY, small=10, large=30) == [
        "10 validation classes select checkpoints; use at least 30, or it is mostly chance"
    ]
    assert notes(tmp_path, TUNED) == [
        "values are tuned only with seed 0; use at least 3 seeds, e.g. tune_seeds: [0, 1, 2]"
    ]
    assert notes(tmp_path, TUNED.replace("tune:", "tune_seeds: [4, 5, 6]\ntune:")) == []


def test_samplers_that_differ_are_noted_of_the_variants_that_a_statement_compares(tmp_path: Path):
    text = STUDY.replace("0.3}", "0.3, sampler: {name: class_balanced, images_per_class: 2}}")
    message = "large has another sampler than small, which may cause their difference"
    assert notes(tmp_path, text) == [message]
    assert notes(tmp_path, text[: text.index("expect:")]) == []
    other = "  other: {loss.margin: 0.2}\nexpect:\n- {better: large, than: other, metric: map@r}"
    more = text.replace("expect:", other)
    assert notes(tmp_path, more) == [message.replace("small", "other, small")]


def test_a_dry_run_has_the_notes_and_says_how_many_runs_may_be_added(dmlkit: Cli, tmp_path: Path):
    text = TUNED.replace("tune:", "extend: 2\ntune_seeds: [0, 1]\nmore_seeds: 3\ntune:")
    out = dmlkit("study", write_study(tmp_path, text), "-o", tmp_path / "out", "--dry-run").ok().out
    assert "up to 14 more runs" in out and "12 runs: 12 models" in out  # 2 * 2 * 2 + 3 * 2
    assert "note: 3 validation classes select checkpoints; use at least 30" in out
    assert "note: values are tuned only with seed 0, 1" in out


def test_a_study_that_extends_another_is_the_study_written_out(tmp_path: Path):
    base, own, written = write_study(tmp_path), tmp_path / "own.yaml", tmp_path / "written.yaml"
    own.write_text(f"extends: {base.name}\nclaim: another\nseeds: [4]\nvariants: {{large: {{loss.margin: 0.4}}}}\n")
    text = STUDY.replace("A larger margin is better", "another").replace("[0, 1]", "[4]").replace("0.3", "0.4")
    written.write_text(text)
    assert read_study(own) == read_study(written) != read_study(base)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("extends: none.yaml", "own.yaml:2: extends: {folder}/none.yaml: no such file; expected the path of a study"),
        ("extends: ../../../other.yaml", "is outside {parent}; expected a file inside this folder"),
        ("extends: study.yaml\nseeds: []", "own.yaml:3: seeds:"),
        ("extends: recipe.yaml", "recipe.yaml: got a recipe, expected a study, because {folder}/own.yaml extends it"),
    ],
)
def test_a_study_that_extends_no_study_is_told_by_line(tmp_path: Path, line: str, expected: str):
    base = write_study(tmp_path)
    base.with_name("recipe.yaml").write_text("loss: {name: triplet}\n")
    (own := base.with_name("own.yaml")).write_text(f"claim: another\n{line.replace('study.yaml', base.name)}\n")
    with pytest.raises(UserError) as caught:
        read_study(own)
    assert expected.format(folder=base.parent, parent=base.parent.resolve().parent) in str(caught.value)
