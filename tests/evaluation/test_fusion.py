"""Fusion of two runs: scikit-learn's regressions, and sums of the cosines that each run stores alone."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dmlkit.cli.console import fusion_line
from dmlkit.datasets.files.image import read_image
from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation import second
from dmlkit.evaluation.calibration import calibrate_run, sampled_pairs
from dmlkit.evaluation.second import fitted_share, fusion_of, weigh_models
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.identify.identify import identify
from dmlkit.manifolds import Euclidean, Lorentz, Sphere
from dmlkit.nearest.rescore import Rescorer
from dmlkit.vectors.fusion import ModelChoice, join
from dmlkit.vectors.in_memory import Embeddings, fused
from tests.conftest import ROOT, Cli, refuses
from tests.vectors.stored import split_of

SPACES = [Sphere(16), Sphere(16)]


def drawn(classes: int, images: int, spread: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, 1, 16, generator=generator)
    points = centers + spread * torch.randn(classes, images, 16, generator=generator)
    return torch.nn.functional.normalize(points.flatten(0, 1), dim=1)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_cosine_of_joined_points_is_the_weighted_mean(share: float):
    spaces = [Euclidean(5, similarity="cosine"), Lorentz(4, similarity="origin_cosine")]
    points = [space.from_features(torch.randn(6, space.dim)) for space in spaces]
    expected = 0.0
    for weight, own in zip((1 - share, share), (points[0], points[1][:, 1:]), strict=True):
        rows = own.numpy() / np.linalg.norm(own.numpy(), axis=1, keepdims=True)
        expected = expected + weight * rows @ rows.T
    found = join(spaces, points, share)
    assert (found @ found.T).numpy() == pytest.approx(expected, abs=1e-6)


def test_each_image_that_a_fusion_cannot_read_has_its_message():
    """Also two boxes of one file, whose messages are equal, and an image that only one of the models cannot take."""
    members = [SimpleNamespace(manifold=space) for space in SPACES]
    trained: Any = SimpleNamespace(fusion=SimpleNamespace(share=0.5), members=members, device="cpu")
    parts = [
        Embeddings(drawn(1, len(rows), 1.0, 1), torch.zeros(len(rows)), torch.tensor(rows), faults)
        for rows, faults in (([2, 6, 8, 9], ["a: damaged"] * 2), ([2, 6, 8], ["a: damaged"] * 2 + ["b: too large"]))
    ]
    joined = fused(trained, parts, [2, 3, 5, 6, 8, 9])
    assert joined.indices.tolist() == [2, 6, 8]
    assert joined.faults == ["a: damaged", "a: damaged", "b: too large"]


@pytest.mark.parametrize(("together", "says"), [(0.5, True), (0.7, False)])
def test_a_fusion_that_is_worse_than_the_run_alone_is_reported(together: float, says: bool):
    fusion = {"alone": 0.6, "together": together, "weights": "mean", "run": "b", "share": 0.3}
    assert ("the run alone is better" in fusion_line(fusion)) == says


def slopes_of(features: np.ndarray, same: np.ndarray) -> np.ndarray:
    return LogisticRegression(C=1e9, class_weight="balanced", max_iter=1000).fit(features, same).coef_[0]


def test_weights_against_scikit_learn():
    labels = torch.arange(12).repeat_interleave(8)
    points = [drawn(12, 8, 2.2, 1), drawn(12, 8, 3.0, 2)]
    first, second = np.triu_indices(96, 1)
    cosines = np.stack([(own @ own.T).double().numpy()[first, second] for own in points], axis=1)
    same = labels.numpy()[first] == labels.numpy()[second]
    slopes = slopes_of(cosines, same)
    alone = [slopes_of(cosines[:, [column]], same)[0] for column in (0, 1)]
    assert fitted_share("logistic", cosines.T, same) == pytest.approx(slopes[1] / slopes.sum(), abs=0.01)
    assert fitted_share("mean", cosines.T, same) == pytest.approx(alone[1] / sum(alone), abs=0.01)


def test_a_model_of_noise_gets_no_weight_and_the_better_weights_are_taken():
    labels = torch.arange(10).repeat_interleave(8)
    noise = torch.nn.functional.normalize(torch.randn(80, 16, generator=torch.Generator().manual_seed(3)), dim=1)
    good = drawn(10, 8, 1.5, 1)
    _, share, alone, together = weigh_models(SPACES, [good, noise], labels, torch.arange(80))
    assert share < 0.1 and abs(alone - together) < 0.03
    weights, share, alone, together = weigh_models(SPACES, [noise, good], labels, torch.arange(80))
    first, other = sampled_pairs(labels)
    cosines = np.stack([second.similarities_of(SPACES[0], points, first, other) for points in (noise, good)])
    same, folds = (labels[first] == labels[other]).numpy(), np.random.default_rng(0).permutation(10) % 5
    values: dict[Any, list[torch.Tensor]] = {"mean": [], "logistic": []}
    for fold in range(5):  # each class is asked with weights that were fitted to pairs of other folds
        outside = (folds[labels[first]] != fold) & (folds[labels[other]] != fold)
        for name, of_folds in values.items():
            joined = join(SPACES, [noise, good], fitted_share(name, cosines[:, outside], same[outside]))
            asked = torch.from_numpy(folds[labels] == fold)
            of_folds.append(second.map_at_r(joined, labels, torch.arange(80), Sphere(32), asked))
    means = {name: float(torch.cat(of_folds).mean()) for name, of_folds in values.items()}
    assert together == pytest.approx(means[weights]) and means[weights] == max(means.values())
    assert share > 0.9 and together > alone + 0.2
    few = weigh_models(SPACES, [noise[:16], good[:16]], labels[:16], torch.arange(16))
    assert (few.weights, few.alone, few.together) == ("mean", None, None)


def test_a_validation_class_of_one_image_asks_for_nothing():
    labels = torch.cat([torch.arange(4).repeat_interleave(8), torch.tensor([4])])
    points = [drawn(5, 8, 1.5, seed)[:33] for seed in (1, 2)]
    cosines = (points[0].double() @ points[0].T.double()).numpy()
    values: list[float] = []
    for query in range(32):  # map@r with 7 positives, of all but the last image
        order = np.argsort(-np.where(np.arange(33) == query, -2, cosines[query]))[:7]
        hits = labels.numpy()[order] == int(labels[query])
        values.append(float((hits * hits.cumsum() / np.arange(1, 8)).sum() / 7))
    assert weigh_models(SPACES, points, labels, torch.arange(33)).alone == pytest.approx(np.mean(values), abs=1e-6)
    chosen = [0, 1, 8, 9, 16, 24, 32]  # two classes with two images, and three with one
    few = weigh_models(SPACES, [side[chosen] for side in points], labels[chosen], torch.arange(7))
    assert (few.weights, few.alone, few.together) == ("mean", None, None)


def test_images_of_one_group_are_no_pair():
    """Two photos of one moment are alike whatever the model, so they say nothing of it."""
    labels, groups = torch.arange(5).repeat_interleave(8), torch.arange(20).repeat_interleave(2)
    good, noise = drawn(5, 8, 1.5, 1), drawn(40, 1, 1.0, 2)
    noise[1::2] = noise[::2]  # knows moments, not classes
    cosines = (good.double() @ good.T.double()).numpy()
    values: list[float] = []
    for query in range(40):  # map@r with 6 positives in other groups
        order = np.argsort(-np.where(groups.numpy() == int(groups[query]), -2, cosines[query]))[:6]
        hits = labels.numpy()[order] == int(labels[query])
        values.append(float((hits * hits.cumsum() / np.arange(1, 7)).sum() / 6))
    _, share, alone, _ = weigh_models(SPACES, [good, noise], labels, groups)
    assert alone == pytest.approx(np.mean(values), abs=1e-6)
    assert abs(share) < 0.1 < weigh_models(SPACES, [good, noise], labels, torch.arange(40)).share
    one_each = weigh_models(SPACES, [good, noise], labels, labels)  # all images of a class are of one moment
    assert one_each == ("mean", 0.5, None, None)
    assert weigh_models(SPACES, [good, noise], labels, torch.zeros_like(labels)) == one_each  # there is no pair
    images, rescorer = SimpleNamespace(points=good, labels=labels), Rescorer(lambda _, items: items / 40, 0.0, 20)
    for each in (labels, torch.zeros_like(labels)):
        assert second.weigh_scores(cast(Any, images), each, SPACES[0], rescorer) == one_each


def test_nearest_images_far_from_the_origin_are_those_of_numpy():
    points, labels = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) + 1000, torch.arange(40) % 8
    scored = list[tuple[int, int]]()

    def nothing(rows: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        scored.extend((int(row), int(item)) for row, nearest in zip(rows, items, strict=True) for item in nearest)
        return torch.zeros(items.shape)

    rescorer, images = Rescorer(nothing, 0.0, 9), cast(Any, SimpleNamespace(points=points, labels=labels))
    alone = second.weigh_scores(images, torch.arange(40), Euclidean(4), rescorer).alone
    x, values = points.double().numpy(), list[float]()
    order = np.linalg.norm(x[:, None] - x, axis=2).argsort()  # each image first
    for query in range(40):
        hits = labels.numpy()[order[query, 1:5]] == int(labels[query])
        values.append(float((hits * hits.cumsum() / np.arange(1, 5)).sum() / 4))
    assert set(scored) == {(row, int(item)) for row in range(40) for item in order[row, :10]}
    assert alone == pytest.approx(np.mean(values), abs=1e-6)


@pytest.mark.parametrize("other", ["local", "other"])
def test_a_validation_image_that_cannot_be_read_stops_the_choice_of_a_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
):
    """The advice names no option that a second similarity excludes."""
    dataset = SimpleNamespace(require_one_label=lambda _: None, build=lambda _: None, on_bad_image="error")
    trained: Any = SimpleNamespace(recipe=SimpleNamespace(dataset=dataset))
    part = Embeddings(drawn(1, 3, 1.0, 1), torch.zeros(3), torch.arange(3), ["a.jpg: damaged"])
    for name in ("require_torch", "check_fusible", "hash_images"):
        monkeypatch.setattr(second, name, lambda *_: None)
    monkeypatch.setattr(second, "load_model", lambda *_: trained)
    monkeypatch.setattr(second, "split_embeddings", lambda *_, **__: part)
    monkeypatch.setattr(second.RunFolder, "training_classes", lambda _: ("ant",))
    message = "^a.jpg: damaged; repair or remove it$"
    refuses(message, second.choose_second, tmp_path, Path(other), ranks=start_ranks("cpu"))


@pytest.fixture(scope="module")
def two(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same classes, and photos."""
    from PIL import Image

    from dmlkit.recipe.file import read_recipe
    from dmlkit.run_folder.folder import RunFolder
    from dmlkit.training.train import train

    folder = tmp_path_factory.mktemp("two")
    run = Path(shutil.copytree(trained_run, folder / "one"))
    recipe = read_recipe(trained_run / "recipe.yaml", ["training.epochs=2", "embedding_dim=6"])
    train(recipe, folder / "two", device="cpu")
    others = read_recipe(trained_run / "recipe.yaml", ["dataset.validation_fraction=0.2", "seed=8"])
    train(others, folder / "of_others", device="cpu")
    calibrate_run(run, far=0.1)
    dataset = RunFolder(run).recipe().dataset.build("test")
    for index in range(12):
        place = folder / "photos" / dataset.class_names[int(dataset.labels[index])] / f"{index}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dataset.sample(index).permute(1, 2, 0).numpy()).save(place)
    return folder


