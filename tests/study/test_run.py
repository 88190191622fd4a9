"""Studies that are cut off by a budget, whose runs fail, that are killed while they tune; nothing is trained here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmlkit.distributed import stopping
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Summary
from dmlkit.study.runs import plan
from dmlkit.study.runs import run_study as study_run
from tests.conftest import Killed
from tests.study.fakes import STUDY, Told, kill_after, margin_of, rate_of, study, train_by, write_study
from tests.study.test_plan import TUNED, noisy, peak

THREE = STUDY.replace("[0, 1]", "[0, 1, 2]")
TIRED = 75


def figures(recipe: Recipe) -> Told:
    is_large = margin_of(recipe) == 0.3
    return 0.5, 0.6 + 0.1 * is_large + 0.01 * recipe.seed * (1 + is_large)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that studies look at."""
    now = [100.0]
    for module in (stopping, study_run):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


def ten_seconds(clock: list[float]) -> Callable[[int], None]:
    """Let a run take as long."""
    return lambda _: clock.append(clock.pop() + 10)


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_a_budget_leaves_the_results_of_what_is_complete_and_the_same_command_goes_on(
    dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
):
    trained = train_by(monkeypatch, figures, ten_seconds(clock))
    path, out = write_study(tmp_path, THREE), tmp_path / "out"
    result = study(dmlkit, path, "--budget", "25s")
    assert result.code == TIRED, result.err
    used_up = "the time of --budget is used up: 3 of 6 runs are finished; rerun the same command to resume"
    assert result.out.splitlines()[-1] == used_up
    assert trained.names(out) == ["small/seed-0", "large/seed-0", "small/seed-1"]
    results = results_of(out)
    assert results["missing"] == {"small": [2], "large": [1, 2]}
    assert [list(variant["runs"]) for variant in results["variants"].values()] == [["0", "1"], ["0"]]
    (judged,) = results["verdicts"]
    assert (judged["verdict"], judged["low"]) == ("not separable at this size", None)  # of one pair
    assert judged["difference"] == pytest.approx(0.1)
    message = "Incomplete; missing: small (seed 2); large (seeds 1, 2)."
    assert message in (out / "results.md").read_text() and message in result.out.replace("\n", " ")
    dmlkit("report", out, "-o", tmp_path / "report.md").refused("this study is not finished; continue it with: dmlkit")

    again = study(dmlkit, path, "--budget", "1h")
    assert again.code == 0 and "is used up" not in again.out, again.err
    assert "3 of 6 runs are already finished" in again.out
    assert trained.names(out)[3:] == ["large/seed-1", "small/seed-2", "large/seed-2"]
    assert results_of(out)["missing"] == {} and "Incomplete" not in (out / "results.md").read_text()
    assert dmlkit("report", out, "-o", tmp_path / "report.md").code == 0


def test_runs_that_are_complete_are_in_the_results_although_the_budget_ends_before_their_turn(
    dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
):
    path, out = write_study(tmp_path, THREE), tmp_path / "out"
    train_by(monkeypatch, lambda recipe: figures(recipe) if recipe.seed else "the loss is not finite")
    study(dmlkit, path).refused("2 runs failed")
    again = train_by(monkeypatch, figures, ten_seconds(clock))
    assert study(dmlkit, path, "--budget", "5s").code == TIRED
    assert again.names(out) == ["small/seed-0"]
    assert results_of(out)["missing"] == {"large": [0]}


def test_a_variant_that_was_added_and_not_trained_yet_is_not_left_out_of_a_report(dmlkit, tmp_path: Path, monkeypatch):
    path, out = write_study(tmp_path), tmp_path / "out"
    train_by(monkeypatch, figures)
    assert study(dmlkit, path).code == 0
    path.write_text(STUDY.replace("expect:", "  middle: {loss.margin: 0.25}\nexpect:"))
    train_by(monkeypatch, figures, kill_after(0))
    with pytest.raises(Killed):
        study(dmlkit, path)
    dmlkit("report", out, "-o", tmp_path / "report.md").refused("this study is not finished; continue it with: dmlkit")


