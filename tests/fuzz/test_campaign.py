"""Findings of a campaign that no other test holds, by their ids, through the command line alone."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.conftest import hashes
from tests.processes import Forked, command_lines, wait_until

pytestmark = pytest.mark.heavy
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def here(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the ground, to work in."""
    folder = shutil.copytree(ground, tmp_path / "here")
    monkeypatch.chdir(folder)
    return folder


def test_fp16_on_a_cpu_is_refused_w7(here: Path, command: Command):
    before = hashes(here)
    code, said = command("train", "base.yaml", "-o", "new", "--device", "cpu", "--set", "training.precision=fp16")
    assert code == 2 and "fp16 needs a GPU" in said, said
    assert hashes(here) == before


def test_two_trainings_do_not_share_a_folder_w3(here: Path, command: Command):
    first = Forked(command_lines, str(here), "train base.yaml -o new --set training.epochs=100000")
    try:
        wait_until(Path("new/checkpoints/last.pt").exists, first)
        first.send_signal(signal.SIGSTOP)  # it holds the folder still
        assert command("train", "base.yaml", "-o", "new", "--overwrite", "--set", "seed=9")[0] == 2
    finally:
        first.kill()


def test_a_study_shows_no_other_file_s6(here: Path, command: Command):
    Path("secret.txt").write_text("the secret")
    Path("papers/claims").mkdir(parents=True)
    Path("papers/claims/study.yaml").write_text(Path("study.yaml").read_text().replace("base.yaml", "../../secret.txt"))
    code, said = command("study", "papers/claims/study.yaml", "-o", "new")
    assert code == 2 and "the secret" not in said, said