def stored(run: Path, photos: Path, dmlkit: Cli) -> dict[str, np.ndarray]:
    """Embeddings of photos by one run alone."""
    output = run.parent / f"of_{run.name}"
    if not output.exists():
        assert dmlkit("embed", run, photos, "-o", output, "--device", "cpu").code == 0
    from dmlkit.vectors.folder import EmbeddingFolder

    folder = EmbeddingFolder(output)
    points = np.load(output / "embeddings.npy").astype(float)
    return {Path(path).name: point for path, point in zip(folder.items["path"].to_pylist(), points, strict=True)}


@pytest.mark.slow
def test_a_gallery_of_two_runs_sums_their_cosines(two: Path, tmp_path: Path, dmlkit: Cli):
    gallery, photos = tmp_path / "gallery", two / "photos"
    words = ("--with", two / "two", "--device", "cpu")
    result = dmlkit("gallery", "create", two / "one", photos, "-o", gallery, *words).ok()
    fusion = GalleryFolder(gallery).manifest.fusion
    assert fusion is not None and f"with {fusion.share:.2f} of the similarity of {two / 'two'}" in result.out
    assert f"with {fusion.share:.2f}" in dmlkit("gallery", "info", gallery).out
    one, other = (stored(two / name, photos, dmlkit) for name in ("one", "two"))
    report = dmlkit("search", gallery, photos, "-k", "12", "--device", "cpu", "--json").json()
    for query in report["queries"]:
        name = Path(query["path"]).name
        for neighbor in query["neighbors"]:
            near = Path(neighbor["path"]).name
            expected = (1 - fusion.share) * one[name] @ one[near] + fusion.share * other[name] @ other[near]
            assert neighbor["similarity"] == pytest.approx(expected, abs=1e-5)
    assert dmlkit("gallery", "add", gallery, photos, "--device", "cpu").out.count("already in the gallery") == 1
    moved = Path(shutil.copytree(two / "two", tmp_path / "moved"))
    same = dmlkit("search", gallery, photos, "-k", "12", "--with", moved, "--device", "cpu", "--json")
    assert json.loads(same.out)["queries"] == report["queries"]
    assert "the best guess is correct for 12 of 12" in dmlkit("identify", gallery, photos, "--device", "cpu").ok().out
    dmlkit("identify", gallery, photos, "--with", two / "of_others", "--device", "cpu").refused("fingerprint")
    from dmlkit.serve.service import Service

    model = ModelChoice(fusion=fusion_of(gallery, moved), device="cpu")
    serving = Service(gallery, model)
    asked = sorted(photos.rglob("*.png"))[:4]
    pixels = [read_image(path).permute(1, 2, 0).numpy() for path in asked]
    served = serving.submit(pixels, serving.identify).result()
    serving.close()
    answered = {Path(path).name: answer for path, answer in identify(gallery, photos, model=model).labeled()}
    assert [one["score"] for one in served] == pytest.approx([answered[path.name].score for path in asked], abs=1e-5)
    assert [one["label"] for one in served] == [answered[path.name].label for path in asked]
    dmlkit("serve", gallery, "--with", two / "of_others", "--device", "cpu", "--port", "0").refused("fingerprint")