def test_a_budget_that_ends_before_a_variant_is_complete_writes_no_results(dmlkit, tmp_path, monkeypatch, clock):
    train_by(monkeypatch, peak(2e-3), ten_seconds(clock))
    result = study(dmlkit, write_study(tmp_path, TUNED), "--budget", "15s")
    assert result.code == TIRED
    assert result.out.splitlines()[-2:] == [
        "no results: no variant is finished yet",
        "the time of --budget is used up: 2 of 8 runs are finished; rerun the same command to resume",
    ]
    assert not list((tmp_path / "out").glob("results.*"))


def test_a_budget_that_is_no_time_is_one_line(dmlkit, tmp_path: Path):
    study(dmlkit, write_study(tmp_path), "--budget", "90").refused("--budget '90': expected hours")
    assert not (tmp_path / "out").exists()


def test_killed_at_any_run_a_study_that_extends_its_grid_comes_to_the_same(dmlkit, tmp_path: Path, monkeypatch):
    text = TUNED.replace("tune:", "extend: 2\ntune_seeds: [0, 1]\nmore_seeds: 2\ntune:")
    wholes = tmp_path / "whole"
    wholes.mkdir()

    def tell(recipe: Recipe) -> Told:
        return peak(1.0)(recipe)[0], noisy(0.0)(recipe)[1]

    whole = train_by(monkeypatch, tell)
    assert study(dmlkit, write_study(wholes, text), "--set", "training.epochs=1").code == 0
    expected = results_of(wholes / "out")
    assert expected["variants"]["small"]["tuned"]["chosen"] == "lr=0.016"
    assert len(whole.folders) == 12 + 8 + 4  # values of the file, beyond the edge, added seeds
    for number in (1, 17, 22):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = write_study(folder, text)
        first = train_by(monkeypatch, tell, kill_after(number))
        with pytest.raises(Killed):
            study(dmlkit, path, "--set", "training.epochs=1")
        then = train_by(monkeypatch, tell)
        assert study(dmlkit, path, "--set", "training.epochs=1").code == 0
        assert first.names(folder / "out") + then.names(folder / "out") == whole.names(wholes / "out")
        assert {**results_of(folder / "out"), "command": ""} == {**expected, "command": ""}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("the loss is not finite", "the loss is not finite"),
        (OSError(5, "Input/output error", "photos/a.jpg"), "photos/a.jpg: Input/output error"),
    ],
    ids=["user error", "error of the system"],
)
def test_a_run_that_fails_is_told_and_the_others_go_on(fault: Told, reason: str, dmlkit, tmp_path: Path, monkeypatch):
    def tell(recipe: Recipe) -> Told:
        is_broken = recipe.seed == 1 and margin_of(recipe) == 0.3
        return fault if is_broken else figures(recipe)

    path, out = write_study(tmp_path, THREE), tmp_path / "out"
    trained = train_by(monkeypatch, tell)
    result = study(dmlkit, path).refused("1 run failed with the errors above; rerun the same command to try again")
    assert len(trained.folders) == 6 and f"large/seed-1 failed: {reason}" in result.out
    results = results_of(out)
    assert results["missing"] == {"large": [1]} and results["failed"] == {"large/seed-1": reason}
    assert results["verdicts"][0]["difference"] == pytest.approx(0.1 + 0.01)  # seeds 0 and 2
    assert f"Failed: large/seed-1: {reason}" in (out / "results.md").read_text()
    assert json.loads((out / "failures.json").read_text())["failed"] == results["failed"]

    again = train_by(monkeypatch, figures)
    assert study(dmlkit, path).code == 0 and again.names(out) == ["large/seed-1"]
    assert not (out / "failures.json").exists() and results_of(out)["failed"] == {}


