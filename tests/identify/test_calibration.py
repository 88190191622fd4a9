"""Open-set identification: NumPy loops, planted truth, and what a person reads."""

import json
import re
import shutil
from collections.abc import Callable
from errno import EROFS
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import t

from dmlkit.evaluation.image_gallery import open_gallery
from dmlkit.gallery.change import add_images, create_gallery, remove_images
from dmlkit.gallery.sources import open_points
from dmlkit.identify import decisions
from dmlkit.identify.calibration import Identification, calibrate_gallery, fit_of, rate_of, threshold_for
from dmlkit.identify.decisions import Decider, labeled_decider
from dmlkit.identify.identify import identify
from dmlkit.identify.probability import Trials, are_repeated
from dmlkit.identify.rule import LabelRule, Rule
from dmlkit.manifolds.sphere import Sphere
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.points import PointsInMemory
from tests.conftest import ONE_EPOCH, Cli, refuses
from tests.datasets import trees
from tests.identify.test_grouped import DIM, drawn
from tests.identify.test_identify_numpy import decide
from tests.vectors.stored import ON_CPU


def decider_of(points: torch.Tensor, codes: np.ndarray, near: float | None = None) -> Decider:
    searched = PointsInMemory("points", Sphere(DIM), points, [""] * len(points), [*map(str, codes)])
    return labeled_decider(searched, near=near)[1]


@pytest.mark.parametrize(("rule", "k"), [("nearest", 1), ("vote", 5)])
def test_labels_and_groups_are_left_out(rule: Rule, k: int, monkeypatch: pytest.MonkeyPatch):
    """Also where few of the first neighbors are of other labels: as many vote as otherwise."""
    monkeypatch.setattr(decisions, "FIRST", 2)  # so that it has to look further
    rows, codes, groups = np.arange(30), np.arange(30) // 6, np.arange(30) // 2  # pairs
    points, owners = drawn(codes, 1, 0.8), codes.astype(str)
    searched = PointsInMemory("points", Sphere(DIM), points, [""] * 30, owners.tolist())
    decider, x = Decider(searched, codes, rule, k, groups), points.double().numpy()
    for absent in (False, True):
        for row, found in zip(rows, decider.decide(points, rows, absent=absent), strict=True):
            kept = codes != codes[row] if absent else groups != groups[row]
            label, score, margin = decide("sphere", k, x[kept], owners[kept].tolist(), x[row])
            assert (str(found.code), found.score) == (label, pytest.approx(score, abs=1e-6))
            assert found.margin == pytest.approx(margin, abs=2e-6)


def test_near_duplicates_are_left_out_together():
    """With each image twice, an image is its copy's neighbor unless both are left out."""
    rows, codes = np.arange(40), np.arange(40) // 5
    once = drawn(codes, 2)
    points, doubled = once.repeat(2, 1), np.tile(codes, 2)
    copies = decider_of(points, doubled).decide(points[:40], rows)
    assert all(decision.score > 0.999 for decision in copies)
    apart, alone = decider_of(points, doubled, near=0.9999), decider_of(once, codes)
    assert [one.code for one in apart.decide(points[:40], rows)] == [one.code for one in alone.decide(once, rows)]
    assert are_repeated(apart).all() and len(np.unique(apart.groups)) == 40
    assert not are_repeated(decider_of(points[::5], doubled[::5], near=0.9999)).any()


def of_labels(classes: np.ndarray, guesses: np.ndarray) -> Trials:
    """Decisions on images of absent labels."""
    nothing = np.zeros(len(classes))
    return Trials(nothing, nothing, nothing > 0, nothing == 0, classes, guesses)


@pytest.mark.parametrize(("fpir", "has_ties"), [(0.02, False), (0.16, True), (0.16, False), (0.5, True)])
def test_each_label_meets_the_threshold_of_the_others(fpir: float, has_ties: bool):
    """The largest share that keeps the rate, where each label is compared with the threshold of images without it."""
    generator = np.random.default_rng(0)
    values, classes, guesses = generator.random(25), *generator.integers(5, size=(2, 25))
    values = np.round(5 * values) / 5 if has_ties else values

    def lowest(kept: np.ndarray, share: float) -> float:
        every = [np.inf, *np.nextafter(kept, np.inf), *kept]
        return min(one for one in every if (kept >= one).mean() <= share)

    def accepted_at(share: float) -> np.ndarray:
        without = [(classes != code) & (guesses != code) for code in classes]
        return np.array([values[row] >= lowest(values[kept], share) for row, kept in enumerate(without)])

    shares = {n / whole for whole in range(1, 26) for n in range(whole)}
    kept = max((share for share in shares if accepted_at(share).mean() <= fpir), default=0.0)
    threshold, accepted = threshold_for(values, of_labels(classes, guesses), fpir)
    assert (accepted == accepted_at(kept)).all()
    assert (values >= threshold).mean() <= kept


