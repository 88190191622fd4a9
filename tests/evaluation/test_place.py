"""`dmlkit eval --with place` on simulated sightings, whose home range is known."""

import json
from collections.abc import Callable
from math import inf, isfinite
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from dmlkit.evaluation.image_gallery import open_gallery
from dmlkit.evaluation.second import fit_range, weigh_place
from dmlkit.files.source import partner_path
from dmlkit.manifolds import Sphere
from dmlkit.nearest.place import Range, Sightings
from dmlkit.vectors.in_memory import Embeddings
from tests.conftest import TINY_RECIPE, Result
from tests.datasets import trees
from tests.metrics.test_place import naive_evidence
from tests.vectors.stored import split_of

Cli = Callable[..., Result]
KM = 1 / 111.195  # degrees of latitude


def simulated(
    animals: int, images: int, seed: int, moves: float = 0.0, side: float = 30
) -> tuple[np.ndarray, np.ndarray]:
    """Latitude, longitude and days of sightings near the equator, within about 1 km of homes in a square of a side.

    Homes move by ``moves`` km per square root of a day in each direction.
    """
    generator = np.random.default_rng(seed)
    labels, days = np.arange(animals).repeat(images), generator.uniform(0, 400, animals * images)
    homes = generator.uniform(0, side, (animals, 2))[labels]
    walk = moves * generator.normal(size=(animals, 401, 2)).cumsum(axis=1)[labels, days.astype(int)]
    places = homes + walk + generator.normal(size=homes.shape)
    return np.column_stack([places * KM, days]), labels


def sightings(rows: np.ndarray) -> Sightings:
    return Sightings.at(*(torch.from_numpy(column.copy()) for column in rows.T))


def pairs_of(
    rows: np.ndarray, labels: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, tuple[Sightings, Sightings]]:
    """Similarities, which say something, of all pairs, and whether they are of one animal."""
    first, second = np.triu_indices(len(rows), 1)
    same = labels[first] == labels[second]
    similarity = np.random.default_rng(seed).normal(same * 1.0, 1.0)
    return similarity, same, (sightings(rows[first]), sightings(rows[second]))


@pytest.mark.parametrize("moves", [0.0, 0.3])
def test_the_range_has_the_highest_likelihood_of_the_grid(moves: float):
    """Against scikit-learn's logistic regression; homes that move give a decay, and others none."""
    rows, labels = simulated(12, 8, 1, moves, side=6)
    similarity, same, sides = pairs_of(rows, labels, 2)
    found = fit_range(similarity, same, sides)
    weights = np.where(same, 0.5 / same.mean(), 0.5 / (~same).mean())

    def loss(span: Range) -> float:
        features = np.stack([similarity, span.evidence(*sides).numpy()], axis=1)
        said = (
            LogisticRegression(C=1e9, max_iter=1000).fit(features, same, sample_weight=weights).predict_proba(features)
        )
        return -float(weights @ np.log(said[np.arange(len(same)), same.astype(int)]))

    scaled = [found._replace(kilometers=found.kilometers * factor) for factor in (0.5, 2.0)]
    others = [found._replace(days=found.days * 4 if isfinite(found.days) else 100.0)]
    assert all(loss(found) <= loss(other) * 1.005 for other in (*scaled, *others))
    if moves == 0:  # the difference of two sightings has a deviation of 2^0.5 km
        assert found.days == inf and found.kilometers == pytest.approx(2**0.5, rel=0.2)
    else:
        assert isfinite(found.days) and found.spread > found.kilometers > 2**0.5


def test_pairs_without_a_place_say_nothing():
    rows, labels = simulated(5, 4, 3)
    rows[:, 0] = np.nan
    similarity, same, sides = pairs_of(rows, labels, 4)
    span = fit_range(similarity, same, sides)
    assert span == Range(1.0, 1.0, inf) and not span.evidence(*sides).any()