def test_a_list_of_failed_runs_that_cannot_be_written_stops_no_other_run(dmlkit, tmp_path: Path, monkeypatch, caplog):
    trained = train_by(monkeypatch, lambda recipe: "not finite" if recipe.seed == 1 else figures(recipe))
    monkeypatch.setattr(study_run.StudyFailures, "write", refuse_to_write)
    result = study(dmlkit, write_study(tmp_path, THREE))
    assert result.code == 2 and "2 runs failed with the errors above" in result.err and len(trained.folders) == 6
    assert "failures.json: cannot write the failed runs: No space left on device" in caplog.text


def refuse_to_write(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_error_of_the_system_before_training_leaves_the_results(dmlkit, tmp_path: Path, monkeypatch):
    train_by(monkeypatch, figures)
    monkeypatch.setattr(study_run, "evaluate_scope", refuse_to_write)
    assert "small: no figures before training: " in study(dmlkit, write_study(tmp_path)).ok().err
    assert results_of(tmp_path / "out")["verdicts"]


def test_a_value_beyond_the_grid_whose_data_are_gone_ends_the_grid(dmlkit, tmp_path: Path, monkeypatch):
    def check(protocol: object, recipe: Recipe) -> Any:
        if rate_of(recipe) > 4e-3:
            raise OSError(5, "Input/output error", "photos/a.jpg")
        return checked(protocol, recipe)

    checked: Any = plan.check_recipe
    monkeypatch.setattr(plan, "check_recipe", check)
    train_by(monkeypatch, peak(1.0))
    result = study(dmlkit, write_study(tmp_path, TUNED.replace("tune:", "extend: 1\ntune:")))
    assert result.code == 0 and "the grid ends here: photos/a.jpg: Input/output error" in result.err


TRAINED = ("lr=0.001", "lr=0.002")


def test_a_value_that_cannot_be_trained_is_not_chosen(dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def tell(recipe: Recipe) -> Told:
        return "not finite" if rate_of(recipe) == 4e-3 else peak(1.0)(recipe)

    train_by(monkeypatch, tell)
    result, out = study(dmlkit, write_study(tmp_path, TUNED)), tmp_path / "out"
    assert result.code == 0 and "Failed: small/lr=0.004/seed-0, large/lr=0.004/seed-0: not finite" in result.out
    scores = {name: Summary.read(out / f"runs/small/{name}/seed-0/summary.json").best_score for name in TRAINED}
    small = results_of(out)["variants"]["small"]
    assert small["tuned"] == {"chosen": "lr=0.002", "validation": scores, "edge": {"optimizer.lr": "highest"}}
    assert list(small["runs"]) == ["0", "1"] and results_of(out)["verdicts"][0]["at_edge"] == ["large", "small"]
    text, tried = (out / "results.md").read_text(), ", ".join(f"{name}: {score:.4f}" for name, score in scores.items())
    assert "Tuned with the first seed on validation classes, with 2 trials per variant:" in text
    assert f"| small | {tried} | lr=0.002; optimizer.lr the highest tried |" in text


def test_a_study_whose_runs_all_failed_is_one_screen_and_no_results(dmlkit, tmp_path: Path, monkeypatch):
    train_by(monkeypatch, lambda recipe: "no photos" if recipe.seed else "the loss is not finite")
    path, out = write_study(tmp_path), tmp_path / "out"
    result = study(dmlkit, path)
    assert result.code == 2 and [line.removeprefix(f"error: {out}: ") for line in result.err.splitlines()] == [
        "no results, since no variant has a complete run",
        "error: small/seed-0, large/seed-0: the loss is not finite",
        "error: small/seed-1, large/seed-1: no photos",
    ]
    assert not list(out.glob("results.*"))


SIX = STUDY.replace("[0, 1]", "[0, 1, 2, 3, 4, 5]")
EIGHT = TUNED.replace("[1e-3, 2e-3, 4e-3]", "[1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 7e-3, 8e-3]")


@pytest.mark.parametrize(
    ("text", "fails", "trained"),
    [
        (SIX, lambda recipe: True, 8),
        (EIGHT, lambda recipe: margin_of(recipe) != 0.3, 17),  # perhaps small cannot be trained, but large can
        (SIX, lambda recipe: recipe.seed > 0, 12),
    ],
    ids=["every run", "one variant", "all but the first runs"],
)
def test_a_study_stops_only_when_all_its_first_runs_fail_for_one_reason(
    text: str, fails, trained: int, dmlkit, tmp_path, monkeypatch
):
    runs = train_by(monkeypatch, lambda recipe: "no photos" if fails(recipe) else figures(recipe))
    result = study(dmlkit, write_study(tmp_path, text))
    assert result.code == 2 and len(runs.folders) == trained
    named = "small/seed-0, large/seed-0, small/seed-1, large/seed-1, small/seed-2"
    stopped = f"error: {named} and 3 more: no photos; no run has succeeded"
    assert result.err.startswith(stopped) == (trained == 8), result.err
    assert result.out.count("no photos") == (1 if trained == 8 else 2)  # and in the list of failures at the end


def test_results_that_were_complete_stay_when_a_run_is_damaged(dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train_by(monkeypatch, figures)
    path, out = write_study(tmp_path), tmp_path / "out"
    assert study(dmlkit, path).code == 0
    before = (out / "results.json").read_bytes()
    (out / "runs" / "large" / "seed-1" / "summary.json").write_text("{")
    assert study(dmlkit, path).code == 2 and (out / "results.json").read_bytes() == before


def test_the_grid_may_be_extended_later_and_nothing_is_trained_twice(dmlkit, tmp_path: Path, monkeypatch):
    path, out = write_study(tmp_path, TUNED), tmp_path / "out"
    trained = train_by(monkeypatch, peak(1.0))
    first = study(dmlkit, path)
    note = "note: small chose lr=0.004: optimizer.lr the highest tried; to try more, stop and increase extend\n"
    assert first.code == 0 and first.out.index("run 6/8") < first.out.index(note) < first.out.index("run 7/8")
    assert note not in study(dmlkit, path).out, "nothing is left to train"
    path.write_text(TUNED.replace("tune:", "extend: 1\ntune:"))
    assert "run 10/10" in study(dmlkit, path).ok().out
    assert trained.names(out)[8:] == [f"{name}/lr=0.008/seed-{seed}" for seed in (0, 1) for name in ("small", "large")]
    assert len(set(trained.folders)) == len(trained.folders)
    path.write_text(TUNED)
    assert "extend: was 1, now 0" in study(dmlkit, path).err
    path.write_text(TUNED.replace("tune:", "extend: 1\nmore_seeds: 2\ntune:"))
    assert "more_seeds: was 0, now 2" in study(dmlkit, path).err


def test_values_may_be_added_to_a_grid_later_but_none_is_dropped(dmlkit, tmp_path: Path, monkeypatch):
    path, out = write_study(tmp_path, TUNED), tmp_path / "out"
    trained = train_by(monkeypatch, peak(8.0))
    assert study(dmlkit, path).code == 0
    first = len(trained.folders)
    assert results_of(out)["variants"]["small"]["tuned"]["chosen"] == "lr=0.004"
    wider = TUNED.replace("4e-3]", "4e-3, 8e-3]")
    path.write_text(wider)
    assert study(dmlkit, path).code == 0
    added = {f"{name}/lr=0.008/seed-{seed}" for seed in (0, 1) for name in ("small", "large")}
    assert set(trained.names(out)[first:]) == added
    assert len(set(trained.folders)) == len(trained.folders)
    assert results_of(out)["variants"]["small"]["tuned"]["chosen"] == "lr=0.008"
    path.write_text(wider.replace("[1e-3, ", "["))
    assert len(study(dmlkit, path).refused("variants.small: no longer tries lr=0.001; ").err) < 400
