"""How far a study is, against what was written into its folder; durations as options take them."""

import json
from pathlib import Path

import pytest

from dmlkit.files.lock import sole_writer
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.definition.file import read_study
from dmlkit.study.protocol import RealityCheckFigures
from dmlkit.study.record import StudyFailures
from dmlkit.study.status import parse_duration, status_of
from tests.conftest import Killed, refuses
from tests.study.fakes import STUDY, Told, kill_after, rate_of, study, train_by, write_run, write_study
from tests.study.test_plan import TUNED, peak


@pytest.fixture
def killed(dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of 2 variants and 3 seeds with 2 runs that are done, one that failed and one in its second epoch."""

    def tell(recipe: Recipe) -> Told:
        is_large = recipe.loss.margin == 0.3
        return "the loss is not finite" if is_large and not recipe.seed else (0.7 + 0.01 * recipe.seed, 0.6)

    train_by(monkeypatch, tell, kill_after(3))
    with pytest.raises(Killed):
        study(dmlkit, write_study(tmp_path, STUDY.replace("[0, 1]", "[0, 1, 2]")))
    out = tmp_path / "out"
    recipe = RunFolder(out / "runs" / "small" / "seed-0").recipe().model_copy(update={"seed": 1})
    write_run(recipe, out / "runs" / "large" / "seed-1", (0.8, 0.0), epochs=2)
    return out


def test_runs_are_done_failed_stopped_or_waiting(killed: Path):
    status = status_of(killed)
    assert [(run.folder, run.state, run.epochs, run.of_epochs, run.seconds) for run in status.runs] == [
        ("small/seed-0", "done", 3, 3, 30.0),
        ("small/seed-1", "done", 3, 3, 30.0),
        ("small/seed-2", "waiting", 0, 3, 0.0),
        ("large/seed-0", "failed", 0, 3, 0.0),
        ("large/seed-1", "stopped", 2, 3, 20.0),
        ("large/seed-2", "waiting", 0, 3, 0.0),
    ]
    assert [run.score for run in status.runs] == [0.7, 0.71, None, None, pytest.approx(0.79), None]
    assert status.runs[3].reason == "the loss is not finite"
    assert (status.seconds, status.seconds_left) == (80.0, 70.0)  # 10 s an epoch, 7 epochs
    assert not status.is_running


def test_a_run_whose_folder_is_held_is_running(killed: Path):
    with sole_writer(killed, what="a study"), sole_writer(killed / "runs" / "large" / "seed-1", what="a training"):
        status = status_of(killed)
        assert status.is_running and status.runs[4].state == "running"
    (killed / "runs" / "large" / "seed-1" / ".lock").touch()  # as a killed process leaves it
    assert status_of(killed).runs[4].state == "stopped"


def test_a_run_of_the_reality_check_is_done_once_its_models_are_scored_together(dmlkit, tmp_path: Path, monkeypatch):
    text = STUDY.replace("metrics: [map@r]", "protocol: reality_check\noverrides: {dataset.classes: 32}")
    path, out = write_study(tmp_path, text.replace("metric: map@r", "metric: separated map@r")), tmp_path / "out"
    train_by(monkeypatch, lambda _: "", kill_after(0))
    with pytest.raises(Killed):
        study(dmlkit, path)
    recipe, folder = read_study(path).variants[0].candidates[0].recipe, out / "runs" / "small" / "seed-0"
    for fold in range(4):
        write_run(recipe, folder / f"fold-{fold}", (0.7, 0.6))
    StudyFailures(failed={"small/seed-0": "cannot read a photo"}).write(out / "failures.json")
    assert (status_of(out).runs[0].state, status_of(out).runs[0].reason) == ("failed", "cannot read a photo")
    RealityCheckFigures(separated={}, concatenated={}).write(folder / "result.json")
    assert status_of(out).runs[0].state == "done"


def test_the_screen_fits_80_columns_and_reads_only(dmlkit, killed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in killed.rglob("*")}
    result = dmlkit("status", killed).ok()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line]
    assert cells == [
        ["small", "0 1 done, 2 waiting", "0.7050", "1 min 0 s"],
        ["large", "0 failed, 1 stopped (epoch 2 of 3), 2", "0.7900", "20 s"],
        ["", "waiting", "", ""],
    ]
    assert "failed: large/seed-0: the loss is not finite" in result.out
    assert "2 of 6 runs done, 1 stopped, 1 failed; 1 min 20 s of training, about 1 min 10 s left" in result.out
    assert f"no run is in progress; to resume: dmlkit study {killed.parent}/study.yaml" in result.out
    assert max(len(line) for line in result.out.splitlines() if line[:1] in "┏│└") <= 80
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in killed.rglob("*")} == before
    assert dmlkit("status", killed, "--json").json() == status_of(killed).model_dump(mode="json")


def test_while_values_are_tuned_the_later_seeds_wait_for_the_choice(dmlkit, tmp_path: Path, monkeypatch):
    path, out = write_study(tmp_path, TUNED.replace("tune:", "extend: 1\ntune:")), tmp_path / "out"
    train_by(monkeypatch, peak(1.0), kill_after(2))
    with pytest.raises(Killed):
        study(dmlkit, path)
    rows = [line.split("│")[1:3] for line in dmlkit("status", out).out.splitlines() if "│" in line]
    values = ("lr=0.001", "lr=0.002", "lr=0.004", "(not chosen yet)")
    assert [" ".join(row[0].split()) for row in rows] == [
        f"{name} {value}" for name in ("small", "large") for value in values
    ]
    train_by(monkeypatch, peak(1.0))
    assert study(dmlkit, path).code == 0
    status = status_of(out)
    assert status.best == {"small": "lr=0.008", "large": "lr=0.008"}
    assert {run.state for run in status.runs} == {"done"} and len(status.runs) == 10
    text = dmlkit("status", out).out
    assert "small lr=0.008 (best)" in text and "10 of 10 runs done" in text and "left" not in text


def test_the_value_marked_as_best_has_the_best_mean(dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its later seeds, which chose nothing, once counted in its mean alone: 0.55 was marked between 0.6 and 0.7."""
    scores = {1e-3: 0.6, 2e-3: 0.8, 4e-3: 0.7}
    train_by(monkeypatch, lambda recipe: (0.3 if recipe.seed else scores[rate_of(recipe)], 0.5))
    assert study(dmlkit, write_study(tmp_path, TUNED)).code == 0
    rows = [line.split("│") for line in dmlkit("status", tmp_path / "out").out.splitlines() if "│" in line]
    assert [float(row[3]) for row in rows if row[3].strip()] == [*scores.values()] * 2
    assert [row[1].split()[-1] for row in rows if "best" in row[1]] == ["(best)"] * 2


@pytest.mark.parametrize(("score_of_added", "chosen"), [(0.5, "lr=0.001"), (0.9, "lr=0.00025")])
def test_of_equal_values_the_study_chooses_the_one_that_status_marks(
    dmlkit, tmp_path: Path, monkeypatch, score_of_added: float, chosen: str
):
    """The study took the last value below the grid, status the first value of the grid, whose later seed it awaited."""
    path, out = write_study(tmp_path, TUNED.replace("tune:", "extend: 2\ntune:")), tmp_path / "out"
    train_by(monkeypatch, lambda recipe: (0.5 if rate_of(recipe) >= 1e-3 else score_of_added, 0.5))
    assert study(dmlkit, path).code == 0
    results = json.loads((out / "results.json").read_text())
    assert {name: variant["tuned"]["chosen"] for name, variant in results["variants"].items()} == {
        "small": chosen,
        "large": chosen,
    }
    status = status_of(out)
    assert status.best == {"small": chosen, "large": chosen}
    assert {run.state for run in status.runs} == {"done"}


def test_a_damaged_record_is_one_line(dmlkit, killed: Path):
    for name in ("failures.json", "study.json"):
        (killed / name).write_text("{}")
        dmlkit("status", killed).refused(f"{killed / name}: ")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("1h1m1s", 3661), ("45s", 45), ("0h5m", 300)]
)
def test_durations(text: str, seconds: int):
    assert parse_duration(text, "--budget") == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "0h", "0h0m", "-2h", "2", "two hours", "1.5h", "2 h", "m", "30m1h", "٣h", "1h\n"]
)
def test_what_is_no_duration_is_one_line(text: str):
    refuses(r"^--budget .*expected hours, minutes and seconds, above 0, e\.g\. 90m", parse_duration, text, "--budget")


def test_tuned_epochs_are_counted_for_each_value(dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = STUDY.replace("variants:", "tune: {training.epochs: [2, 5]}\nvariants:")
    path = write_study(tmp_path, text)
    train_by(monkeypatch, lambda recipe: (0.5, 0.5), kill_after(2))
    with pytest.raises(Killed):
        study(dmlkit, path)
    runs = {run.folder: (run.epochs, run.of_epochs) for run in status_of(tmp_path / "out").runs if run.folder}
    assert runs == {
        "small/epochs=2/seed-0": (2, 2),
        "small/epochs=2/seed-1": (0, 2),  # which is the first of two equal ones
        "small/epochs=5/seed-0": (5, 5),
        "large/epochs=2/seed-0": (0, 2),
        "large/epochs=5/seed-0": (0, 5),
    }
    assert read_study(path).num_epochs == 2 * (2 + 5 + 2)  # the second seed takes one of the values
