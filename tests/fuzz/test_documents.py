"""Damaged files: every command that reads one gives its result or one line, and changes nothing else."""

import os
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.conftest import ALLOWED, Workplace, examples, hashes

READERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "run/checkpoints/best.pt": (("eval", "run"), ("export", "run", "--format", "safetensors", "-o", "out.safetensors")),
    "run/checkpoints/last.pt": (
        ("train", "base.yaml", "-o", "run", "--resume"),
        ("eval", "run", "--checkpoint", "last"),
    ),
    "run/recipe.yaml": (("eval", "run"), ("train", "base.yaml", "-o", "run", "--resume")),
    "run/environment.json": (("eval", "run"), ("compare", "run", "study/runs/small/seed-0")),
    "run/metrics.jsonl": (
        ("train", "base.yaml", "-o", "run", "--resume"),
        ("compare", "run", "study/runs/small/seed-0"),
    ),
    "run/classes.json": (("eval", "run", "--split", "all"), ("compare", "run", "study/runs/small/seed-0")),
    "run/summary.json": (("compare", "run", "study/runs/small/seed-0"), ("eval", "run")),
    "run/evaluations/*.json": (("compare", "run", "study/runs/small/seed-0"), ("eval", "run")),
    "run/evaluations/*.npz": (("compare", "run", "study/runs/small/seed-0"), ("eval", "run")),
    "begun/evaluations/*.json": (("compare", "run", "begun"), ("train", "weights.yaml", "-o", "begun", "--resume")),
    "begun/evaluations/*.npz": (("compare", "run", "begun"), ("train", "weights.yaml", "-o", "begun", "--resume")),
    "run/embeddings/test/manifest.json": (("eval", "run/embeddings/test"), ("curvature", "run/embeddings/test")),
    "run/embeddings/test/embeddings.npy": (
        ("eval", "run/embeddings/test"),
        ("export", "run/embeddings/test", "--format", "parquet", "-o", "out.parquet"),
    ),
    "run/embeddings/test/items.parquet": (
        ("eval", "run/embeddings/test"),
        ("export", "run/embeddings/test", "--format", "npz", "-o", "out.npz"),
    ),
    "study/study.json": (("report", "study", "-o", "out.md"), ("study", "study.yaml", "-o", "study")),
    "study/results.json": (("report", "study", "-o", "out.md"),),
    "table.csv": (("data", "check", "table.csv"),),
    "x.npy": (("eval", "x.npy", "--labels", "y.npy"),),
    "y.npy": (("eval", "x.npy", "--labels", "y.npy"),),
    "photos/ant/0.png": (("data", "check", "photos.yaml"), ("embed", "run", "photos", "-o", "out")),
    "study.yaml": (("study", "study.yaml", "-o", "study", "--dry-run"),),
}
CASES = [(file, words) for file, commands in READERS.items() for words in commands]
JSON = ["", "{}", "[]", "null", "1e999", '{"format": 99}', '{"format": "x", "a": 1}', "[" * 5000, '"\\ud800"']


class Damage(NamedTuple):
    """A change of a file."""

    kind: str
    place: float  # as a fraction of the file's length
    other: bytes

    def of(self, data: bytes) -> bytes | None:
        """The file's new bytes; None for a folder in its place."""
        at, other = int(self.place * len(data)), self.other
        changed = {
            "flip": data[:at] + other[: len(data) - at] + data[at + len(other) :],
            "cut": data[:at],
            "insert": data[:at] + other + data[at:],
            "replace": other,
            "folder": None,
            "zeros": data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :],
        }
        return changed[self.kind]


damages = st.builds(
    Damage,
    st.sampled_from(["flip", "flip", "cut", "insert", "folder", "zeros"]),
    st.floats(0, 1),
    st.binary(min_size=1, max_size=64),
) | st.builds(Damage, st.just("replace"), st.just(0.0), st.sampled_from(JSON).map(str.encode))


@pytest.fixture(scope="module")
def workplace(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return Workplace(ground, tmp_path_factory.mktemp("documents") / "case")


@pytest.mark.heavy
def test_what_is_not_damaged_is_read(workplace: Workplace, command: Callable[..., tuple[int, str]]):
    for _, words in CASES:  # a command that ended at a fault of its own would never reach the damage
        with chdir(workplace.whole()):
            code, said = command(*words)
        assert code == 0, (words, said)


@pytest.mark.heavy
@examples(60, 2_000)
@given(case=st.sampled_from(CASES), damage=damages)
def test_a_damaged_file_is_told_in_a_line(case, damage, workplace, command):
    pattern, words = case
    folder = workplace.whole()
    file = next(folder.glob(pattern))
    stamp = file.stat()
    damaged = damage.of(file.read_bytes())
    file.unlink()
    if damaged is None:
        file.mkdir()
    else:
        file.write_bytes(damaged)
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    before = hashes(folder, *written_by(words))
    with chdir(folder):
        code, said = command(*words)
    assert code in ALLOWED, said
    assert code in (0, 1) or len(said.splitlines()) <= 25, said
    assert hashes(folder, *written_by(words)) == before


def written_by(words: tuple[str, ...]) -> set[str]:
    """What a command may change: its output, points that a run keeps, and what lies in the run that it evaluates."""
    outputs = {words[index + 1] for index, word in enumerate(words) if word == "-o"}
    return outputs | ({"run", "begun", "study"} if words[0] in ("eval", "compare") else set()) | {"out", "run/vectors"}