def test_a_label_that_alone_is_highest_is_accepted_and_counted():
    values, classes = np.append(np.linspace(0, 0.5, 90), np.linspace(0.6, 0.9, 10)), np.arange(100) % 9
    classes[-10:] = 9
    threshold, accepted = threshold_for(values, of_labels(classes, classes * 0 + 10), 0.05)
    assert accepted.sum() == 10 and accepted[-10:].all() and threshold == np.nextafter(0.9, 1)


def test_the_interval_of_a_rate_against_a_loop_over_pairs_of_images():
    """Images of one label, and of two that are taken for each other, vary together; all else is independent."""
    generator = np.random.default_rng(3)
    classes, guesses = np.repeat(np.arange(12), 10), generator.integers(12, size=120)
    errors = generator.random(120) < 0.1 + 0.4 * (classes % 4 == 0)
    found, rate, variance = rate_of(errors, of_labels(classes, guesses)), errors.mean(), 0.0
    for one in range(120):
        for other in range(120):
            is_mutual = classes[one] == guesses[other] and guesses[one] == classes[other]
            if classes[one] == classes[other] or is_mutual:
                variance += (errors[one] - rate) * (errors[other] - rate) / 120**2 * 12 / 11
    sums = np.array([(errors[classes == code] - rate).sum() for code in range(12)])
    freedom = min(11, 24 / (np.mean(sums**4) / np.mean(sums**2) ** 2 - 1))
    size = rate * (1 - rate) / variance
    assert size < 120 and found.rate == rate and found.interval is not None
    for end in found.interval:
        both = (end + rate) / 2
        assert (end - rate) ** 2 == pytest.approx(t.ppf(0.975, freedom) ** 2 * both * (1 - both) * 2 / size)
    none, few = (rate_of(errors[:count] < 0, of_labels(classes[:count], guesses[:count])) for count in (120, 40))
    assert none.interval == (0.0, pytest.approx(t.ppf(0.975, 11) ** 2 / 12 / (1 + t.ppf(0.975, 11) ** 2 / 24)))
    assert few.interval is None


def test_the_margin_is_left_out_where_it_misleads():
    """Margins that tell wrong guesses from right ones, but are the largest for images of absent labels; and true ones.

    With the misleading ones the FNIR would be 0.32, without them it is 0.185.
    """
    generator, rows = np.random.default_rng(7), np.arange(400)
    absent, labels, (noise, more) = rows % 2 == 0, rows % 40, generator.normal(size=(2, 400))
    right, good = ~absent & (rows % 7 > 0), noise - 3 * absent
    for margins, scores, is_left_out in ((np.where(absent, 1.5, 1.0 * right), good, True), (good, more, False)):
        trials = Trials(margins, scores, right, absent, labels, labels)
        fit = fit_of(trials, 0.05, "cosine")
        said = fit.sigmoid.of(margins, scores)
        assert (fit.margin_slope == 0) == is_left_out
        assert fit.threshold == threshold_for(said[absent], trials.chosen(absent), 0.05)[0]
        assert fit.fnir.rate == (~(right & (said >= fit.threshold)))[~absent].mean() < 0.25


def drawn_trials(generator: np.random.Generator, labels: int) -> Trials:
    """Scores and margins of images of labels, each of which has easy or hard images."""
    classes = np.repeat(np.arange(labels), generator.integers(6, 21, labels))
    effects = generator.normal(size=(3, labels))[:, classes]
    scores = generator.normal(size=(2, len(classes))) + effects[:2] + [[1.0], [-1.2]]
    margins = np.abs(0.6 * generator.normal(size=(2, len(classes))) + [[0.8], [0.0]])
    chance = 1 / (1 + np.exp(-0.4 - 1.2 * scores[0] - 1.5 * margins[0] - 0.5 * effects[2]))
    right = np.append(generator.random(len(classes)) < chance, np.zeros(len(classes), bool))
    absent = np.arange(len(right)) >= len(classes)
    return Trials(margins.ravel(), scores.ravel(), right, absent, np.tile(classes, 2), np.tile(classes, 2))


