"""Studies: what is trained and reported, against naive computations; stopped, killed and changed in the middle."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.distributed import stopping
from dmlkit.distributed.launch import start_ranks
from dmlkit.distributed.stopping import stop_signals
from dmlkit.recipe.file import dump_recipe, parse_recipe, read_recipe
from dmlkit.run_folder.documents import ClassMetrics
from dmlkit.run_folder.folder import RunFolder
from dmlkit.study.definition.config import Axis, StudyConfig
from dmlkit.study.definition.file import read_study, study_notes
from dmlkit.study.protocol import RealityCheckFigures
from dmlkit.study.report import plot_study
from dmlkit.study.runs import run_study as study_run
from dmlkit.study.runs import workers
from dmlkit.study.runs.plan import check_components
from dmlkit.study.runs.workers import _begin as begin_worker
from dmlkit.study.verdicts import StudyResults
from tests.conftest import ROOT, TINY_RECIPE, draw_pictures
from tests.processes import WARM, Forked, command_line, held_command_line, hold_at_step, wait_until
from tests.study import fakes
from tests.study.fakes import study

STUDY = """\
claim: A larger margin is better
paper: A paper
table: Table 9
recipe: tiny.yaml
overrides: {training.epochs: 2}
seeds: [0, 1]
metrics: [recall@1, ndcg@3]
variants:
  small: {}
  large: {loss.margin: 0.3}
expect:
- {better: large, than: small, metric: recall@1}
"""
SEEDS, NAMES, METRICS = (0, 1), ("small", "large"), ("recall@1", "ndcg@3")


def write_study(folder: Path, text: str = STUDY) -> Path:
    return fakes.write_study(folder, text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the study, run without a break. Tests read it, or copy it."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = ["study", str(write_study(folder)), "-o", str(folder / "out"), "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        draw_pictures(patch, "plot_study")
        get_command(app).main(arguments, standalone_mode=False)
    return folder / "out"


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "out")


def figure(out: Path, run: str, metric: str) -> float:
    return json.loads((out / "runs" / run / "summary.json").read_text())["best"]["test"][metric]


def finished(out: Path) -> dict[str, int]:
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("summary.json")}


def results_of(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def assert_same(out: Path, whole: Path) -> None:
    for key in ("variants", "verdicts"):
        assert results_of(out)[key] == results_of(whole)[key]


def test_the_runs_are_the_recipes_that_the_study_says(whole: Path):
    for name, margin in zip(NAMES, (0.1, 0.3), strict=True):
        for seed in SEEDS:
            run = RunFolder(whole / "runs" / name / f"seed-{seed}")
            recipe = run.recipe()
            assert (recipe.seed, recipe.loss.margin, recipe.training.epochs) == (seed, margin, 2)
            best = json.loads(run.summary_path.read_text())["best"]
            assert best["validation"]["map@r"] == max(row.validation["map@r"] for row in run.read_metrics())
    assert len(finished(whole)) == 4


def over_seeds_and_classes(out: Path, metric: str) -> tuple[float, float, float]:
    """Interval and p-value of large - small, by loops over classes of equal size and SciPy's Student."""
    values: dict[tuple[str, int], list[float]] = {}
    for name in NAMES:
        for seed in SEEDS:
            stored = json.loads((out / "runs" / name / f"seed-{seed}" / "test_classes.json").read_text())
            assert len(set(stored["queries"])) == 1
            values[name, seed] = stored["metrics"][metric]
    changes = [[b - a for a, b in zip(values["small", s], values["large", s], strict=True)] for s in SEEDS]
    seeds, classes = len(changes), len(changes[0])
    rows, columns = [np.mean(row) for row in changes], [np.mean(column) for column in zip(*changes, strict=True)]
    mean = np.mean(rows)
    rest = sum((changes[s][c] - rows[s] - columns[c] + mean) ** 2 for s in range(seeds) for c in range(classes)) / (
        (seeds - 1) * (classes - 1) * seeds * classes
    )
    first, second = np.var(rows, ddof=1) / seeds, np.var(columns, ddof=1) / classes
    variance = max(first + second - rest, min(first, second))
    freedom = variance**2 / (first**2 / (seeds - 1) + second**2 / (classes - 1) + rest**2 / (seeds - 1) / (classes - 1))
    student = stats.t(max(freedom, min(seeds, classes) - 1), scale=variance**0.5)
    return mean + student.ppf(0.025), mean + student.ppf(0.975), 2 * student.sf(abs(mean))