@pytest.mark.slow
def test_a_gallery_whose_second_run_has_moved(two: Path, tmp_path: Path, dmlkit: Cli):
    """Moved together with gallery and first run it is found; moved alone it is asked for."""
    old, new = tmp_path / "old", tmp_path / "new"
    for name in ("one", "two"):
        shutil.copytree(two / name, old / "runs" / name)
    photos, device = two / "photos", ("--device", "cpu")
    dmlkit(
        *("gallery", "create", old / "runs" / "one", photos, "-o", old / "galleries" / "g"),
        *("--with", old / "runs" / "two", *device),
    ).ok()
    old.rename(new)
    gallery = new / "galleries" / "g"
    add, calibrate = ("gallery", "add", gallery, photos), ("calibrate", gallery, "--fpir", "0.4")
    for words in (add, calibrate, ("identify", gallery, photos), ("search", gallery, photos)):
        result = dmlkit(*words, *device)
        assert "of this gallery is missing" not in result.err and "--run RUN" not in result.err, result.err
        assert result.code == 0 or "images can be compared" in result.err, (words, result)
    moved = (new / "runs" / "two").rename(tmp_path / "elsewhere")
    photo, more = next(photos.rglob("*.png")), tmp_path / "more"
    (more / photo.parent.name).mkdir(parents=True)
    (more / photo.parent.name / "0.png").write_bytes(photo.read_bytes() + b" ")  # another image, with the same pixels
    message = "the second run of this gallery is missing; name it with --with RUN, or put it next to the first"
    review = ("review", gallery, more, "-o", tmp_path / "review")
    others = ((*calibrate, "--strangers", more), ("identify", gallery, more), review)
    for words in ((*add[:3], more), *others):
        dmlkit(*words, *device).refused(message)
        named = dmlkit(*words, "--with", moved, *device)
        assert "is missing" not in named.err, (words, named)
        shutil.rmtree(tmp_path / "review", ignore_errors=True)  # else the review is continued without a model
        dmlkit(*words, "--with", two / "of_others", *device).refused()
    for option in ("--run", "--with"):
        dmlkit("calibrate", two / "one", option, two / "two", *device).refused(
            f"calibrate: {option} {two / 'two'}: names a run of a gallery"
        )