def test_the_intervals_hold_the_rates_of_other_labels():
    """95 % of 200 repetitions are 190, and fewer than 180 have a probability of 0.002; draws at a fixed threshold held
    the FNIR in 174.
    """
    generator, held = np.random.default_rng(0), np.zeros(2)
    for _ in range(200):
        trials, new = drawn_trials(generator, 20), drawn_trials(generator, 20)
        fit = fit_of(trials, 0.05, "cosine")
        accepted = fit.sigmoid.of(new.margins, new.scores) >= fit.threshold
        errors = accepted[new.absent], ~(new.right & accepted)[~new.absent]
        for kind, interval in enumerate((fit.fpir.interval, fit.fnir.interval)):
            assert interval is not None
            held[kind] += interval[0] <= errors[kind].mean() <= interval[1]
    assert held.min() >= 180


def test_other_labels_reach_the_threshold_no_more_often_than_was_asked_for():
    """A threshold that 0.1 of the images of 10 labels reach is reached by 0.113 of others, 3.5 standard errors more."""
    generator, rates = np.random.default_rng(1), list[float]()
    for _ in range(400):
        fit, new = fit_of(drawn_trials(generator, 10), 0.1, "cosine"), drawn_trials(generator, 20)
        rates.append(float((fit.sigmoid.of(new.margins, new.scores) >= fit.threshold)[new.absent].mean()))
    assert 0.09 < np.mean(rates) < 0.1 + 2 * np.std(rates) / 20


def test_held_out_probabilities_are_of_other_classes():
    margins, absent = np.random.default_rng(6).random(300), np.arange(300) % 2 == 0
    trials = Trials(margins, margins, (margins > 0.5) & ~absent, absent, *2 * [np.arange(300) % 30])
    found = trials.held_out_probabilities()
    classes = np.random.default_rng(0).permutation(30)[trials.classes] % 5
    for fold in range(5):
        fitted = trials.chosen(classes != fold).fit()
        assert found[classes == fold] == pytest.approx(fitted.of(margins, margins)[classes == fold])


@pytest.fixture
def gallery(place: Path, tmp_path: Path) -> Path:
    create_gallery(place / "run", place / "photos", tmp_path / "birds", model=ON_CPU)
    return tmp_path / "birds"


@pytest.mark.slow
def test_a_gallery_is_calibrated_and_identify_uses_it(gallery: Path, tmp_path: Path, dmlkit: Cli):
    trees.photos(tmp_path / "asked", (f"{index}.jpg" for index in range(6)), first=40, side=(40, 30))
    words = ("identify", gallery, tmp_path / "asked", "--device", "cpu", "-o", tmp_path / "answers.json")
    before = dmlkit(*words)
    said = " ".join(before.out.split())
    assert before.code == 0 and "no image is unknown without a threshold; run dmlkit calibrate" in said
    result = dmlkit("calibrate", gallery, "--fpir", "0.5", "--device", "cpu").ok()
    found = Identification.read(gallery / "identification.json")
    (fit,) = found.fits  # too few images for groups
    assert fit.fpir.rate <= 0.5 and found.images == 12 and found.requested == 0.5
    assert f"if its probability is at least {fit.threshold:.3f}" in result.out and "FPIR" in result.out
    assert f"calibrated, least one {fit.threshold:.3f}\n" in dmlkit("gallery", "info", gallery).ok().out
    shown, way = " ".join(result.out.split()), f"dmlkit duplicates {gallery} proposes the similarity"
    assert way in shown and f"next: dmlkit identify {gallery} IMAGES" in shown
    after = dmlkit(*words)
    assert "(probability below" in after.out and "note:" not in after.out
    document = json.loads((tmp_path / "answers.json").read_text())
    assert document["threshold"] is None
    for answer in document["images"]:
        assert answer["least_probability"] == fit.threshold
        said = fit.sigmoid.at(answer["margin"], answer["score"])
        assert answer["probability"] == pytest.approx(said)
        assert answer["label"] == (answer["guess"] if said >= fit.threshold else "unknown")
    by_score = identify(gallery, tmp_path / "asked", rule=LabelRule(threshold=-1e9), model=ON_CPU)
    assert all(one.least_probability is None and one.label != "unknown" for one in by_score.answers)
    assert open_gallery(gallery, device="cpu").calibrate(fpir=0.5) == found