def test_figures_intervals_and_verdict_against_scipy(whole: Path):
    results = results_of(whole)
    text = (whole / "results.md").read_text()
    for metric in METRICS:
        values = {name: [figure(whole, f"{name}/seed-{seed}", metric) for seed in SEEDS] for name in NAMES}
        for name in NAMES:
            low, high = stats.t.interval(0.95, 1, loc=np.mean(values[name]), scale=stats.sem(values[name]))
            expected = {"mean": np.mean(values[name]), "low": low, "high": high}
            assert results["variants"][name]["summary"][metric] == pytest.approx(expected)
            assert f"| {np.mean(values[name]):.4f} ± {(high - low) / 2:.4f} |" in text
        low, high, p_value = over_seeds_and_classes(whole, metric)
        change = results["variants"]["large"]["difference"][metric]
        mean = np.mean(np.subtract(values["large"], values["small"]))
        assert change == pytest.approx({"difference": mean, "low": low, "high": high, "p_value": p_value})
        assert f"{mean:+.4f} ({low:+.4f} .. {high:+.4f}, p {p_value:.4f})" in text
    assert results["variants"]["small"]["difference"] is None
    (judged,) = results["verdicts"]
    change = results["variants"]["large"]["difference"]["recall@1"]
    assert {key: judged[key] for key in change} == change
    wanted = "holds" if change["low"] > 0 else "does not hold" if change["high"] < 0 else "not separable at this size"
    means = [results["variants"][name]["summary"]["recall@1"]["mean"] for name in NAMES]
    floors = [results["variants"][name]["pretrained"]["recall@1"] for name in NAMES]
    below = [name for name, mean, floor in zip(NAMES, means, floors, strict=True) if mean < floor]
    assert judged["not_trained"] == below[::-1]  # the better one first
    assert judged["verdict"] == ("not trained" if judged["not_trained"] else wanted) and judged["verdict"] in text
    assert judged["corrected_p_value"] == judged["p_value"] and judged["at_edge"] == []
    assert text.startswith("# A larger margin is better\n\nFrom: A paper, Table 9.")
    assert (whole / "results.png").read_bytes().startswith(b"\x89PNG")
    seconds = [json.loads(path.read_text())["seconds"] for path in whole.rglob("summary.json")]
    assert results["cost"]["models"] == 4 and results["cost"]["seconds"] == pytest.approx(sum(seconds), abs=0.1)


def test_the_last_epoch_and_the_pretrained_checkpoint_are_reported_too(dmlkit, whole: Path):
    variants, text = results_of(whole)["variants"], (whole / "results.md").read_text()
    for name in NAMES:
        for seed in SEEDS:
            last = json.loads((whole / "runs" / name / f"seed-{seed}" / "summary.json").read_text())["last"]["test"]
            assert variants[name]["last"][str(seed)] == {metric: last[metric] for metric in METRICS}
        words = ("--checkpoint", "pretrained", "--json", "--device", "cpu")
        metrics = dmlkit("eval", whole / "runs" / name / "seed-0", *words).json()["metrics"]
        assert variants[name]["pretrained"] == {metric: metrics[metric] for metric in METRICS}
        mean = np.mean([run["recall@1"] for run in variants[name]["last"].values()])
        assert f"| {mean:.4f} ± " in text and f"| {metrics['recall@1']:.4f} |" in text


def test_a_damaged_score_before_training_is_made_again(dmlkit, whole: Path, copied: Path, tmp_path: Path):
    stored = copied / "runs" / NAMES[0] / "seed-0" / "evaluations" / "test-pretrained.json"
    stored.write_text("{}")
    study(dmlkit, write_study(tmp_path)).ok()
    assert results_of(copied)["variants"] == results_of(whole)["variants"]
    assert json.loads(stored.read_text())["metrics"]["recall@1"]


def test_without_the_figures_of_classes_the_verdicts_are_over_seeds_alone(dmlkit, copied: Path, tmp_path: Path):
    for name, one in StudyResults.read(copied / "results.json").variants.items():
        for seed, run in one.runs.items():
            stored = ClassMetrics.read(RunFolder(copied / "runs" / name / f"seed-{seed}").test_classes_path)
            weighted = np.average(stored.metrics["recall@1"], weights=stored.queries)
            assert run["recall@1"] == pytest.approx(weighted, abs=1e-6) and sum(stored.queries) > len(stored.names)
    assert [judged["classes"] for judged in results_of(copied)["verdicts"]] == [len(stored.names)]
    (copied / "runs" / "large" / "seed-1" / "test_classes.json").unlink()
    study(dmlkit, write_study(tmp_path)).ok()
    assert [judged["classes"] for judged in results_of(copied)["verdicts"]] == [None]


def test_a_finished_study_repeated_does_nothing_and_more_seeds_train_only_those(dmlkit, copied: Path, tmp_path: Path):
    out = copied
    path, before, results = write_study(tmp_path), finished(out), results_of(out)
    assert "run 1/4" not in study(dmlkit, path).ok().out
    assert finished(out) == before
    assert {**results_of(out), "command": ""} == {**results, "command": ""}
    path.write_text(STUDY.replace("[0, 1]", "[0, 1, 5]").replace("A larger", "A much larger"))
    more = study(dmlkit, path)
    assert "4 of 6 runs are already finished" in more.out and "run 5/6  small/seed-5" in more.out
    assert "left" in more.out and "run 6/6  large/seed-5" in more.out
    after = finished(out)
    assert {name: after[name] for name in before} == before and len(after) == 6
    assert len(results_of(out)["variants"]["large"]["runs"]) == 3
    assert (out / "results.md").read_text().startswith("# A much larger")


