"""A study under kill -9 at random moments: it ends as an unbroken one, and can be read all the time."""

import json
import random
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz.conftest import FULL, RECIPE, STUDY, without_times
from tests.processes import Forked, command_line

KILLS = 50 if FULL else 3  # of each study
STUDIES = {
    "plain": STUDY,
    "tuned": STUDY.replace("seeds: [0, 1]", "seeds: [0, 1]\ntune: {optimizer.lr: [1.0e-5, 3.0e-3]}\nextend: 1"),
}
WORDS = ("study", "study.yaml", "-o", "study", "--device", "cpu")


@pytest.fixture(scope="module", params=STUDIES if FULL else ["tuned"])
def unbroken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder with a study that nobody disturbed, and the seconds that it took."""
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, STUDIES[request.param])
    ended(Forked(command_line, "--version"))  # the process that the others are forked from starts with the first one
    begun = time.monotonic()
    ended(start_in(folder))
    return folder, time.monotonic() - begun


def write(folder: Path, text: str) -> None:
    (folder / "base.yaml").write_text(RECIPE.replace("epochs: 1", "epochs: 3"))
    (folder / "study.yaml").write_text(text)


def in_folder(folder: str, *words: str) -> None:
    with chdir(folder):
        command_line(*words)


def start_in(folder: Path) -> Forked:
    return Forked(in_folder, str(folder), *WORDS)


def ended(process: Forked) -> None:
    said = process.communicate()[0]
    assert process.returncode == 0, said


def finished(study: Path) -> dict[str, tuple[int, int]]:
    """Of every file of a run that has ended what changes if it is written again."""
    files = [file for summary in study.rglob("summary.json") for file in summary.parent.rglob("*") if file.is_file()]
    # a run is evaluated, and its curves are drawn, after its summary is there
    kept = [file for file in files if file.suffix in (".pt", ".jsonl") or file.name in ("summary.json", "recipe.yaml")]
    return {str(file.relative_to(study)): (file.stat().st_ino, file.stat().st_mtime_ns) for file in kept}


def weights(study: Path) -> dict[str, Any]:
    """What every checkpoint holds."""
    return {str(path.relative_to(study)): torch.load(path, weights_only=True) for path in sorted(study.rglob("*.pt"))}


def documents(study: Path) -> dict[str, Any]:
    """What every document says, without times; a lock of a process that was killed may stay."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in study.rglob("*") if path.is_file() and path.name != ".lock"):
        found[str(path.relative_to(study))] = path.suffix
        if path.suffix in (".json", ".jsonl"):
            texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            found[str(path.relative_to(study))] = [without_times(json.loads(text)) for text in texts]
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two checkpoints are the same, bit for bit, but for times."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "seconds")
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def done(study: Path, command: Callable[..., tuple[int, str]]) -> set[str]:
    """The runs that ``dmlkit status`` says are done; it answers at any moment, once there is a study."""
    is_begun = (study / "study.json").exists()
    code, said = command("status", str(study), "--json")
    if code == 2:
        assert not is_begun and "expected a folder that dmlkit study wrote" in said, said
        return set()
    assert code == 0, said
    found = {run["folder"]: run["state"] for run in json.loads(said)["runs"]}
    assert "failed" not in found.values(), said
    return {name for name, state in found.items() if state == "done"}


@pytest.mark.heavy
def test_a_study_killed_at_random_moments_is_the_unbroken_study(unbroken, command, tmp_path):
    whole, seconds = unbroken
    draw = random.Random(0)
    killed = number = 0
    while killed < KILLS:
        folder, number = tmp_path / str(number), number + 1
        folder.mkdir()
        write(folder, (whole / "study.yaml").read_text())
        kept: dict[str, tuple[int, int]] = {}
        are_done: set[str] = set()
        code = None
        while code != 0:
            process, end = start_in(folder), time.monotonic() + draw.uniform(0, seconds)
            while process.poll() is None and (killed >= KILLS or time.monotonic() < end):
                before, are_done = are_done, done(folder / "study", command)
                assert before <= are_done
            process.kill()
            said = process.communicate()[0]
            code = process.returncode
            assert code in (0, -9), said
            killed += code == -9
            assert are_done <= done(folder / "study", command)
            now = finished(folder / "study")
            assert {name: now.get(name) for name in kept} == kept
            kept = now
        assert documents(folder / "study") == documents(whole / "study")
        assert same(weights(folder / "study"), weights(whole / "study"))
        for file in (folder / "study").rglob("metrics.jsonl"):
            assert [json.loads(line)["epoch"] for line in file.read_text().splitlines()] == [1, 2, 3]
    print(f"{killed} kills, {number} studies of {seconds:.1f} s")  # noqa: T201
