"""Outputs inside data, a run or a gallery are refused with the reason; a run's own places are open."""

from pathlib import Path

from tests.datasets import trees

RECIPE = """\
dataset: {name: folder, root: photos, validation_fraction: 0.34}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 4
loss: {name: triplet}
sampler: {name: random, batch_size: 6}
training: {epochs: 1, workers: 0}
"""
STUDY = "claim: c\nrecipe: r.yaml\nseeds: [0, 1, 2]\nvariants: {one: {}, other: {embedding_dim: 5}}\n"


def test_no_command_writes_into_data_a_run_or_a_gallery(tmp_path: Path, dmlkit, monkeypatch):
    trees.photos(tmp_path / "photos", (f"c{number // 3}/{number}.png" for number in range(24)))
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "s.yaml").write_text(STUDY)
    monkeypatch.chdir(tmp_path)

    def works(*command: str) -> None:
        dmlkit(*command).ok()

    works("train", "r.yaml", "-o", "run")
    works("embed", "run", "photos", "-o", "emb")
    works("embed", "run", "--split", "test", "-o", "split")
    works("gallery", "create", "run", "photos", "-o", "birds")
    works("embed", "run", "photos", "-o", "run/embeddings/mine")  # a run's own places
    works("export", "emb", "--format", "npz", "-o", "run/exports/e.npz")
    works("plot", "histogram", "run", "-o", "run/plots/h.png")
    works("plot", "histogram", "run", "-o", "photos/h.pdf")  # no image that a dataset reads
    (tmp_path / "photos" / "h.pdf").unlink()
    before = set(tmp_path.rglob("*"))
    commands = [
        ("train", "r.yaml", "-o"),
        ("study", "s.yaml", "-o"),
        ("embed", "run", "photos", "-o"),
        ("gallery", "create", "run", "photos", "-o"),
        ("export", "run", "--format", "safetensors", "-o"),
        *(("export", "emb", "--format", kind, "-o") for kind in ("npz", "tensorboard", "lancedb")),
        ("export", "split", "--format", "lancedb", "-o"),
    ]
    cached = "backbone.tuning={name: none, cache: %s}"
    for place, reason in (
        ("photos/new", "where every file is read as data"),
        ("run/new", "is inside a run"),
        ("birds/new", "is inside a gallery"),
    ):
        asked = [(*command, place) for command in commands]
        asked.append(("train", "r.yaml", "-o", "fresh", "--set", cached % place))
        for command in asked:
            result = dmlkit(*command)
            assert (result.code, reason in result.err) == (2, True), (command, result.err)
    for command in (
        ("train", "r.yaml", "-o", "fresh", "--set", cached % "photos"),
        ("train", "r.yaml", "-o", "fresh", "--set", cached % "fresh/mine"),
        ("export", "emb", "--format", "lancedb", "-o", "photos", "--table", "zz"),
        ("plot", "histogram", "run", "-o", "photos/c0/h.png"),
    ):
        assert dmlkit(*command).code == 2, command
    assert set(tmp_path.rglob("*")) == before