def test_a_study_takes_the_runs_that_train_wrote(dmlkit, whole: Path, tmp_path: Path):
    path, out = write_study(tmp_path), tmp_path / "out"
    shutil.copytree(whole / "runs", out / "runs")
    shutil.rmtree(out / "runs" / "large" / "seed-1")
    keys = ("seed=1", "loss.margin=0.3", "training.epochs=2", "metrics=[recall@1, ndcg@3, map@r]")
    sets = [word for key in keys for word in ("--set", key)]
    words = ("train", tmp_path / "tiny.yaml", "-o", out / "runs" / "large" / "seed-1", *sets, "--device", "cpu")
    assert dmlkit(*words).code == 0
    before = finished(out)
    study(dmlkit, path).ok()
    assert finished(out) == before and len(before) == 4
    assert results_of(out)["variants"] == results_of(whole)["variants"]


def test_a_run_without_its_empty_folder_of_checkpoints_starts_over(dmlkit, whole: Path, copied: Path, tmp_path: Path):
    """As a copy without empty folders leaves a run that was killed before its first checkpoint."""
    run = copied / "runs" / "small" / "seed-1"
    shutil.rmtree(run / "checkpoints")
    for name in ("summary.json", "metrics.jsonl"):
        (run / name).unlink()
    (copied / "runs" / "large" / "seed-1" / "summary.json").unlink()
    study(dmlkit, write_study(tmp_path)).ok()
    assert len(finished(copied)) == 4 and results_of(copied)["verdicts"] == results_of(whole)["verdicts"]


RUN, ENVIRONMENT = "runs/large/seed-1/summary.json", "runs/large/seed-1/environment.json"


def changed(**values: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut_off(path: Path) -> None:
    path.write_text(path.read_text()[:40])


def without_a_metric(path: Path) -> None:
    data = json.loads(path.read_text())
    del data["best"]["test"]["ndcg@3"]
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        *((name, cut_off, "cannot read this") for name in ("study.json", "results.json", RUN, ENVIRONMENT)),
        (ENVIRONMENT, lambda path: path.unlink(), "is not a dmlkit run"),
        (ENVIRONMENT, changed(packages={}), "torch is"),
        (RUN, changed(best=None), "must both be given"),
        (RUN, changed(selected_by="x"), "must have the metric selected_by"),
        (RUN, without_a_metric, "expected recall@1, ndcg@3; remove its"),
        (RUN.replace("1/", "0/"), changed(best=None, selected_by=None), "has no best checkpoint"),
        ("results.json", changed(metrics=["x"]), "variants or metrics are missing"),
        ("results.json", changed(variants={}), "this study is not finished"),
        ("results.json", changed(reference="x"), "variants or metrics are missing"),
        ("results.json", changed(axis={"key": "a", "values": [1]}), "variants or metrics are missing"),
    ],
)
def test_a_damaged_document_is_one_line_t13(dmlkit, copied: Path, tmp_path: Path, name, damage, message: str):
    damage(copied / name)
    if name != "results.json":
        study(dmlkit, write_study(tmp_path)).refused(message, str((copied / name).parent))
    if name in ("study.json", "results.json"):
        dmlkit("report", copied, "-o", tmp_path / "r.md").refused(message, str(copied))


@pytest.mark.parametrize("value", ["NaN", '"0.5"'])
def test_a_figure_that_is_no_number_is_one_line_t13(dmlkit, copied: Path, tmp_path: Path, value: str):
    """It went into reports as nan, or as the number that a text spells, or ended in the plot."""
    summary, results = next(copied.rglob("summary.json")), copied / "results.json"
    of_report = ("report", copied, "-o", tmp_path / "r.md")
    of_study = ("study", write_study(tmp_path), "-o", copied, "--device", "cpu")
    for path, key, words in (
        (results, "mean", of_report),
        (results, "p_value", of_report),
        (summary, "map@r", of_study),
        (summary, "seconds", of_study),
    ):
        text = path.read_text()
        changed = re.sub(rf'"{key}": [-\d.e]+', f'"{key}": {value}', text, count=1)
        assert changed != text
        path.write_text(changed)
        dmlkit(*words).refused(f"{path}: ")
        path.write_text(text)
    assert not (tmp_path / "r.md").exists()


def test_a_changed_study_is_refused_with_the_difference(dmlkit, whole: Path, tmp_path: Path):
    path = write_study(tmp_path)
    before = finished(whole)

    def refused(text: str, *words: str) -> str:
        path.write_text(text)
        result = dmlkit("study", path, "-o", whole, *words).refused("the study has changed since it started")
        return result.err

    assert "variants.large.loss.margin: was 0.3, now 0.4" in refused(STUDY.replace("0.3}", "0.4}"))
    assert "seeds: was [0, 1], now [1, 0]" in refused(STUDY.replace("[0, 1]", "[1, 0]"))
    assert "seeds: was [0, 1], now [0]" in refused(STUDY.replace("[0, 1]", "[0]"))
    assert "training.epochs: was 2, now 3" in refused(STUDY, "--set", "training.epochs=3")
    assert "expect: was" in refused(STUDY.replace("metric: recall@1", "metric: ndcg@3"))
    assert finished(whole) == before


def test_a_study_without_its_images_starts_when_they_are_named(dmlkit, tmp_path: Path, monkeypatch):
    words = ("study", fakes.write_study(tmp_path), "-o", tmp_path / "out", "--device", "cpu")
    dmlkit(*words, "--set", f"dataset={{name: folder, root: {tmp_path}/no}}").refused("no: no such folder")
    trained = fakes.train_by(monkeypatch, lambda _: (0.5, 0.5))
    dmlkit(*words).ok()
    assert len(trained.folders) == 4


