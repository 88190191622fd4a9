"""Before and after training: the features that training began with, by hand, once a run, and what comes of them."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.evaluation.compare import gain_message
from dmlkit.metrics.statistics import paired_comparison
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.documents import EpochRow, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training import pretrained as pretrained_module
from dmlkit.training import summary as summary_module
from dmlkit.training.summary import final_recipe, plot_curves, seconds_per_epoch
from dmlkit.training.train import train
from dmlkit.vectors.embedder import load
from dmlkit.vectors.stored import embed_files
from tests.conftest import TINY_RECIPE, Killed
from tests.datasets import trees
from tests.metrics import naive
from tests.processes import command_line, run_on_ranks
from tests.training.test_tuning import Stopper, trained

MODEL = "test_resnet"
CPU = ("--device", "cpu", "--set", "training.workers=0")
ONE = ("--set", "training.epochs=1")
AUGMENTED = "transform={name: imagenet, size: 16, resize: 16}"
SCORED = "pretrained, test: 9 images"
NAMES = {"recall@1": ("recall", 1), "recall@2": ("recall", 2), "map@r": ("map@r", 0)}


@pytest.fixture(autouse=True)
def _first_runs(monkeypatch: pytest.MonkeyPatch):
    """No run of another test has answered."""
    monkeypatch.setattr(pretrained_module, "_answered", {})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that nobody downloaded, random, but of a file; a recipe that begins with them; its run and another's."""
    folder = tmp_path_factory.mktemp("home")
    torch.manual_seed(11)
    torch.save(timm.create_model(MODEL, num_classes=0).state_dict(), folder / "weights.pth")
    own = f"{{name: timm, model: {MODEL}, weights: {folder / 'weights.pth'}, pooling: {{name: avg}}}}"
    text = TINY_RECIPE.replace("{name: small_cnn, width: 4}", own)
    (folder / "recipe.yaml").write_text(text.replace("epochs: 3", "epochs: 2"))
    for name, seed in (("run", 3), ("other", 4)):
        train(folder / "recipe.yaml", folder / name, overrides=["training.workers=0", f"seed={seed}"], device="cpu")
    return folder


@pytest.fixture
def recipe(home: Path) -> Path:
    return home / "recipe.yaml"


@pytest.fixture
def weights(home: Path) -> Path:
    return home / "weights.pth"


@pytest.fixture
def run(home: Path, tmp_path: Path) -> Path:
    return shutil.copytree(home / "run", tmp_path / "run")


@pytest.fixture
def other(home: Path, tmp_path: Path) -> Path:
    """A run of another seed."""
    return shutil.copytree(home / "other", tmp_path / "other")


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """A run with random augmentation."""
    overrides = ["training.workers=0", AUGMENTED]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained_module, "_answered", {})
        train(home / "recipe.yaml", home / "whole", overrides=overrides, device="cpu")
    return home / "whole"