@pytest.mark.slow
def test_a_gallery_that_is_too_small_for_a_calibration_says_what_it_lacks(
    trained_once: Callable[..., Path], place: Path, tmp_path: Path
):
    """Without validation images of the run, `identify` advises what `calibrate` asks for; 6 images are enough."""
    trained_once(tmp_path, ONE_EPOCH.replace("validation_fraction: 0.34", "validation_fraction: 0"))
    assert not RunFolder(tmp_path / "run").recipe().dataset.validates
    path, photos = tmp_path / "birds", [place / "photos" / name / "0.jpg" for name in ("crow", "dove")]
    single, more = "each label has a single image", "add images until there are 6 with at least 2"
    create_gallery(tmp_path / "run", None, path, model=ON_CPU)
    for index in range(6):
        photo = tmp_path / f"{index}.jpg"
        trees.photo(photo, 60 + index, (40, 30))
        add_images(path, photo, label="crow" if index % 2 else "dove", model=ON_CPU)
        note = identify(path, photos[0], model=ON_CPU).note or ""
        assert ("; run" if index == 5 else "then run") + " dmlkit calibrate" in note
        assert (more in note) == (index < 5) and (f"{single}: add a second image of" in note) == (index < 2)
        if index < 2:
            refuses(f"{single}.*; add a second image of some labels", calibrate_gallery, path, model=ON_CPU)
        elif index < 5:
            message = f"at least 6 images of absent labels, got {index + 1}; {more}"
            refuses(message, calibrate_gallery, path, model=ON_CPU)
    assert not (path / "identification.json").exists()
    assert calibrate_gallery(path, model=ON_CPU).requested == 0.84


@pytest.mark.slow
def test_identify_says_how_much_has_changed_and_calibrates_nothing(gallery: Path, tmp_path: Path):
    first = calibrate_gallery(gallery, fpir=0.5, model=ON_CPU)
    kept = (gallery / "identification.json").read_bytes()
    for count in (1, 2):  # 1 of 12 is less than a tenth, 2 are more
        trees.photo(tmp_path / f"more{count}" / "gull" / "0.jpg", 70 + count, (40, 30))
        add_images(gallery, tmp_path / f"more{count}", model=ON_CPU)
        identified = identify(gallery, tmp_path / "more1", model=ON_CPU)
        assert (identified.note is None) == (count == 1)
        (answer,) = identified.answers
        assert answer.least_probability == first.fits[0].threshold
        assert answer.probability == first.fits[0].sigmoid.at(answer.margin, answer.score)
    changed, advice = f"17% of the images of {gallery} have changed", f"; run dmlkit calibrate {gallery} again"
    assert identified.note is not None and changed in identified.note and advice in identified.note
    remove_images(gallery, labels=["gull"])  # the 2 new ones and 3 others
    again = identify(gallery, tmp_path / "more1", model=ON_CPU)
    assert again.note is not None and "58% of the images" in again.note
    assert (gallery / "identification.json").read_bytes() == kept
    assert [*gallery.glob("strangers*")] == []


@pytest.mark.slow
def test_near_duplicates_count_as_one_image(gallery: Path):
    opened = open_points(gallery)
    points = opened.points_at(torch.arange(12))
    first_of, second_of = torch.combinations(torch.arange(12)).T
    near = float(opened.manifold.paired_similarity(points[first_of], points[second_of]).median())
    calibration = calibrate_gallery(gallery, fpir=0.5, near=near, model=ON_CPU)
    assert calibration.near == near
    assert calibration.reliability != calibrate_gallery(gallery, fpir=0.5, model=ON_CPU).reliability