@pytest.mark.parametrize("change", ["images that cannot be read are skipped", "losses have a new key"])
def test_a_study_that_changes_in_what_no_figure_depends_on_goes_on(dmlkit, copied: Path, tmp_path: Path, change: str):
    """As the message on such an image says, and by a version of dmlkit that is newer than the study."""
    path, before, record, words = write_study(tmp_path), finished(copied), copied / "study.json", list[str]()
    if "images" in change:
        words = ["--set", "dataset.on_bad_image=skip"]
    else:
        older = json.loads(record.read_text())
        assert older["variants"]["base"]["loss"].pop("proxy_norm") == 1.0
        record.write_text(json.dumps(older))
    study(dmlkit, path, *words).ok()
    assert finished(copied) == before


def stop(process: Forked, number: signal.Signals) -> str:
    """Send a signal to a process, and return its output after it has stopped."""
    process.send_signal(number)
    output = process.communicate()[0]
    assert process.returncode == 130, output
    return output


def held(step: int, path: Path, out: Path, marks: Path) -> Forked:
    """A process of the study that waits at a step of its runs for what stops or ends it."""
    marks.mkdir()
    words = ("study", str(path), "-o", str(out), "--device", "cpu")
    process = Forked(held_command_line, step, str(marks), *words)
    wait_until(lambda: any(marks.iterdir()), process)
    return process


@pytest.mark.heavy
def test_stopped_then_killed_a_study_goes_on_to_the_same_figures(dmlkit, whole: Path, tmp_path: Path):
    path, out = write_study(tmp_path), tmp_path / "out"
    process = held(4, path, out, tmp_path / "first")  # in the second epoch of the first run
    output = stop(process, signal.SIGINT)
    assert "stopped" in output and "rerun the same command to resume" in output and "Traceback" not in output
    assert not finished(out) and not (out / "results.json").exists()
    assert (out / "runs" / "small" / "seed-0" / "checkpoints" / "last.pt").exists()

    process = held(12, path, out, tmp_path / "second")
    process.kill()
    process.communicate()
    killed = finished(out)
    assert 0 < len(killed) < 4

    assert dmlkit("study", path, "-o", out, "--device", "cpu").code == 0
    complete = finished(out)
    assert {name: complete[name] for name in killed} == killed
    assert_same(out, whole)


@pytest.mark.heavy
def test_a_budget_stops_runs_after_a_checkpoint_and_the_same_command_goes_on(dmlkit, whole, tmp_path, monkeypatch):
    path, out = write_study(tmp_path), tmp_path / "out"
    words = ["study", path, "-o", out, "--device", "cpu", "--workers", 2]
    now = count()  # a second passes at each look
    for module in (stopping, study_run):
        monkeypatch.setattr(module, "monotonic", lambda: next(now))
    result = dmlkit(*words, "--budget", "4s")
    assert result.code == 75 and result.out.splitlines()[-1].startswith("the time of --budget is used up: 0 of 4 "), (
        result
    )
    begun = list(out.rglob("last.pt"))
    assert 2 <= len(begun) < 4 and not finished(out) and not (out / "results.json").exists()
    monkeypatch.undo()
    monkeypatch.setattr(workers, "get_context", lambda _: WARM)  # 10 s faster than interpreters of their own
    assert dmlkit(*words, "--budget", "1h").code == 0
    assert_same(out, whole)


def begin_held(step: int, marks: str, *begin: Any) -> None:
    """What a process of a study does first; it waits at a step of its runs, and begins none before both are there."""
    hold_at_step(step, marks)
    begin_worker(*begin)
    Path(f"{marks}.{os.getpid()}").touch()
    wait_until(lambda: len([*Path(marks).parent.glob(f"{Path(marks).name}.*")]) == 2)


def study_at_once(step: int, marks: str, *words: str) -> None:
    """``dmlkit study --workers 2`` whose processes wait at a step of their runs, and have imported dmlkit."""
    workers.get_context = lambda _: WARM
    forkserver._forkserver.ensure_running = lambda: None
    workers._begin = partial(begin_held, step, marks)
    command_line(*words, "--workers", "2")


def held_at_once(step: int, path: Path, out: Path, marks: Path) -> Forked:
    """Once both of its processes wait."""
    marks.mkdir()
    process = Forked(study_at_once, step, str(marks), "study", str(path), "-o", str(out), "--device", "cpu")
    wait_until(lambda: len(list(marks.iterdir())) == 2, process)
    return process


@pytest.mark.heavy
def test_runs_at_once_stopped_and_killed_give_the_figures_of_runs_one_after_another(dmlkit, whole: Path, tmp_path):
    path, out = write_study(tmp_path), tmp_path / "out"
    process = held_at_once(4, path, out, tmp_path / "first")
    output = stop(process, signal.SIGTERM)
    assert "stopped, each run after a checkpoint" in output and "rerun the same command to resume" in output, output
    assert "Traceback" not in output and not finished(out)
    assert all((out / "runs" / name / "seed-0" / "checkpoints" / "last.pt").exists() for name in NAMES)

    process = held_at_once(6, path, out, tmp_path / "second")  # each in its second run
    process.kill()
    process.communicate()
    numbers = [path.name for path in (tmp_path / "second").iterdir()]
    wait_until(lambda: not any(is_alive(int(number)) for number in numbers))  # they end with their study
    killed = finished(out)
    assert 0 < len(killed) < 4

    again = dmlkit("study", path, "-o", out, "--device", "cpu", "--workers", "2").ok()
    assert "runs are already finished" in again.out and "run 4/4" in again.out
    complete = finished(out)
    assert {name: complete[name] for name in killed} == killed
    assert_same(out, whole)
    command = results_of(whole)["command"].replace(str(whole), str(out)).replace(str(whole.parent), str(tmp_path))
    assert results_of(out)["command"] == command