@pytest.fixture
def own(home: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A recipe and weights that a test may change."""
    text = (home / "recipe.yaml").read_text().replace(str(home), str(tmp_path))
    (tmp_path / "recipe.yaml").write_text(text)
    return tmp_path / "recipe.yaml", Path(shutil.copy(home / "weights.pth", tmp_path))


def by_hand(network: torch.nn.Module, recipe: Path, split: str) -> dict[str, float]:
    """timm's own network, pixels by hand, NumPy's cosine, metrics by loops."""
    read = read_recipe(recipe)
    images = read.dataset.build(split)
    transform = read.transform.evaluation()
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (read.transform.mean, read.transform.std))
    pixels = torch.stack([transform(images.sample(index)) for index in range(len(images))])
    with torch.no_grad():
        maps = network.eval().forward_features((pixels / 255 - mean) / std)
    features = maps.mean((2, 3)).double().numpy()
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    cosine, labels = (features @ features.T).round(6), images.labels.tolist()
    values: dict[str, list[float]] = {name: [] for name in NAMES}
    for query in range(len(labels)):
        others = [item for item in range(len(labels)) if item != query]
        scores, hits = [cosine[query, item] for item in others], [labels[item] == labels[query] for item in others]
        for name, (kind, k) in NAMES.items():
            values[name].append(naive.expected(scores, hits, kind, k))
    return {name: float(np.mean(column)) for name, column in values.items()}


def loaded(weights: Path) -> Any:
    network = timm.create_model(MODEL, num_classes=0)
    network.load_state_dict(torch.load(weights, weights_only=True))
    return network


def summary_of(run: Path) -> Summary:
    return Summary.read(run / "summary.json")


def test_a_run_tells_what_its_backbone_could_do_before_training(dmlkit, recipe: Path, weights: Path, tmp_path: Path):
    run = tmp_path / "run"
    result = dmlkit("train", recipe, "-o", run, *CPU).ok()
    pretrained = summary_of(run).pretrained
    assert pretrained
    for split, figures in (("validation", pretrained.validation), ("test", pretrained.test)):
        assert figures == pytest.approx(by_hand(loaded(weights), recipe, split), abs=1e-4)
    chosen = summary_of(run).chosen.test
    assert f"map@r on test: {chosen['map@r']:.3f} after training, {pretrained.test['map@r']:.3f} before: " in result.out
    assert "GB of memory" in result.out
    order = ["epoch 1/2", "pretrained, validation: 18 images in ", "pretrained, test: 36 images in ", "epoch 2/2"]
    assert sorted(order, key=result.out.index) == order


def test_a_run_of_the_same_process_copies_the_figures_of_an_earlier_one(dmlkit, recipe: Path, tmp_path: Path):
    """The runs of a study start from the same network; other metrics are another question."""
    scored = "pretrained, test: 36 images"
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert scored in dmlkit("train", recipe, "-o", first, *CPU).out
    assert scored not in dmlkit("train", recipe, "-o", second, *CPU, *ONE).ok().out
    assert scored in dmlkit("train", recipe, "-o", third, *CPU, *ONE, "--set", "metrics=[mrr, map@r]").out
    ours, theirs = (json.loads((run / "evaluations/test-pretrained.json").read_text()) for run in (first, second))
    assert (ours.pop("source"), theirs.pop("source")) == (str(first), str(second))
    assert ours == theirs
    ours, theirs = (np.load(run / "evaluations/test-pretrained.npz") for run in (first, second))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_difference_is_that_of_the_queries(dmlkit, run: Path):
    assert dmlkit("eval", run, "--device", "cpu").code == 0
    tuned, before = (np.load(run / path) for path in ("evaluations/test-best.npz", "evaluations/test-pretrained.npz"))
    pretrained = summary_of(run).pretrained
    assert pretrained and set(pretrained.difference) == set(NAMES)
    for name, found in pretrained.difference.items():
        expected = paired_comparison(*(torch.from_numpy(one) for one in (before[name], tuned[name], tuned["class"])))
        assert found.model_dump() == expected.as_dict()
        assert found.difference == pytest.approx((tuned[name] - before[name]).mean())


def test_without_validation_classes_the_test_classes_are_told_and_there_is_no_best(
    dmlkit, recipe: Path, tmp_path: Path
):
    run = tmp_path / "run"
    result = dmlkit("train", recipe, "-o", run, *CPU, *ONE, "--set", "dataset.validation_fraction=0")
    pretrained = summary_of(run).pretrained
    assert pretrained and pretrained.validation is None and "map@r on test: " in result.out
    assert summary_of(run).best is None and not (run / "checkpoints" / "best.pt").exists()
    assert {path.name for path in (run / "evaluations").iterdir()} == {
        f"test-pretrained.{end}" for end in ("json", "npz")
    }


def killed(*_: Any, **__: Any):
    raise Killed


def second_killed(alone: Any, ranks: Any, dataset: Any, source: str, bar: Any) -> Any:
    return killed() if source == "the test split" else embed_files(alone, ranks, dataset, source, bar)


TRAINING = sys.modules[train.__module__]
PLACES = {  # of a kill: what ends there, and how many files of figures there are
    "before the first step": (TRAINING, "fit", killed, 0),
    "after the first epoch": (TRAINING, "score_pretrained", killed, 0),
    "between validation and test": (pretrained_module, "embed_files", second_killed, 2),
    "after the last epoch": (TRAINING, "summarize", killed, 4),
}


def kill(place: str, monkeypatch: pytest.MonkeyPatch, dmlkit, *words: object):
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place][:2], PLACES[place][2])
        with pytest.raises(Killed):
            dmlkit("train", *words)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_anywhere_is_scored_once_and_ends_with_the_same_bits(
    dmlkit, recipe, whole, tmp_path, monkeypatch, place
):
    run, augmented = tmp_path / "killed", (*CPU, "--set", AUGMENTED)
    kill(place, monkeypatch, dmlkit, recipe, "-o", run, *augmented)
    stamps = {path: path.stat().st_mtime_ns for path in run.glob("evaluations/*")}
    assert len(stamps) == PLACES[place][3] and (run / "checkpoints/last.pt").exists() == (
        place != "before the first step"
    )
    for _ in range(2):  # the second time everything is done
        assert dmlkit("train", recipe, "-o", run, *augmented, "--resume").code == 0
        after = {path: path.stat().st_mtime_ns for path in run.glob("evaluations/*")}
        assert len(after) == 4 and after | stamps == after
        stamps = after
    for kept, expected in zip(of_checkpoint(run), of_checkpoint(whole), strict=True):
        assert torch.equal(kept, expected)
    assert summary_of(run).pretrained == summary_of(whole).pretrained


def of_checkpoint(run: Path) -> list[torch.Tensor]:
    state = RunFolder(run).load_checkpoint("last")
    return [*state["model"].values(), *state["objective"].values(), state["random"]["cpu"]]


def test_scoring_leaves_training_as_it_is(dmlkit, recipe: Path, tmp_path: Path, monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    assert dmlkit("train", recipe, "-o", tmp_path / "scored", *CPU).code == 0
    assert seeds == [3]  # of the training alone: a GPU's random numbers go on where they were
    monkeypatch.setattr(TRAINING, "score_pretrained", lambda *_: {})
    assert dmlkit("train", recipe, "-o", tmp_path / "bare", *CPU).code == 0
    for scored, bare in zip(*(of_checkpoint(tmp_path / name) for name in ("scored", "bare")), strict=True):
        assert torch.equal(scored, bare)


def test_other_weights_than_before_the_first_step_are_never_scored(dmlkit, own, tmp_path, monkeypatch, caplog):
    (recipe, weights), run, other = own, tmp_path / "run", tmp_path / "other"
    kill("before the first step", monkeypatch, dmlkit, recipe, "-o", run, *CPU)
    torch.save({name: tensor + 0.01 for name, tensor in loaded(weights).state_dict().items()}, weights)
    assert dmlkit("train", recipe, "-o", run, *CPU, "--resume").code == 0  # from its first step
    pretrained = summary_of(run).pretrained
    assert pretrained and pretrained.test == pytest.approx(by_hand(loaded(weights), recipe, "test"), abs=1e-4)
    kill("after the first epoch", monkeypatch, dmlkit, recipe, "-o", other, *CPU)
    torch.save({name: tensor + 0.02 for name, tensor in loaded(weights).state_dict().items()}, weights)
    assert dmlkit("train", recipe, "-o", run, *CPU, "--resume").code == 0
    assert summary_of(run).pretrained == pretrained and caplog.text == ""
    pretrained_module._answered.clear()  # otherwise the figures of the first run are copied
    assert dmlkit("train", recipe, "-o", other, *CPU, "--resume").code == 0
    assert summary_of(other).pretrained is None and not (other / "evaluations").exists()
    assert caplog.text.count(f"{other}: backbone.weights names other weights than before the first step") == 1


def test_a_test_photo_that_cannot_be_read_is_reported_after_the_first_epoch(dmlkit, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees.photos(Path("photos"), (f"{label}/{index}.png" for label in range(6) for index in range(3)))
    whole = Path("photos/5/1.png").read_bytes()
    Path("photos/5/1.png").write_bytes(whole[: len(whole) // 2])
    changes = ["dataset={name: folder, root: photos, validation_fraction: 0}", "sampler={name: random, batch_size: 8}"]
    words = ["train", recipe, "-o", "run", *CPU, *(word for change in changes for word in ("--set", change))]
    words += ["--set", "transform={name: plain, size: 16}"]
    dmlkit(*words).refused("photos/5/1.png: ")
    assert len(RunFolder(Path("run")).read_metrics()) == 1
    Path("photos/5/1.png").write_bytes(whole)
    assert SCORED in dmlkit(*words, "--resume").ok().out


@pytest.mark.parametrize(("end", "text"), [("json", "{}"), ("npz", ""), ("npz", "gone")])
def test_damaged_figures_are_scored_again_and_left_out_of_comparisons(dmlkit, recipe, run, other, caplog, end, text):
    before = summary_of(run)
    name = f"test-pretrained.{end}"
    path = run / "evaluations" / name
    path.unlink() if text == "gone" else path.write_text(text)
    assert "is left out here" in " ".join(dmlkit("compare", run, other, "--device", "cpu").ok().out.split())
    assert dmlkit("train", recipe, "-o", run, *CPU, "--resume").code == 0
    assert f"{name}: " in caplog.text and "scored again" in caplog.text
    assert summary_of(run) == before


def test_figures_of_other_images_are_left_out(dmlkit, run: Path):
    """As after a photo was removed: both figures would be right, and their difference say nothing about training."""
    assert "after training" in dmlkit("eval", run, "--device", "cpu").out
    path = run / "evaluations" / "test-pretrained.json"
    figures = json.loads(path.read_text())
    path.write_text(json.dumps(figures | {"images": figures["images"][::-1]}))
    shown = " ".join(dmlkit("eval", run, "--device", "cpu").out.split())
    assert "its images have changed since training" in shown and "after training" not in shown


@pytest.mark.parametrize("engine", ["features", "live"])
def test_figures_of_photos_that_changed_are_left_out_and_scored_again(engine, dmlkit, tmp_path, monkeypatch, recipe):
    """Photos copied without their times have the same contents; one replaced under its name has not."""
    monkeypatch.chdir(tmp_path)
    trees.photos(Path("photos"), (f"{label}/{index}.png" for label in range(6) for index in range(3)))
    changes = ["dataset={name: folder, root: photos, validation_fraction: 0}", "sampler={name: random, batch_size: 8}"]
    changes += ["transform={name: plain, size: 16}", "training.epochs=1", "training.workers=0"]
    changes += ["backbone.tuning={name: none}"] if engine == "features" else []
    words = ["train", recipe, "-o", "run", *CPU, *(word for change in changes for word in ("--set", change))]
    assert dmlkit(*words).code == 0
    shutil.copytree("run", "copy")
    compare = ("compare", "run", "copy", "--device", "cpu")
    compared = dmlkit(*compare).ok().out
    seen = dmlkit("eval", "run", "--device", "cpu").out
    assert "after training" in seen
    for path in Path("photos").rglob("*.png"):
        os.utime(path, ns=(1, 1))
    again = dmlkit("eval", "run", "--device", "cpu")
    assert next(line for line in again.out.splitlines() if "after training" in line) in seen
    assert dmlkit(*compare).ok().out == compared and "evaluated again" not in compared
    assert SCORED not in dmlkit(*words, "--resume").ok().out
    trees.photo(Path("photos/4/1.png"), 999)
    changed = dmlkit("eval", "run", "--device", "cpu").out
    assert "photos have changed since it was trained" in changed and "after training" not in changed
    assert SCORED in dmlkit(*words, "--resume").ok().out
    assert "after training" in dmlkit("eval", "run", "--device", "cpu").out


def test_a_new_run_replaces_the_figures_of_an_old_one(dmlkit, recipe: Path, run: Path):
    before = (run / "evaluations" / "test-pretrained.json").read_text()
    words = (*CPU, *ONE, "--overwrite", "--set", "dataset.images_per_class=5")
    assert dmlkit("train", recipe, "-o", run, *words).code == 0
    after = json.loads((run / "evaluations" / "test-pretrained.json").read_text())
    assert after["queries"] == 30 and json.loads(before)["queries"] == 36 and not (run / ".new").exists()


@pytest.mark.parametrize("weights_are", ["a file", "null"])
def test_a_recipe_is_scored_as_its_run_is(dmlkit, recipe: Path, weights: Path, tmp_path: Path, weights_are: str):
    random = ("--set", "backbone.weights=null") if weights_are == "null" else ()
    report = dmlkit("eval", recipe, "--json", "--device", "cpu", *random).json()
    torch.manual_seed(3)
    network = timm.create_model(MODEL, num_classes=0) if random else loaded(weights)
    assert report["metrics"] == pytest.approx(by_hand(network, recipe, "test"), abs=1e-4)
    assert any("a random network (seed 3)" in note for note in report["notes"]) == bool(random)
    run = tmp_path / "run"
    assert dmlkit("train", recipe, "-o", run, *CPU, *ONE, *random).code == 0
    of_run = dmlkit("eval", run, "--checkpoint", "pretrained", "--json", "--device", "cpu").json()
    assert {**of_run, "source": ""} == {**report, "source": ""} | {"question": of_run["question"]}
    if not random:
        stored = json.loads((run / "evaluations" / "test-pretrained.json").read_text())
        assert stored["metrics"] == report["metrics"] and stored["question"]["weights"] == report["question"]["weights"]
    shown = dmlkit("eval", recipe, "--device", "cpu", "--split", "validation", *random)
    assert "validation split of glyphs, timm test_resnet before training" in " ".join(shown.out.split())


def test_mistakes_of_recipes_are_one_line(dmlkit, own: tuple[Path, Path], tmp_path: Path):
    (recipe, weights), run = own, tmp_path / "run"
    assert dmlkit("train", recipe, "-o", run, *CPU, *ONE).code == 0
    for name in ("cut.yaml", "cut.txt"):
        (tmp_path / name).write_text("loss: {")
    (image := tmp_path / "image.png").write_bytes(b"")
    pretrained = ("--checkpoint", "pretrained")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((recipe, "--checkpoint", "best"), "--checkpoint best: applies to a run, but"),
        ((recipe, "--rerank", "expansion"), "--rerank expansion: applies to"),
        ((tmp_path / "cut.txt",), "expected a run, a folder of embeddings, a gallery or a file of vectors"),
        ((tmp_path / "none.yaml", *pretrained), "none.yaml: no such file"),
        ((tmp_path / "cut.yaml",), "cut.yaml:1"),
        ((recipe, "--set", "backbone={name: timm, model: test_resnet, weights: no.pth}"), "no.pth: no such file"),
        (("align", run, run, image, *pretrained), "expected a folder of embeddings or a gallery"),
        (("export", run, "--format", "hub", *pretrained), "has no trained weights; use --format onnx or torch-export"),
    ]
    weights.unlink()
    cases.append(((run, *pretrained), f"{weights}: no such file; restore it, because {run} was trained on it"))
    for words, message in cases:
        dmlkit(*(words if words[0] in ("align", "export") else ("eval", *words))).refused(message)


def test_commands_take_the_checkpoint_before_training(dmlkit, recipe: Path, run: Path, tmp_path: Path):
    alone = ("--checkpoint", "pretrained", "--device", "cpu")
    assert dmlkit("embed", run, "--split", "test", "-o", tmp_path / "out", *alone).code == 0
    read = read_recipe(recipe)
    images = read.dataset.build("test")
    embedder = load(run, checkpoint="pretrained", device="cpu")
    points = np.load(tmp_path / "out" / "embeddings.npy")
    transform = read.transform.evaluation()
    with torch.no_grad():
        pixels = torch.stack([transform(images.sample(index)) for index in range(4)])
        features = embedder.trained.model.backbone(embedder.trained.model.normalization(pixels))
    assert np.allclose(points[:4], torch.nn.functional.normalize(features).numpy(), atol=1e-6)
    for words in (("plot", "heatmap"), ("plot", "histogram"), ("calibrate",)):
        dmlkit(*words, run, *alone).ok()
    result = dmlkit("export", run, "--format", "torch-export", "--checkpoint", "pretrained")
    assert result.code == 0 and "agrees with the run" in result.out, result.err
    dmlkit("compare", run, run, *alone).refused("twice")


def test_compare_shows_what_runs_began_with(dmlkit, home: Path, trained_once: Callable[..., Path], tmp_path: Path):
    first, second = (shutil.copytree(home / of, tmp_path / "a" / of) for of in ("run", "other"))
    fresh = trained_once(tmp_path / "b").rename(tmp_path / "fresh")
    runs = dmlkit("compare", first, second, fresh, "--json", "--device", "cpu").json()["runs"]
    for run, path in zip(runs, (first, second), strict=False):
        pretrained = summary_of(path).pretrained
        assert pretrained and run["pretrained"]["metrics"] == pretrained.test
        changes = {name: change.model_dump() for name, change in pretrained.difference.items()}
        assert run["difference_to_pretrained"] == changes
    assert "pretrained" not in runs[2]
    shown = " ".join(dmlkit("compare", first, second, "-o", tmp_path / "t.md", "--device", "cpu").out.split())
    names = [line.split(" | ")[1] for line in (tmp_path / "t.md").read_text().splitlines()[2:5]]
    assert names == ["run", "other", "pretrained"]
    assert "run: map@r on test: " in shown and "other: map@r on test: " in shown
    assert dmlkit("compare", first, fresh, "-o", tmp_path / "t.md", "--device", "cpu").code == 0
    assert "| pretrained (run) |" in (tmp_path / "t.md").read_text()
    other = dmlkit("compare", first, second, "--device", "cpu", "--set", "transform.size=20")
    again = f"dmlkit eval {first} --checkpoint pretrained --set transform.size=20"
    assert f"was not evaluated like this; for that: {again}" in " ".join(other.out.split())
    assert dmlkit(*again.split()[1:]).code == 0
    other = dmlkit("compare", first, second, "--device", "cpu", "--set", "transform.size=20")
    assert f"for that: {again}" not in " ".join(other.out.split())


@pytest.mark.parametrize(
    ("interval", "tuned", "ends"),
    [
        ((0.081, 0.105), 0.420, "+0.093 (0.081 to 0.105)"),
        ((0.001, 0.005), 0.330, "training did not help here (+0.003, 0.001 to 0.005); "),
        ((0.0, 0.105), 0.420, "no gain is detectable with 30 classes (+0.093, 0.000 to 0.105); "),
        ((-0.05, 0.006), 0.310, "no gain is detectable with 30 classes (-0.017, -0.050 to 0.006); "),
        ((-0.006, 0.001), 0.326, "training did not help here (-0.001, -0.006 to 0.001); "),
        ((-0.003, -0.001), 0.325, "training did not help here (-0.002, -0.003 to -0.001); "),
        ((-0.03, -0.01), 0.307, "training made it worse (-0.020, -0.030 to -0.010); "),
        (None, 0.420, "+0.093, without an interval"),
    ],
)
def test_the_line_says_whether_training_paid(interval, tuned: float, ends: str):
    advice = "another backbone.tuning or more classes, see docs/tuning.md"  # whichever the run has
    for epoch, way in ((9, "epoch 9 of 20 is the best, so try"), (18, "try more epochs,"), (20, "try more epochs,")):
        line = gain_message("map@r", tuned, 0.327, interval, "30 classes", epoch=epoch, epochs=20)
        start = f"map@r on test: {tuned:.3f} after training, 0.327 before: {ends}"
        assert line == (f"{start}{way} {advice}" if ends.endswith("; ") else start)


def sentences(text: str) -> list[str]:
    """Lines of a screen; those that continue another are indented."""
    return text.replace("\n  ", " ").splitlines()


def test_train_eval_and_compare_state_the_same_gain(dmlkit, recipe: Path, tmp_path: Path):
    """The line of `train` comes from summary.json, those of `eval` and `compare` from stored reports."""
    runs = [tmp_path / name for name in ("first", "second")]
    trained = [dmlkit("train", recipe, "-o", run, *CPU, "--set", f"seed={seed}").out for seed, run in enumerate(runs)]
    lines = [next(line for line in sentences(out) if " before: " in line) for out in trained]
    compared = sentences(dmlkit("compare", *runs, "--device", "cpu").out)
    classes = json.loads((runs[0] / "evaluations" / "test-pretrained.json").read_text())["classes"]
    for run, line in zip(runs, lines, strict=True):
        assert line in sentences(dmlkit("eval", run, "--device", "cpu").out)
        assert f"{run.name}: {line}" in compared
        assert "detectable" not in line or f"with {classes} classes" in line
        assert summary_of(run).pretrained.classes == classes
    validation = dmlkit("eval", runs[0], "--split", "validation", "--device", "cpu").out
    assert "map@r on validation: " in validation
    assert "after training" not in dmlkit("eval", runs[0], "--set", "transform.size=20", "--device", "cpu").ok().out


def row(epoch: int, seconds: float | None) -> EpochRow:
    figures = {"seconds": 9.0 * epoch, "validation": {"map@r": 0.1 * epoch}, "training_seconds": seconds}
    return EpochRow(epoch=epoch, loss=1, lr=0.1, images_per_second=1, waiting=0, peak_memory_bytes=epoch, **figures)


def test_curves_have_a_dashed_line_for_what_training_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_curves([row(1, 1.0), row(2, 1.0)], tmp_path / "c.png", pretrained={"map@r": 0.15, "nmi": 0.9})
    plot_curves([row(1, 1.0), row(2, 1.0)], tmp_path / "c.png")
    found = [[(line.get_label(), line.get_linestyle()) for line in figure.axes[1].lines] for figure in drawn]
    assert found == [[("map@r", "-"), ("map@r, pretrained", "--")], [("map@r", "-")]]
    assert list(drawn[0].axes[1].lines[1].get_ydata()) == [0.15, 0.15]


def test_curves_show_every_value_also_those_beyond_0_to_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    values = {"map@r": (0.2, 0.4), "ari": (-0.1, 0.3), "norm": (3.0, 30.0)}
    columns = [{name: pair[epoch] for name, pair in values.items()} for epoch in (0, 1)]
    rows = [row(epoch, 1.0).model_copy(update={"validation": figures}) for epoch, figures in enumerate(columns, 1)]
    plot_curves(rows, tmp_path / "c.png", pretrained={"norm": 40.0})
    plot_curves(rows[:1], tmp_path / "c.png", pretrained={"map@r": 2.0})
    panels = drawn[0].axes[1:]
    seen = {line.get_label(): [*line.get_ydata()] for axes in panels for line in axes.lines}
    assert seen == {
        "map@r": [0.2, 0.4],
        "ari, right axis": [-0.1, 0.3],
        "norm, right axis": [3.0, 30.0],
        "norm, pretrained": [40.0, 40.0],
    }
    for axes in panels:
        low, high = axes.get_ylim()
        assert all(low <= value <= high for line in axes.lines for value in line.get_ydata())
    (legend,) = [axes.get_legend() for axes in panels if axes.get_legend()]
    assert {text.get_text() for text in legend.get_texts()} == {*seen}
    colors = {line.get_label(): line.get_color() for axes in panels for line in axes.lines}
    assert colors.pop("norm, pretrained") == colors["norm, right axis"] and len({*colors.values()}) == 3
    for axes in drawn[1].axes[1:]:  # the value before training alone is beyond
        low, high = axes.get_ylim()
        assert all(low <= value <= high for line in axes.lines for value in line.get_ydata())
    low, high = drawn[1].axes[1].get_xlim()  # of a single epoch
    assert [tick for tick in drawn[1].axes[1].get_xticks() if low <= tick <= high] == [1]


def test_the_seconds_of_an_epoch_are_the_median_of_whole_ones():
    assert seconds_per_epoch([row(1, 9.0), row(2, None), row(3, 2.0), row(4, 1.0)]) == 2.0
    assert seconds_per_epoch([row(1, None)]) is None


def test_a_run_tells_its_cost(home: Path):
    summary, rows = summary_of(home / "run"), RunFolder(home / "run").read_metrics()
    # Linux only estimates the peak: it fell by 24 KB between two epochs
    assert summary.peak_memory_bytes == max(row.peak_memory_bytes or 0 for row in rows)
    assert 10**8 < summary.peak_memory_bytes < 10**11  # torch alone takes more than the one
    assert summary.seconds_per_epoch == seconds_per_epoch(rows)
    assert all(row.training_seconds is not None and row.training_seconds < row.seconds + 0.01 for row in rows)


def test_an_epoch_that_was_stopped_in_between_has_no_seconds_of_its_own(tmp_path: Path):
    with pytest.raises(TrainingStoppedError):
        trained(tmp_path / "run", progress=Stopper(1, last=False))
    rows = RunFolder(trained(tmp_path / "run", resume=True)).read_metrics()
    assert [row.training_seconds is None for row in rows] == [False, True, False]
    assert summary_of(tmp_path / "run").seconds_per_epoch == seconds_per_epoch([rows[0], rows[2]])


@pytest.mark.heavy
def test_two_ranks_score_what_one_would(recipe: Path, weights: Path, tmp_path: Path):
    words = ("train", str(recipe), "-o", str(tmp_path / "run"), *CPU, "--set", "training.epochs=1")
    assert "".join(run_on_ranks(2, command_line, *words)).count("map@r on test: ") == 1
    pretrained = summary_of(tmp_path / "run").pretrained
    assert pretrained
    for split, figures in (("validation", pretrained.validation), ("test", pretrained.test)):
        assert figures == pytest.approx(by_hand(loaded(weights), recipe, split), abs=1e-4)


def test_a_training_that_lost_on_validation_says_so_first_and_what_to_use(
    dmlkit, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """With a made-up map@r of 1 before training, then of 0."""
    run, photos = tmp_path / "run", tmp_path / "photos"
    trees.photos(photos, (f"{label}/{index}.png" for label in range(2) for index in range(2)))
    own = summary_module.compare_with_pretrained

    def better_before(*args: Any) -> Any:
        figures = own(*args)
        return figures and figures.model_copy(update={"validation": {"map@r": 1.0, "recall@1": 1.0}})

    monkeypatch.setattr(summary_module, "compare_with_pretrained", better_before)
    result = dmlkit("train", recipe, "-o", run, *CPU)
    best = summary_of(run).best_score
    lines = result.out[result.out.index("training lost") :].split("\n")
    said = f"training lost: map@r on validation: {best:.3f} after training, 1.000 before"
    assert result.code == 0 and said in " ".join(lines[:2])
    assert result.out.index("training lost") < result.out.index("best (epoch")
    commands: list[tuple[Any, ...]] = [("embed", run, photos), ("gallery", "create", run, photos, "-o", tmp_path / "g")]
    for number, words in enumerate(commands):
        caplog.clear()
        assert dmlkit(*words, "--device", "cpu").code == 0
        assert f"{run}: {said}; --checkpoint pretrained takes the latter" in caplog.text
        caplog.clear()
        words = (*words[:-1], tmp_path / "other") if number else (*words, "-o", tmp_path / "vectors")
        assert dmlkit(*words, "--checkpoint", "pretrained", "--device", "cpu").code == 0 and caplog.text == ""
    caplog.clear()
    final_recipe(run)
    assert said in caplog.text
    summary = summary_of(run)
    assert summary.pretrained
    worse = summary.pretrained.model_copy(update={"validation": {"map@r": 0.0}})
    assert summary.loss_message and summary.model_copy(update={"pretrained": worse}).loss_message is None


def test_curves_read_no_mathematics_and_bear_a_metric_that_an_epoch_lacks_t10(tmp_path: Path):
    validations = enumerate([{"$x^": 0.1, r"$\frac$": 0.2}, {"$x^": 0.2}, None], start=1)
    rows = [row(epoch, 1.0).model_copy(update={"validation": figures}) for epoch, figures in validations]
    plot_curves(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
