"""Tables with several labels per image: sets, splits that divide no label, batches, and training to evaluation."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from dmlkit.datasets import TableConfig
from dmlkit.datasets.files.class_names import cut_between_groups, in_groups
from dmlkit.metrics import retrieval_metrics
from dmlkit.run_folder.documents import Alignment
from dmlkit.run_folder.folder import RunFolder
from dmlkit.samplers import ClassBalanced
from dmlkit.vectors.stored import split_embeddings
from tests.conftest import refuses
from tests.datasets import trees
from tests.evaluation.test_align import turned

LABELS = ["b|a", "a|b", "a", "b|c", "d", "d|e", "e", "f|g", "g", "h", "x|y", "y", "y|z", "w", "w|v", "v"]


def table(root: Path, labels: list[str], **options: object) -> TableConfig:
    for index in range(len(labels)):
        if not (root / f"{index}.jpg").exists():
            trees.photo(root / f"{index}.jpg", index)
    lines = "\n".join(f'{index}.jpg,"{label}"' for index, label in enumerate(labels))
    (root / "t.csv").write_text(f"path,label\n{lines}\n")
    return TableConfig(file=str(root / "t.csv"), **({"separator": "|", "validation_fraction": 0} | options))


def labels_of(names: tuple[str, ...]) -> set[str]:
    return {label for name in names for label in name.split("|")}


def test_splits_divide_no_label(tmp_path: Path):
    config = table(tmp_path, LABELS, validation_fraction=0.3)
    parts = [config.build(split) for split in ("train", "validation", "test")]
    assert all(map(len, parts)) and sum(map(len, parts)) == len(LABELS)
    names = [labels_of(part.class_names) for part in parts]
    assert all(len(names[i] & names[j]) == 0 for i in range(3) for j in range(i))
    train = parts[0]
    assert train.class_names[:2] == ("a", "a|b") and train.labels.bincount()[1] == 2  # b|a is the same set
    known = sorted(labels_of(train.class_names))
    for index, name in enumerate(train.class_names):
        assert {known[i] for i in train.members[index].nonzero().flatten().tolist()} == set(name.split("|"))


def test_cuts_equal_a_search_over_all_positions():
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        sets = {"|".join(sorted({f"l{int(i)}" for i in torch.randint(9, (2,), generator=generator)})) for _ in range(6)}
        names = in_groups(sorted(sets), "|")
        whole = [p for p in range(1, len(names)) if not labels_of((*names[:p],)) & labels_of((*names[p:],))]
        best = min(whole, key=lambda p: (abs(p - 3), p), default=None)
        assert cut_between_groups(names, "|", 3, (1, len(names) - 1)) == best


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["a", "a||b", "c", "c"], r"t\.csv:3: the label 'a\|\|b' has an empty label; expected labels"),
        (["a", "a", "c|c", "c"], r"t\.csv:4: the label 'c\|c' has a label twice"),
        (["a", "a|b", "b|c", "c"], "common labels connect all images, so no split has test labels that are unseen"),
    ],
)
def test_what_is_wrong_with_labels_is_one_line(labels: list[str], said: str, tmp_path: Path):
    refuses(said, table(tmp_path, labels).build, "train")


def test_a_label_in_two_splits_is_refused_unless_all_are_trained_on(tmp_path: Path):
    config = table(tmp_path, ["a|b", "b", "b|c", "c"])
    file = Path(config.file)
    rows = file.read_text().splitlines()
    splits = ["split", "train", "train", "test", "test"]
    file.write_text("\n".join(f"{row},{split}" for row, split in zip(rows, splits, strict=True)))
    refuses(r"1 label is in several splits \(b\), but .*; use dataset\.split=all", config.build, "train")
    whole = config.model_copy(update={"split": "all"}).build("train")
    assert len(whole) == 4 and whole.class_names == ("a|b", "b", "b|c", "c")
    plain = config.model_copy(update={"separator": None})
    assert plain.build("train").members is None  # a|b is a class like any other


def test_batches_show_images_of_drawn_labels_once():
    members = torch.rand(40, 8, generator=torch.Generator().manual_seed(0)) < 0.3
    members[torch.arange(40), torch.arange(40) % 8] = True
    labels = torch.arange(80) // 2
    sampler = ClassBalanced(labels, 1, members=members, classes_per_batch=3, images_per_class=4)
    drawn: Counter[int] = Counter()
    for batch in sampler.batches(0):
        assert len(set(batch)) == len(batch) == 12
        for place in range(0, 12, 4):
            common = members[labels[batch[place : place + 4]]].all(0)
            assert common.any()
            drawn.update(common.nonzero().flatten().tolist())
    assert set(drawn) == set(range(8)) and len(sampler) == 80 // 12
    assert sampler.batches(0) == ClassBalanced(
        labels, 1, members=members, classes_per_batch=3, images_per_class=4
    ).batches(0)


RECIPE = """\
dataset: {{name: table, file: {file}, separator: "|", validation_fraction: 0.3}}
transform: {{name: plain, size: 16}}
backbone: {{name: small_cnn, width: 4}}
embedding_dim: 8
loss: {{name: sup_con}}
sampler: {{name: class_balanced, classes_per_batch: 3, images_per_class: 2}}
training: {{epochs: 1, workers: 0}}
metrics: [recall@1, map@r]
"""


def test_a_run_is_trained_and_scored_by_shared_labels(dmlkit, tmp_path: Path):
    from dmlkit.distributed.launch import start_ranks
    from dmlkit.vectors.trained import load_model

    config = table(tmp_path, LABELS)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(file=config.file))
    dmlkit("train", recipe, "-o", tmp_path / "run", "--device", "cpu").ok()
    run, ranks = RunFolder(tmp_path / "run"), start_ranks("cpu")
    trained = load_model(run, ranks)
    dataset = trained.recipe.dataset.build("test")
    points = split_embeddings(run, trained, ranks, dataset, "test").points
    names = [dataset.class_names[label] for label in dataset.labels.tolist()]
    known = sorted(labels_of((*names,)))
    matrix = torch.tensor([[label in name.split("|") for label in known] for name in names])
    expected = retrieval_metrics(points, matrix, manifold=trained.manifold, metrics=["recall@1", "map@r"])
    reported = dmlkit("eval", run.path, "--json", "--device", "cpu")
    assert json.loads(reported.out)["metrics"] == pytest.approx(expected, abs=1e-6)
    assert dmlkit("embed", run.path, "--split", "test", "-o", tmp_path / "e", "--device", "cpu").code == 0
    for source in (run.path, tmp_path / "e"):
        shown = dmlkit("cluster", source, "-k", "3", "-o", tmp_path / "c.csv").out
        rows = [row.split(",") for row in (tmp_path / "c.csv").read_text().splitlines()[1:]]
        (tmp_path / "c.csv").unlink()
        sets = [[row[2].split("|") for row in rows if row[0] == number] for number in "123"]
        most = [max(sum(label in member for member in members) for label in known) for members in sets]
        assert f"purity {sum(most) / len(rows):.4f}, no nmi, since images have several labels" in shown
    label = run.training_classes()[0].partition("|")[0]
    mixed = table(tmp_path / "mixed", [f"{label}|new"] * 2 + ["other|newer"] * 2).file
    notes = dmlkit("eval", run.path, mixed, "--json", "--device", "cpu").json()["notes"]
    assert "1 class was trained on; these metrics do not measure unseen classes" in notes
    before = sorted(run.path.rglob("*"))
    for words in (
        ("inspect", run.path, "-o", tmp_path / "x.html", "--device", "cpu"),
        ("eval", run.path, "--with", "local", "--device", "cpu"),
        ("calibrate", run.path, "--device", "cpu"),
        ("verify", run.path, tmp_path / "0.jpg", tmp_path / "1.jpg"),
        ("select", run.path, tmp_path / "e", "--device", "cpu"),
        ("select", tmp_path / "e", "--measure"),
        ("identify", tmp_path / "e", tmp_path / "e"),
    ):
        dmlkit(*words).refused("needs one label per image, but images have several")
    assert sorted(run.path.rglob("*")) == before  # nothing was embedded in vain
    many = table(tmp_path / "many", [f"{index % 24}|{index % 12}x" for index in range(48)]).file
    assert dmlkit("embed", run.path, many, "-o", tmp_path / "old", "--device", "cpu").code == 0
    newer, aligned = turned(run.path, tmp_path / "newer"), tmp_path / "aligned"
    dmlkit("align", tmp_path / "old", newer, many, "-o", aligned, "--device", "cpu").ok()
    assert Alignment.read(aligned / "alignment.json").held_out == "images"  # no label divides sets