def is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.heavy
def test_stopped_while_runs_wait_for_a_process_none_of_them_begins(tmp_path: Path):
    text = STUDY.replace("variants:", "tune: {optimizer.lr: [1e-5, 1e-4, 1e-3, 3e-3]}\nvariants:")
    path, out = write_study(tmp_path, text), tmp_path / "out"
    output = stop(held_at_once(1, path, out, tmp_path / "marks"), signal.SIGTERM)
    assert "0 of 10 runs are finished" in output, output
    begun = len(list(out.rglob("recipe.yaml")))
    assert 2 <= begun <= 4  # the pool hands out up to three more than are done


@pytest.mark.heavy
def test_runs_that_fail_beside_others_are_told_and_the_others_go_on(dmlkit, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(workers, "get_context", lambda _: WARM)
    path = write_study(tmp_path, STUDY.replace("{loss.margin: 0.3}", "{optimizer.lr: 1e30}"))
    out = tmp_path / "out"
    result = dmlkit("study", path, "-o", out, "--device", "cpu", "--workers", "2")
    assert result.code == 2 and "2 runs failed with the errors above" in result.err, result.err
    assert re.search(r"large/seed-(.) failed: .*finite(.|\n)*large/seed-. failed: as large/seed-\1 did", result.out)
    assert finished(out).keys() == {f"runs/small/seed-{seed}/summary.json" for seed in SEEDS}
    assert results_of(out)["missing"] == {"large": [0, 1]} and results_of(out)["verdicts"] == []


def break_or_talk(run: workers.Run, protocol: str) -> None:
    """In place of training: an error of the system, a defect of dmlkit, or more to tell than a pipe holds."""
    if run.name == "lost":
        raise OSError(5, "Input/output error", "photos/a.jpg")
    if run.name == "broken":
        raise IndexError("a defect")
    ((_, events),) = workers._workers
    for _ in range(3000):
        events.put((run.name, "step", {"loss": 0.0, "images": 60}))


@pytest.fixture
def at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run two runs at once, by their names in `break_or_talk`; a function gets what happens to them."""
    monkeypatch.setattr(workers, "get_context", lambda _: WARM)
    monkeypatch.setattr(workers, "_train", break_or_talk)

    def train(names: tuple[str, str], notify: Callable[[str, str, object], None]) -> None:
        runs = [workers.Run(name, parse_recipe(TINY_RECIPE, "tiny.yaml"), tmp_path) for name in names]
        workers.train_at_once(runs, "official", 2, start_ranks("cpu"), lambda _: False, notify)

    return train


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_an_error_of_the_system_ends_one_of_the_runs_at_once(at_once: Callable[..., None]):
    ends: dict[str, tuple[str, object]] = {}

    def notify(name: str, happening: str, values: object) -> None:
        ends[name] = happening, values

    at_once(("lost", "talks"), notify)
    reason = {"reason": "photos/a.jpg: Input/output error"}
    assert ends == {"lost": ("fail", reason), "talks": ("finish", {})}


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_a_defect_in_a_run_beside_one_that_tells_much_is_raised(at_once: Callable[..., None]):
    with pytest.raises(IndexError, match="a defect"):
        at_once(("broken", "talks"), lambda *_: None)


def test_a_signal_that_comes_in_a_run_is_known_to_its_study():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    ranks = type("OneRank", (), {"world_size": 1})()
    with stop_signals() as study_asked:
        with stop_signals() as run_asked:
            assert not run_asked(ranks)
            os.kill(os.getpid(), signal.SIGTERM)
            assert run_asked(ranks)
        assert study_asked(ranks)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.heavy
def test_the_reality_check_is_one_of_the_protocols(dmlkit, tmp_path: Path):
    text = STUDY.replace("[0, 1]", "[3]").replace("metric: recall@1", "metric: separated map@r")
    text = text.replace("metrics: [recall@1, ndcg@3]", "protocol: reality_check")
    sets = ["--set", "dataset.classes=32", "--device", "cpu"]
    out = tmp_path / "out"
    assert dmlkit("study", write_study(tmp_path, text), "-o", out, *sets).code == 0
    stored = RealityCheckFigures.read(out / "runs" / "small" / "seed-3" / "result.json").plain()
    figures = results_of(out)["variants"]["small"]["runs"]["3"]
    assert figures == {f"{kind} {name}": value for kind, part in stored.items() for name, value in part.items()}
    folds = [json.loads(path.read_text()) for path in (out / "runs" / "small" / "seed-3").rglob("summary.json")]
    last = results_of(out)["variants"]["small"]["last"]["3"]
    assert last["separated map@r"] == pytest.approx(np.mean([fold["last"]["test"]["map@r"] for fold in folds]))
    assert not any(name.startswith("concatenated") for name in last)
    floor = results_of(out)["variants"]["small"]["pretrained"]
    assert floor["separated map@r"] == floor["concatenated map@r"] and len(floor) == len(figures)
    summary = results_of(out)["variants"]["small"]["summary"]["separated map@r"]
    assert (summary["low"], summary["high"]) == (None, None)
    assert results_of(out)["verdicts"][0]["verdict"] in ("not separable at this size", "not trained")
    assert results_of(out)["cost"]["models"] == 8


def faults(dmlkit, tmp_path: Path, text: str, *words: str) -> list[str]:
    result = dmlkit("study", write_study(tmp_path, text), "-o", tmp_path / "out", *words)
    assert result.code == 2 and not (tmp_path / "out").exists()
    return [line.removeprefix("error: ").replace(f"{tmp_path}/", "") for line in result.err.splitlines()]


def test_all_faults_of_a_study_and_its_recipes_at_once(dmlkit, tmp_path: Path):
    text = STUDY.replace("seeds: [0, 1]", "sedes: [0, many]").replace("small: {}", "small: {loss.margn: 1}")
    text = text.replace("{loss.margin: 0.3}", "\n    loss: {name: proxy_anchr}\n    sampler.batch_size: big")
    assert faults(dmlkit, tmp_path, text) == [
        "study.yaml:1: seeds: this key is missing and has no default; add it",
        "study.yaml:6: sedes: unknown key; did you mean 'seeds'?",
        "study.yaml:9: loss.margn: unknown key; did you mean 'margin'?",
        "study.yaml:11: loss.name: unknown loss 'proxy_anchr'; did you mean 'proxy_anchor'? or load its file "
        "with --plugin FILE",
        "study.yaml:12: sampler.batch_size: got 'big', expected a valid integer",
    ]


def test_what_does_not_fit_together_is_told_with_its_line(dmlkit, tmp_path: Path):
    text = STUDY.replace("large, than", "lagre, than").replace("[recall@1, ndcg@3]", "[recal@1, map@r]")
    text = "seeds: [2, 2]\n" + text.replace("seeds: [0, 1]", "reference: none")
    printed = faults(dmlkit, tmp_path, text.replace("0.3}", "0.3, tune: {optimizer.lr: [1e-3, 2e-3]}}"))
    assert printed[:-1] == [
        "study.yaml:2: claim: expected one line of text as the first key of the file",
        "study.yaml:11: variants.large.tune: 2 trials to tune large, but 1 for small; "
        "expected the same number for every variant",
        "study.yaml:1: seeds: got [2, 2], expected each seed once",
        "study.yaml:7: reference: unknown variant 'none'; expected one of small, large",
        "study.yaml:13: expect.0.better: unknown variant 'lagre'; did you mean 'large'?",
        "study.yaml:13: expect.0.metric: unknown metric 'recall@1'; did you mean 'recal@1'?",
    ]
    assert printed[-1].startswith("study.yaml:8: metrics.0: unknown metric 'recal@1'; expected one of ami, ")


SEEDS_LINE, FIRST = "[0, 1]", "expect:\n- {better: large, than: small, metric: recall@1}"
RANDOM_SAMPLERS = "{sampler: [{name: random}, {name: class_balanced, images_per_class: 2}]}"
TWO_PAPERS = "metric: recall@1, paper: one}\n- {better: large, than: small, metric: recall@1, paper: two}"


def test_a_recipe_of_dmlkit_is_named_as_train_names_it(tmp_path: Path):
    path = write_study(tmp_path, STUDY.replace("recipe: tiny.yaml", "recipe: glyphs/proxy_anchor"))
    recipe, shipped = read_study(path).variants[0].candidates[0].recipe, read_recipe(Path("glyphs/proxy_anchor"))
    assert (recipe.loss, recipe.dataset) == (shipped.loss, shipped.dataset)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (STUDY, "", "study.yaml: got None, expected a mapping"),
        ("recipe: tiny", "recipe: none", "none.yaml: no such file; expected a recipe"),
        ("variants:", "grid: {loss.scale: [8, 16]}\nvariants:", "study.yaml:1: expected either a grid or variants"),
        (STUDY[STUDY.index("variants:") :], "grid: {loss.margin: [0.1, 0.2], loss.scale: [32]}", "scale: got one val"),
        (SEEDS_LINE, f"[0, {2**64}]", "study.yaml:6: 18446744073709551616 does not fit into 64 bits"),
        ("small: {}", "../up: {}", "study.yaml:9: variants.../up: name '../up' is not valid; expected at most"),
        ("small: {}", f"{'s' * 300}: {{}}", "is not valid; expected at most 255 bytes of letters"),
        ("small: {}", "LARGE: {}", "variants.LARGE: name 'LARGE' is used twice, ignoring case"),
        ("small: {}", "small: {recipe: ../../secret.txt}", "study.yaml:9: recipe: ../../secret.txt is outside"),
        ("recipe: tiny.yaml", "recipe: /etc/passwd", "study.yaml:4: recipe: /etc/passwd is absolute"),
        ("recipe: tiny.yaml", 'recipe: "a\\0b"', "study.yaml:4: recipe: got 'a\\x00b', expected the path of a file"),
        ("loss.margin: 0.3", "seed: 7", "study.yaml:10: seed: a study sets this; use its key seeds"),
        ("loss.margin: 0.3", "", "study.yaml:10: variants.large: large trains the same recipe as small"),
        ("loss.margin: 0.3", "training.precision: bf16", "large has a different training.precision"),
        ("loss.margin: 0.3", "dataset.validation_fraction: 0", "classes are needed to select the checkpoint"),
        ("loss.margin: 0.3", "dataset.split: all", "large has dataset.split all, which leaves no test classes; use"),
        ("than: small", "than: large", "study.yaml:12: expect.0: large cannot be better than itself"),
        (
            "metric: recall@1}",
            TWO_PAPERS,
            "study.yaml:13: expect.1: the same statement is above with paper one; expect",
        ),
        ("metric: recall@1", "metric: eer:genus", "expect.0.metric: smaller eer:genus is better; expected"),
        ("metric: recall@1", "metric: norm", "expect.0.metric: no value of norm is best; expected a metric of which"),
        ("paper:", "protocol: reality_check\npaper:", "metrics.0: 'recall@1': not a metric of the Reality Check"),
        (
            "ndcg@3]",
            "tar@far=0.001]",
            "metrics.1: 'tar@far=0.001': expected the name under which it is reported: tar@f",
        ),
        ("ndcg@3]", "recall@1]", "study.yaml:7: metrics.1: 'recall@1' is given twice"),
        ("variants:", "tune: {optimizer.lr: [1e-3]}\nvariants:", "tune: got one value to tune for small; give two"),
        (SEEDS_LINE, "[0, 1]\ntune_seeds: [0, 1]", "study.yaml:7: tune_seeds: nothing is tuned; give values under tu"),
        (SEEDS_LINE, "[0, 1]\ntune_seeds: [3, 3]", "study.yaml:7: tune_seeds: got [3, 3], expected each seed once"),
        (SEEDS_LINE, "[0, 1]\ntune_seeds: [-1]", "study.yaml:7: tune_seeds.0: got -1, expected"),
        (SEEDS_LINE, "[0, 1]\nextend: -1", "study.yaml:7: extend: got -1, expected"),
        (SEEDS_LINE, "[0, 1]\nnegligible: 0", "study.yaml:7: negligible: got 0, expected"),
        (SEEDS_LINE, "[0, 1]\nmore_seeds: 1000", "study.yaml:7: more_seeds: got 1000, expected"),
        (SEEDS_LINE, "[0, 1]\nrotate_folds: true", "small has dataset.split official; only reality_check has folds"),
        (SEEDS_LINE, "[0, 1]\nprotocol: reality_check\nrotate_folds: true", "uses all folds; remove this key"),
        ("variants:", f"extend: 1\ntune: {RANDOM_SAMPLERS}\nvariants:", "study.yaml:8: extend: small has no tuned key"),
        (FIRST, "more_seeds: 2", "expect has no statement to decide"),
    ],
)
def test_a_fault_alone(dmlkit, tmp_path: Path, old: str, new: str, message: str):
    assert old in STUDY
    assert any(message in line for line in faults(dmlkit, tmp_path, STUDY.replace(old, new)))


def test_a_metric_that_selects_and_one_that_is_reported_are_measured_once(tmp_path: Path):
    """Although one of the recipe's metrics has both names."""
    text = STUDY.replace("{training.epochs: 2}", "{training.epochs: 2, training.select_by: recall@2}")
    recipe = read_study(write_study(tmp_path, text)).variants[0].candidates[0].recipe
    assert sorted(name for metric in recipe.metrics for name in metric.names()) == ["ndcg@3", "recall@1", "recall@2"]
    assert parse_recipe(dump_recipe(recipe), "recipe.yaml") == recipe


def test_a_grid_that_is_too_large_is_counted_before_it_is_built_t16(dmlkit, tmp_path: Path):
    values = list(range(1, 11))
    grid = "".join(f"  {key}: {values}\n" for key in ("a", "b", "c", "d", "e", "f", "g", "h"))
    text = STUDY.partition("variants:")[0] + f"grid:\n{grid}"
    printed = faults(dmlkit, tmp_path, text, "--dry-run")
    assert printed == ["study.yaml:8: grid: got 100,000,000 recipes, expected at most 1,000; use fewer keys or values"]


def test_overrides_that_undo_the_study_are_refused(dmlkit, tmp_path: Path):
    assert "large trains the same recipe as small" in faults(dmlkit, tmp_path, STUDY, "--set", "loss.margin=0.2")[0]
    assert faults(dmlkit, tmp_path, STUDY, "--set", "seed=4")[0].startswith("--set seed=4: seed: a study sets this;")
    assert faults(dmlkit, tmp_path, STUDY, "--set", "loss.margn=1") == [
        "--set loss.margn=1: loss.margn: unknown key; did you mean 'margin'?"
    ]


def test_grids_are_named_by_their_values_and_one_number_is_an_axis(tmp_path: Path):
    body = STUDY[: STUDY.index("variants:")]
    study = read_study(write_study(tmp_path, f"{body}grid: {{loss.margin: [0.1, 0.2, 0.4]}}\n"))
    assert [variant.name for variant in study.variants] == ["margin=0.1", "margin=0.2", "margin=0.4"]
    assert study.axis is not None and (study.axis.key, study.axis.values) == ("loss.margin", (0.1, 0.2, 0.4))
    grid = "grid: {loss.margin: [0.1, 0.2], sampler: [{name: random}, {name: class_balanced, images_per_class: 2}]}\n"
    study = read_study(write_study(tmp_path, body + grid + "reference: margin=0.2,sampler=random\n"))
    assert [variant.name for variant in study.variants] == [
        f"margin={margin},sampler={sampler}"
        for margin in (0.1, 0.2)
        for sampler in ("random", "name_class_balanced_images_per_class_2")
    ]
    assert (study.num_runs, study.config.reference, study.axis) == (8, "margin=0.2,sampler=random", None)


def test_every_variant_is_built_before_anything_trains(dmlkit, tmp_path: Path):
    path = write_study(tmp_path, STUDY.replace("{loss.margin: 0.3}", "{sampler.batch_size: 500}"))
    for words in ([], ["--dry-run"]):
        study(dmlkit, path, *words).refused("large: ", "training images, got 500;")
        assert not (tmp_path / "out" / "runs").exists()


def test_a_dry_run_says_what_would_run_and_writes_nothing(dmlkit, whole: Path, tmp_path: Path):
    result = dmlkit("study", write_study(tmp_path), "-o", tmp_path / "out", "--dry-run")
    assert result.code == 0 and not (tmp_path / "out").exists()
    assert f"4 runs: 4 models, 8 epochs; 0 models in {tmp_path / 'out'} are finished" in result.out
    assert "loss.margin: was 0.1, now 0.3" in result.out
    assert f"4 models in {whole} are finished" in dmlkit("study", tmp_path / "study.yaml", "-o", whole, "--dry-run").out


@pytest.mark.parametrize(("key", "names"), [("loss.margin", ("a", "b", "c")), ("$x^", ("$x^", r"$\frac$", "c"))])
def test_the_plot_of_a_sweep_and_of_single_runs_reads_no_mathematics_t10(tmp_path, key: str, names):
    runs = [[{"map@r": value} for value in values] for values in ([0.5], [0.4, 0.6], [0.7])]
    swept = Axis(key=key, values=(1.0, 0.01, 0.1))
    single = fakes.results_of(dict(zip(names, runs, strict=True)), r"Margins matter $\frac$")
    for axis in (None, swept):
        results = single.model_copy(update={"axis": axis})
        plot_study(results, tmp_path / "plot.png")
        plain = (tmp_path / "plot.png").read_bytes()
        assert plain.startswith(b"\x89PNG")
        for value in (0.55, -2.0):  # of the network before training: among the runs, and below their intervals
            before = {"pretrained": {"map@r": value}}
            variants = {name: one.model_copy(update=before) for name, one in results.variants.items()}
            plot_study(results.model_copy(update={"variants": variants}), tmp_path / "plot.png")
            is_marked = (tmp_path / "plot.png").read_bytes() != plain
            assert is_marked == (axis is None and value == 0.55), (axis, value)


def test_the_example_of_the_docs_is_a_study(tmp_path: Path):
    root = ROOT
    text = (root / "docs" / "studies.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "margin.yaml").write_text(example.partition("\n")[2])
    shutil.copytree(root / "recipes", tmp_path / "recipes")
    assert read_study(tmp_path / "margin.yaml").num_runs == 10
    (commands,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in commands.splitlines():
        _, name, *rest = shlex.split(line)
        get_command(app).commands[name].make_context(name, rest)
    for key in StudyConfig.model_fields:
        assert f"`{key}`" in text, f"docs/studies.md does not explain {key}"


STUDIES = sorted((ROOT / "recipes" / "study").glob("*.yaml"))
MINIATURE = ("dataset={name: glyphs, classes: 80, images_per_class: 4, size: 16, validation_fraction: 0.1}",)
MINIATURE += ("transform={name: plain, size: 16}", "backbone={name: small_cnn, width: 4}", "embedding_dim=8")


@pytest.mark.filterwarnings("ignore:ProxyGML")
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_begins_with_its_claim_and_all_its_recipes_assemble(path: Path, tmp_path: Path):
    text = path.read_text()
    assert text.startswith("claim: ")
    folds = ["dataset.split=reality_check"] if "\nrotate_folds: true" in text else []
    folds += ["dataset.levels=[script, letter, character]"] if "\n  dataset.levels: " in text else []
    read = read_study(path, [*MINIATURE, *folds])
    study_notes(read, check_components(read, tmp_path))
    losses = [one.recipe.model_dump()["loss"] for variant in read.variants for one in variant.candidates]
    assert all(loss["volume"] > 1 for loss in losses if loss["name"] == "proxy_isa")  # else its weights are constant


def test_a_claim_is_text_in_the_documents_s10(dmlkit, copied: Path, tmp_path: Path):
    claim = "<img src=x onerror=alert(1)> [/x] ](http://evil) a|b `c`"
    path = write_study(tmp_path, STUDY.replace("A larger margin is better", json.dumps(claim)))
    assert claim in study(dmlkit, path).ok().out
    text = (copied / "results.md").read_text()
    assert r"# \<img src=x onerror=alert(1)\> \[/x\] \](http://evil) a\|b \`c\`" in text
    assert "<img" not in text.replace(r"\<", "")