def test_the_weight_is_chosen_by_classes_that_did_not_fit_it():
    """Points of noise, and places that tell the animals apart: the evidence gets the weight, and raises map@r."""
    rows, labels = simulated(12, 6, 5)
    noise = torch.nn.functional.normalize(torch.randn(72, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    found = Embeddings(noise, torch.from_numpy(labels), torch.arange(72), [])
    _, share, alone, together = weigh_place(found, Sphere(4), sightings(rows))[1]
    assert share > 0.5 and alone is not None and together is not None and together > alone + 0.3
    elsewhere = sightings(np.random.default_rng(0).permutation(rows))  # of other images: they say nothing
    assert weigh_place(found, Sphere(4), elsewhere)[1].together == pytest.approx(alone, abs=0.05)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a table of 12 animals with places and times."""
    from dmlkit.training.train import train

    folder = tmp_path_factory.mktemp("place")
    rows, labels = simulated(12, 6, 7)
    lines = ["path,label,latitude,longitude,time"]
    for row, (latitude, longitude, days) in enumerate(rows):
        trees.photo(folder / "photos" / f"{row}.jpg", row, (16, 16))
        time = np.datetime64("2026-01-01T00:00:00") + np.timedelta64(round(days * 86_400), "s")
        lines.append(f"{row}.jpg,animal{labels[row]:02},{latitude:.9f},{longitude:.9f},{time}")
    lines[-1] = f"71.jpg,animal11,,,{time}"  # a place that is not known
    (folder / "photos" / "table.csv").write_text("\n".join(lines) + "\n")
    first, _, rest = TINY_RECIPE.replace("epochs: 3", "epochs: 1, workers: 0").partition("dataset:")
    dataset = f"dataset: {{name: table, file: {folder}/photos/table.csv, validation_fraction: 0.5}}\n"
    (folder / "recipe.yaml").write_text(first + dataset + rest.partition("\n")[2])
    train(folder / "recipe.yaml", folder / "run", device="cpu")
    return folder / "run"


@pytest.mark.slow
def test_eval_adds_the_evidence_to_the_similarity(run: Path, dmlkit: Cli):
    """Against a loop over pairs of test images, with the range and the weight that are reported."""
    from dmlkit.metrics.scoring import metrics_from_hits

    words = ("eval", run, "--with", "place", "--metric", "map@r", "--device", "cpu")
    found = json.loads(dmlkit(*words, "--json").out)
    fusion = found["alternative"]["fusion"]
    assert fusion["run"] == "place" and 0 < fusion["share"] <= 1
    span = Range(fusion["kilometers"], fusion["spread"], fusion["days"] or inf)
    stored = split_of(run)
    places = [int(Path(path).stem) for path in stored.paths]
    rows = simulated(12, 6, 7)[0][places]
    rows[np.array(places) == 71, :2] = np.nan
    points = stored.points.numpy().astype(float)
    evidence = np.array([[naive_evidence(one, other, span) for other in rows] for one in rows])
    scores = (1 - fusion["share"]) * points @ points.T + fusion["share"] * evidence
    np.fill_diagonal(scores, -inf)
    labels = np.array(stored.labels)
    same = labels == labels[:, None]

    def map_at_r(favor: float) -> float:
        order = np.argsort(-(scores + favor * same), axis=1)[:, : len(rows) - 1]
        hits = np.take_along_axis(same, order, axis=1)
        return metrics_from_hits(hits, np.full(len(rows), 5), ["map@r"])["map@r"]

    # times are written in whole seconds and vectors in float32, so scores this close may change places
    assert map_at_r(-1e-5) - 1e-6 <= found["alternative"]["metrics"]["map@r"] <= map_at_r(1e-5) + 1e-6
    assert map_at_r(1e-5) - map_at_r(-1e-5) < 0.05
    assert found["alternative"]["metrics"]["map@r"] > found["metrics"]["map@r"] + 0.2
    shown = dmlkit(*words).out
    assert "of place and time: home range" in shown


@pytest.fixture(scope="module")
def asked(run: Path) -> tuple[Path, Path, np.ndarray]:
    """A gallery of the first 4 sightings of each animal, a table of the others, and their rows."""
    from dmlkit.gallery.change import create_gallery
    from dmlkit.vectors.fusion import ModelChoice

    photos = run.parent / "photos"
    header, *lines = (photos / "table.csv").read_text().splitlines()
    for name, wanted in (("known", (0, 1, 2, 3)), ("asked", (4, 5))):
        kept = [line for row, line in enumerate(lines) if row % 6 in wanted]
        (photos / f"{name}.csv").write_text("\n".join([header, *kept]) + "\n")
    create_gallery(run, photos / "known.csv", run.parent / "gallery", model=ModelChoice(device="cpu"))
    rows = simulated(12, 6, 7)[0]
    rows[71, :2] = np.nan
    return run.parent / "gallery", photos / "asked.csv", rows


@pytest.mark.slow
def test_a_gallery_answers_by_place_and_time(asked: tuple[Path, Path, np.ndarray], dmlkit: Cli, tmp_path: Path):
    """Against a loop over queries and images, with the range and weight that `place_in` chooses."""
    from dmlkit.evaluation.second import place_in
    from dmlkit.gallery.folder import GalleryFolder

    gallery, table, rows = asked
    place = place_in(GalleryFolder(gallery), device="cpu")
    assert place.share > 0.1
    found = json.loads(dmlkit("search", gallery, table, "--with", "place", "-k", 3, "--json", "--device", "cpu").out)
    plain = json.loads(dmlkit("search", gallery, table, "-k", 48, "--json", "--device", "cpu").out)
    assert found["similarity"] == "cosine_and_place"
    for query, alone in zip(found["queries"], plain["queries"], strict=True):
        seen = rows[int(Path(query["path"]).stem)]
        expected = {
            one["path"]: (1 - place.share) * one["similarity"]
            + place.share * naive_evidence(seen, rows[int(Path(one["path"]).stem)], place.range)
            for one in alone["neighbors"]
        }
        got = {one["path"]: one["similarity"] for one in query["neighbors"]}
        assert got == pytest.approx({path: expected[path] for path in got}, abs=1e-4)
        assert list(got.values()) == pytest.approx(sorted(expected.values(), reverse=True)[:3], abs=1e-4)
    right = {}
    for words in ((), ("--with", "place"), ("--with", "place", "--by", "label")):
        result = dmlkit("identify", gallery, table, *words, "-o", tmp_path / "answers.json", "--device", "cpu")
        assert result.code == 0, result
        images = json.loads((tmp_path / "answers.json").read_text())["images"]
        right[words] = sum(one["guess"] == one["known"] for one in images) / len(images)
        assert all(0 <= one["probability"] <= 1 for one in images)
    assert right["--with", "place"] > right[()] + 0.2 and len(images) == 12
    assert right[words] >= right["--with", "place"]
    assert "of place and time: home range" in result.out and "no image is unknown without a threshold" in result.out
    assert GalleryFolder(gallery).sightings[0].time == table.with_name("known.csv").read_text().split()[1].split(",")[4]


@pytest.mark.slow
def test_a_calibrated_gallery_is_calibrated_for_places(asked, dmlkit, tmp_path):
    """A loop over the images without their labels gives about the requested share of them a label."""
    from dmlkit.evaluation.second import place_in
    from dmlkit.gallery.folder import GalleryFolder
    from dmlkit.identify.calibrated import Identification

    gallery, table, rows = asked
    words = ("identify", gallery, table, "--with", "place", "-o", tmp_path / "a.json", "--device", "cpu")
    calibrate = ("calibrate", gallery, "--fpir", "0.2", "--device", "cpu")
    assert dmlkit(*calibrate).code == 0
    other = dmlkit(*words)  # no threshold of other scores is used
    assert other.code == 0 and f"dmlkit calibrate {gallery} --with place" in " ".join(other.out.split())
    assert {one["least_probability"] for one in json.loads((tmp_path / "a.json").read_text())["images"]} == {None}
    assert f"identify {gallery} IMAGES --with place" in dmlkit(*calibrate, "--with", "place").out
    stored = Identification.read(gallery / "identification.json")
    fit = stored.fits[0]
    assert fit.similarity == "cosine_and_place" and "cosine" in {one.similarity for one in stored.fits}
    folder = GalleryFolder(gallery)
    place, points = place_in(folder, device="cpu"), folder.points_at(torch.arange(len(folder))).numpy()
    seen = rows[[int(Path(path).stem) for path in folder.paths]]
    evidence = np.array([[naive_evidence(one, other, place.range) for other in seen] for one in seen])
    scores, labels = (1 - place.share) * points @ points.T + place.share * evidence, np.array(folder.labels)
    reached: list[bool] = []
    for row, label in enumerate(labels):
        best = sorted((scores[row, labels == other].max() for other in {*labels} - {label}), reverse=True)
        reached.append(fit.sigmoid.at(best[0] - best[1], best[0]) >= fit.threshold)
    assert 0.1 <= np.mean(reached) <= 0.3
    assert dmlkit(*words).code == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert {one["least_probability"] for one in found["images"]} == {fit.threshold}
    known = (*calibrate, "--with", "place", "--strangers", table)
    wrong = dmlkit(*known, "--by", "animal")
    assert wrong.code == 2 and "--by animal: does not apply to --with place" in wrong.err, wrong
    lynx = open_gallery(gallery, device="cpu")
    answers = lynx.identify(table, place=True)
    assert [answer.score for answer in answers.answers] == [one["score"] for one in found["images"]]
    strays = table.with_name("strays.csv")
    strays.write_text(table.read_text().replace(",animal", ",stray"))
    assert dmlkit(*known[:-1], strays).code == 0
    assert Identification.read(gallery / "identification.json").fits[0] != fit  # with strangers
    near = lynx.search(table, k=2, place=True)
    assert near.similarity_name == "cosine_and_place" and next(near.neighbors())[1][0].item.id in ids_of(gallery)


def ids_of(gallery: Path) -> list[str]:
    from dmlkit.gallery.folder import GalleryFolder

    return GalleryFolder(gallery).ids


@pytest.mark.slow
def test_mistakes_with_a_gallery(asked: tuple[Path, Path, np.ndarray], run: Path, tmp_path: Path, dmlkit: Cli):
    gallery, table, _ = asked
    photos, text = table.parent, table.read_text()
    bad, nowhere, plain = photos / "bad.csv", photos / "nowhere.csv", photos / "plain.csv"
    bad.write_text(text.replace(",animal00,", ",animal00,9", 1))
    nowhere.write_text("path,latitude,longitude\n0.jpg,,\n")
    plain.write_text("path,label,lattitude,longitude\n0.jpg,animal00,1,1\n")
    empty = tmp_path / "plain"
    assert dmlkit("gallery", "create", run, plain, "-o", empty, "--device", "cpu").code == 0
    cases = (
        (("search", gallery, photos / "0.jpg"), "0.jpg has no places; give a table with the columns"),
        (("identify", gallery, bad), "latitude: got '9"),
        (("search", gallery, nowhere), "nowhere.csv has latitude"),
        (("search", gallery, plain), "did you mean 'lattitude'?"),
        (("search", empty, table), "has a place; create a gallery from a table with the columns"),
        (("search", run, table), "--with place: applies to a gallery, but"),
        (("search", gallery, table, "--rerank", "expansion"), "--rerank: does not apply to --with place"),
    )
    for words, message in cases:
        wrong = dmlkit(*words, "--with", "place", "--device", "cpu")
        assert wrong.code == 2 and message in wrong.err and len(wrong.err.strip().splitlines()) == 1, (words, wrong)
    wrong = dmlkit("gallery", "add", gallery, bad, "--device", "cpu")
    assert wrong.code == 2 and "latitude: got '9" in wrong.err and "version 1" in dmlkit("gallery", "info", gallery).out
    bad.write_text(text.replace(",animal00,", ",animal00,9", 2))  # all faults are named at once
    wrong = dmlkit("gallery", "add", gallery, bad, "--device", "cpu")
    assert wrong.err.count("latitude: got '9") == 1 and "; 1 more of this kind: " in wrong.err


@pytest.mark.slow
def test_options_that_do_not_apply_are_refused_before_anything_is_embedded(asked, dmlkit, monkeypatch):
    def embed(*_: object, **__: object) -> None:
        raise AssertionError("images are embedded to choose the weight of places")

    monkeypatch.setattr("dmlkit.evaluation.second.choose_place", embed)
    gallery, table, _ = asked
    for words, message in (
        (("identify", gallery, table, "-k", "3"), "-k 3: applies to --method vote"),
        (("identify", gallery, table, "--threshold", "nan"), "--threshold nan: expected a similarity"),
        (("search", gallery, table, "--rerank", "expansion"), "--rerank: does not apply to --with place"),
    ):
        wrong = dmlkit(*words, "--with", "place", "--device", "cpu")
        assert wrong.code == 2 and message in wrong.err, wrong


@pytest.mark.slow
def test_mistakes(run: Path, tmp_path: Path, trained_run: Path, dmlkit: Cli):
    table = run.parent / "photos" / "table.csv"
    text = table.read_text()
    words = ("eval", run, "--with", "place", "--device", "cpu")
    lines = [line.split(",") for line in text.splitlines()]
    for column, cell, message in (
        (2, "95", "latitude: got '95', expected degrees from -90 to 90"),
        (2, "north", "latitude: got 'north', expected degrees"),
        (3, "-181", "longitude: got '-181', expected degrees from -180 to 180"),
        (3, "nan", "longitude: got 'nan', expected degrees"),
        (4, "5 May", "time: got '5 May', expected a date or a time such as 2026-05-31"),
    ):
        changed = [lines[0], *([*line[:column], cell, *line[column + 1 :]] for line in lines[1:])]
        table.write_text("\n".join(",".join(line) for line in changed) + "\n")
        wrong = dmlkit(*words)
        assert wrong.code == 2 and message in wrong.err and f"{table}: " in wrong.err, (message, wrong)
        assert len(wrong.err.strip().splitlines()) == 1
    table.write_text(text.replace("latitude", "lattitude", 1))
    wrong = dmlkit(*words)
    assert wrong.code == 2 and "did you mean 'lattitude'?" in wrong.err, wrong
    table.write_text(text)
    for more, message in (
        (("--rerank", "expansion"), "--with place: orders the nearest images itself; remove --rerank"),
        (("--set", "dataset.seed=1"), "--with place: compares on a run's own data"),
    ):
        wrong = dmlkit(*words, *more)
        assert wrong.code == 2 and message in wrong.err, wrong.err
    glyphs = dmlkit("eval", trained_run, "--with", "place", "--device", "cpu")
    assert glyphs.code == 2 and "--with place: the dataset is glyphs, which has no columns" in glyphs.err
    verified = dmlkit(
        "verify", run, run.parent / "photos" / "0.jpg", run.parent / "photos" / "1.jpg", "--with", "place"
    )
    assert verified.code == 2 and "place: only eval, identify, search and calibrate compare places" in verified.err
    assert partner_path("./place") == Path.cwd() / "place" and partner_path("place") == Path("place")