@pytest.mark.slow
def test_a_second_run_named_local(two: Path, tmp_path: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(two / "two", tmp_path / "local")
    monkeypatch.chdir(tmp_path)
    report = dmlkit("eval", two / "one", "--with", "./local", "--device", "cpu", "--json").json()
    assert report["alternative"]["fusion"]["run"] == str(tmp_path / "local")


@pytest.mark.slow
def test_eval_search_and_verify_with_a_second_run(two: Path, tmp_path: Path, dmlkit: Cli):
    from dmlkit.metrics import retrieval_metrics

    answer = dmlkit("eval", two / "one", "--with", two / "two", "--device", "cpu", "--json").json()["alternative"]
    share = answer["fusion"]["share"]
    arrays = [split_of(two / name).points for name in ("one", "two")]
    joined = join([Sphere(8), Sphere(6)], arrays, share)
    metrics = ["recall@1", "recall@2", "map@r"]
    expected = retrieval_metrics(joined, np.arange(36) // 6, manifold=Sphere(14), metrics=metrics)
    assert answer["metrics"] == pytest.approx(expected, abs=1e-9)  # the tiny networks have ties, up to rounding
    plain = dmlkit("eval", two / "one", "--device", "cpu", "--json").json()
    assert plain["alternative"] is None
    difference = answer["metrics"]["map@r"] - plain["metrics"]["map@r"]
    assert answer["differences"]["map@r"]["difference"] == pytest.approx(difference)
    names = sorted((two / "photos").rglob("*.png"), key=lambda path: int(path.stem))[:2]
    words = ("verify", two / "one", *names, "--with", two / "two", "--device", "cpu")
    verdict = dmlkit(*words, "--json").json()
    one, other = (stored(two / name, two / "photos", dmlkit) for name in ("one", "two"))
    first, second = (path.name for path in names)
    score = (1 - share) * one[first] @ one[second] + share * other[first] @ other[second]
    assert verdict["pairs"][0]["score"] == pytest.approx(score, abs=1e-5)
    assert verdict["fusion"]["share"] == share and 0 < verdict["pairs"][0]["probability"] < 1
    assert f"with {share:.2f} of the similarity of" in dmlkit(*words).out
    near = dmlkit("search", two / "one", names[0], "--with", two / "two", "--device", "cpu", "--json").json()
    assert near["queries"][0]["neighbors"][0]["similarity"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_what_cannot_be_fused(two: Path, tmp_path: Path, dmlkit: Cli):
    one, photos, gallery = two / "one", two / "photos", tmp_path / "gallery"
    dmlkit("gallery", "create", one, photos, "-o", gallery, "--device", "cpu")
    for words, message in (
        (("eval", one, "--with", one), "has the same weights as the first run"),
        (("eval", one, "--with", two / "of_others"), "was trained on other classes, or validated on other"),
        (("eval", one, "--with", photos), "no run here"),
        (("eval", gallery, "--with", two / "two"), "compares on a run's own data"),
        (("eval", two / "of_one", "--with", two / "two"), "applies to a run or a gallery"),
        (("search", gallery, photos, "--with", two / "two"), "has embeddings of one run; create a gallery of both"),
    ):
        result = dmlkit(*words, "--device", "cpu") if "eval" not in words else dmlkit(*words)
        assert result.code == 2 and message in result.err, (words, result)
        assert len(result.err.strip().splitlines()) == 1


def test_advice_quotes_a_run_with_a_blank():
    gallery = ROOT / "tests/fixtures/0.1.0/gallery"
    refuses("create RUN IMAGES --with 'my runs/b'$", fusion_of, gallery, Path("my runs/b"))


def test_a_run_in_a_folder_named_local_is_the_second_one_of_a_search(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(second, "kind_of", lambda _: "run")
    monkeypatch.setattr(second, "load_model", lambda *_: None)
    monkeypatch.setattr(second, "choose_fusion", lambda _run, _trained, other, *_: other)
    chosen: Any = fusion_of(Path("one"), Path("local"), device="cpu")
    assert chosen == Path("local")
