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
EMBEDDINGS = "run/embeddings/test"
EMBEDDED = ("export", EMBEDDINGS, "--format")


@pytest.fixture
def here(ground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the ground, to work in."""
    folder = shutil.copytree(ground, tmp_path / "here")
    monkeypatch.chdir(folder)
    return folder


REFUSED: dict[str, tuple[str, ...]] = {
    "d2": ("study", "study.yaml", "-o", "docs"),
    "d8": ("train", "base.yaml", "-o", "run", "--overwrite", "--set", "optimizer.lr=1e30"),
    "w4 one class": (
        *("train", "base.yaml", "-o", "new", "--set", "loss={name: proxy_nca}"),
        *("--set", "dataset.classes=6", "--set", "sampler.batch_size=3"),
    ),
    "w7": ("train", "base.yaml", "-o", "new", "--device", "cpu", "--set", "training.precision=fp16"),
    "w8 root": ("eval", "run", "--set", "dataset.classes=8", "photos"),
    "w9 device": ("train", "base.yaml", "--dry-run", "--device", "nonsense"),
    "w18": ("eval", "x.npy", "x.npy", "--labels", "y.npy", "--labels", "y.npy"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gave_a_wrong_figure_or_replaced_a_file_is_refused(case: str, here: Path, command: Command):
    Path("docs").mkdir()
    Path("docs/results.md").write_text("somebody's")
    before = hashes(here)
    code, said = command(*REFUSED[case])
    assert code == 2, said
    assert hashes(here) == before


def test_indexes_have_items_of_their_own_w2(here: Path, command: Command):
    assert command(*EMBEDDED, "faiss", "-o", "birds.2023")[0] == 0
    before = hashes(here, "run")
    assert command("embed", "run", "photos", "-o", "more")[0] == 0
    assert command("export", "more", "--format", "faiss", "-o", "birds.2024")[0] == 0
    after = hashes(here, "run", "more")
    assert {name: after[name] for name in before if not name.startswith("more")} == before


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