@pytest.mark.slow
def test_mistakes_change_nothing(gallery: Path, place: Path, dmlkit: Cli):
    for words, message in (
        ((gallery, "--fpir", "1.5"), "--fpir 1.5: expected a share between 0 and 1"),
        (
            (gallery, "--fpir", "0.0001"),
            "needs at least 50,000 images of absent labels, got 30; the lowest possible is 0.17",
        ),
        ((gallery, "--far", "0.1"), "--far 0.1: applies to a run"),
        ((place / "run", "--fpir", "0.1"), "--fpir 0.1: applies to a gallery"),
        ((gallery, "--fpir", "0.5", "--near", "2"), "--near 2: expected at most 0, since the similarity is"),
    ):
        dmlkit("calibrate", *words).refused(message)
    assert not (gallery / "identification.json").exists()
    lowest = dmlkit("calibrate", gallery)  # 30 images do not allow 0.01
    assert lowest.code == 0 and "requested FPIR: 0.17, the lowest that 30 images" in " ".join(lowest.out.split())
    assert Identification.read(gallery / "identification.json").requested == 0.17
    (gallery / "identification.json").write_text("{")
    refuses(r"identification\.json", identify, gallery, place / "photos" / "crow", model=ON_CPU)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    dmlkit: Cli, gallery: Path, place: Path, monkeypatch: pytest.MonkeyPatch
):
    def read_only(dir: Path) -> None:  # noqa: A002 - as tempfile names it
        raise OSError(EROFS, "Read-only file system", str(dir / "tmp"))

    monkeypatch.setattr("dmlkit.files.outputs.TemporaryFile", read_only)
    monkeypatch.setattr("dmlkit.identify.calibration.labeled_decider", None)
    monkeypatch.setattr("dmlkit.evaluation.calibration.points_of_split", None)
    for folder in (gallery, place / "run"):
        result = dmlkit("calibrate", folder, "--device", "cpu").refused()
        assert result.err == f"error: {folder}: cannot write into this folder: Read-only file system\n"


@pytest.mark.slow
def test_strangers_that_cannot_be_read_are_told(gallery: Path, tmp_path: Path, dmlkit: Cli):
    trees.photos(tmp_path / "strangers", (f"{index}.jpg" for index in range(4)), first=40, side=(40, 30))
    for name in ("x.jpg", "y.jpg"):
        (tmp_path / "strangers" / name).write_bytes(b"none")
    said = dmlkit("calibrate", gallery, "--fpir", "0.5", "--strangers", tmp_path / "strangers", "--device", "cpu").ok()
    assert "x.jpg: cannot read this image" in said.err and "1 more of this kind" in said.err


@pytest.mark.slow
def test_labels_that_the_model_was_trained_on_are_counted_where_they_are_left_out(tmp_path: Path, dmlkit: Cli):
    trees.birds(tmp_path / "photos", "abcdefghij", each=3)
    dataset = f"dataset: {{name: folder, root: {tmp_path / 'photos'}}}"
    (tmp_path / "recipe.yaml").write_text(re.sub("^dataset: .+", dataset, ONE_EPOCH, flags=re.MULTILINE))
    dmlkit("train", tmp_path / "recipe.yaml", "-o", tmp_path / "run", "--device", "cpu").ok()
    dmlkit("gallery", "create", tmp_path / "run", tmp_path / "photos", "-o", tmp_path / "all", "--device", "cpu").ok()
    trained = json.loads((tmp_path / "run/classes.json").read_text())["training_classes"]
    said = " ".join(dmlkit("calibrate", tmp_path / "all", "--fpir", "0.5", "--device", "cpu").ok().out.split())
    assert f"share of {30 - 3 * len(trained)} images of {10 - len(trained)} absent labels" in said
    assert f"left out of both: {len(trained)} labels that the model was trained on" in said


def test_strangers_that_the_gallery_knows_are_counted(files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    gallery, photos, model = files / "gallery", files / "photos", ModelChoice(files / "run", device="cpu")
    shutil.copytree(photos / "A", tmp_path / "asked" / "A")
    refuses(
        "asked: 5 of 5 images have labels of .*gallery; expected images of other labels",
        *(calibrate_gallery, gallery),
        strangers=tmp_path / "asked",
        model=model,
    )
    trees.photos(tmp_path / "asked" / "Z", ("0.jpg", "1.jpg"), first=40, side=(16, 16))
    calibrate_gallery(gallery, fpir=0.5, strangers=tmp_path / "asked", model=model)
    assert f"asked: left out: 5 of 7 images have labels of {gallery}" in caplog.text
