"""Galleries with patches: what they keep, and the answers of search, identify and calibrate, against loops."""

import json
import shutil
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dmlkit import load
from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation.second import choose_second
from dmlkit.gallery.change import add_images, create_gallery, gallery_model, remove_images, restore_version
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.manifest import GalleryModel
from dmlkit.gallery.migrate import migrate_gallery
from dmlkit.identify import search as searching
from dmlkit.identify.calibration import Identification
from dmlkit.identify.decisions import labeled_decider
from dmlkit.identify.identify import Identifier
from dmlkit.identify.probability import Trials, together
from dmlkit.identify.search import LocalMatches, search
from dmlkit.review.proposals import propose
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import ModelChoice, with_local
from dmlkit.vectors.manifest import LocalFusion
from dmlkit.vectors.points import in_memory
from dmlkit.vectors.trained import TrainedModel, load_model
from tests.conftest import Cli, refuses
from tests.datasets import trees
from tests.evaluation.test_local import naive_match
from tests.vectors.stored import split_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of four birds, without cells that are equal and could match either way."""
    folder = tmp_path_factory.mktemp("photos")
    for label, name in enumerate(("crow", "dove", "finch", "gull")):
        for index in range(9):
            half = "asked" if index % 3 == 0 else "known"
            trees.photo(folder / half / name / f"{index}.jpg", 10 * label + index, (32, 32))
    return folder


@pytest.fixture(scope="module")
def model(patches_run: Path) -> ModelChoice:
    """The run with patches."""
    fusion = choose_second(patches_run, Path("local"), ranks=start_ranks("cpu"))
    return ModelChoice(fusion=fusion.model_copy(update={"share": 0.4}), device="cpu")  # so that they count


ON_CPU = ModelChoice(device="cpu")


@pytest.fixture(scope="module")
def gallery(patches_run: Path, photos: Path, model: ModelChoice, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery of the known photos; copy it before it is changed."""
    place = tmp_path_factory.mktemp("gallery") / "gallery"
    create_gallery(patches_run, photos / "known", place, model=model)
    return place


def naive_patches(run: Path, paths: list[str], mean: Tensor) -> np.ndarray:
    """The last map of the small network, whose layers are run one after the other."""
    network = load_model(RunFolder(run), start_ranks("cpu")).model
    transform = RunFolder(run).recipe().transform
    found: list[np.ndarray] = []
    for path in paths:
        pixels = torch.from_numpy(np.asarray(Image.open(path).convert("RGB")).copy()).permute(2, 0, 1)[None].float()
        pixels = (pixels * (transform.pixel_max / 255) - torch.tensor(transform.mean)[:, None, None]) / torch.tensor(
            transform.std
        )[:, None, None]
        with torch.no_grad():
            maps = network.backbone.layers(pixels)
        cells = maps.flatten(2)[0].T.half().float() - mean  # kept in float16, before and after
        found.append(nn.functional.normalize(cells, dim=1).half().float().numpy())
    return np.stack(found)


def test_a_gallery_keeps_patches_and_search_compares_them(gallery, photos, patches_run, dmlkit, monkeypatch):
    """Against a loop: the 5 nearest are ordered by both, and behind them the others by their cosine."""
    monkeypatch.setattr(searching, "CANDIDATES", 5)
    folder = GalleryFolder(gallery)
    local = folder.manifest.local
    assert local is not None and local.shape == (64, 16)
    mean = torch.tensor(local.mean)
    stored = folder.local_at(torch.arange(len(folder))).float().numpy()
    assert stored == pytest.approx(naive_patches(patches_run, folder.paths, mean), abs=2e-3)
    report = dmlkit("search", gallery, photos / "asked", "-k", len(folder), "--json", "--device", "cpu").json()
    assert report["similarity"] == "cosine_and_matches"
    plain = search(gallery, photos / "asked", k=len(folder), model=ON_CPU)
    assert plain.plain()["queries"] == report["queries"]
    asked = [query["path"] for query in report["queries"]]
    points = load(patches_run, device="cpu").embed([*asked, *folder.paths]).astype(float)
    cosines = points[: len(asked)] @ points[len(asked) :].T
    for row, (query, patches) in enumerate(
        zip(report["queries"], naive_patches(patches_run, asked, mean), strict=True)
    ):
        order = np.argsort(-cosines[row])
        mixed = {int(near): 0.6 * cosines[row, near] for near in order}
        for near in order[:5]:
            mixed[int(near)] += 0.4 * naive_match(patches, stored[near])
        expected = {folder.paths[near]: value for near, value in mixed.items()}
        got = {neighbor["path"]: neighbor["similarity"] for neighbor in query["neighbors"]}
        assert got == pytest.approx(expected, abs=2e-3)
        assert list(got.values()) == sorted(got.values(), reverse=True)
        assert {neighbor["id"] for neighbor in query["neighbors"]} == set(folder.ids)


@pytest.mark.parametrize("size", [1, 2])
def test_left_out_images_are_no_candidates(gallery: Path, size: int, monkeypatch: pytest.MonkeyPatch):
    """Decisions without the image, or group of images, itself and without its label, against loops over all pairs."""
    monkeypatch.setattr(searching, "CANDIDATES", 3)
    folder = GalleryFolder(gallery)
    part, groups = together(labeled_decider(folder, second=LocalMatches.of(folder))[1], size, 0)
    groups = groups[:8]
    rows = groups[:, 0]
    points, every = in_memory(folder).points, torch.arange(len(folder))
    cosines, patches = (points @ points.T).numpy(), folder.local_at(every).float().numpy()
    numbers = torch.from_numpy(rows if size == 1 else groups)
    for absent in (False, True):
        trials = Trials.of(part, part.points_of(groups), part.codes[rows], rows, absent=absent, numbers=numbers)
        units = part.codes if absent else part.groups
        for place, (row, members) in enumerate(zip(rows, groups.tolist(), strict=True)):
            scores = np.zeros(len(part.sizes))
            for member in members:
                others = np.flatnonzero(units != units[row])
                mixed = 0.6 * cosines[member]
                for near in others[np.argsort(-cosines[member, others], kind="stable")][:3]:
                    mixed[near] += 0.4 * naive_match(patches[member], patches[near])
                scores += [
                    max((mixed[other] for other in others[part.codes[others] == code]), default=-inf)
                    for code in range(len(scores))
                ]
            best = np.sort(scores / len(members))[::-1]
            assert trials.scores[place] == pytest.approx(best[0], abs=1e-5)
            assert trials.margins[place] == pytest.approx(best[0] - best[1], abs=1e-5)


def test_identify_and_calibrate_agree(gallery: Path, photos: Path, tmp_path: Path, dmlkit: Cli):
    """Each command uses the threshold of its own scores: with matches, or of a server without."""
    own = Path(shutil.copytree(gallery, tmp_path / "own"))
    strangers = trees.photos(tmp_path / "strangers", ("0.jpg", "1.jpg"), first=90, side=(32, 32))
    dmlkit("calibrate", own, "--fpir", "0.3", "--strangers", strangers, "--json", "--device", "cpu").ok()
    folder = GalleryFolder(own)
    stored = Identification.of(folder)
    fits = {(fit.similarity, fit.size): fit for fit in stored.fits}
    with_matches, alone = fits["cosine_and_matches", 1], fits["cosine", 1]
    assert stored.fits[0] == with_matches and with_matches.threshold != alone.threshold
    assert (
        Identifier(folder, second=LocalMatches.of(folder)).fits[1] == with_matches
        and Identifier(folder).fits[1] == alone
    )
    x, labels = folder.points_at(torch.arange(len(folder))).double().numpy(), np.array(folder.labels)
    reached = list[bool]()
    for row, label in enumerate(labels):  # without its label, and without matches
        best = sorted((float((x[labels == other] @ x[row]).max()) for other in {*labels} - {label}), reverse=True)
        reached.append(alone.sigmoid.at(best[0] - best[1], best[0]) >= alone.threshold)
    assert 0 < np.mean(reached) <= 0.4
    asked = dmlkit("identify", own, photos / "asked", "-o", tmp_path / "a.json", "--device", "cpu")
    report = json.loads((tmp_path / "a.json").read_text())
    assert asked.code == 0
    for one in report["images"]:
        assert one["least_probability"] == with_matches.threshold
        assert one["score"] == one["nearest"][0]["similarity"]
        assert one["probability"] == pytest.approx(with_matches.sigmoid.at(one["margin"], one["score"]))
    dmlkit("identify", own, photos / "asked", "--by", "folder", "--device", "cpu").ok()
    review = propose(own, photos / "asked", 0.05, 0.1, model=ON_CPU)
    labels_of = {one["path"]: one["label"] for one in report["images"]}
    assert {one.path: one.label or "unknown" for one in review.proposals} == labels_of
    dmlkit("gallery", "add", own, photos / "asked", "--device", "cpu").ok()
    stale = dmlkit("identify", own, photos / "asked", "--device", "cpu")
    assert stale.code == 0 and "have changed since it was calibrated" in " ".join(stale.out.split()), stale


def test_changes_keep_patches_with_their_images(gallery, photos, patches_run, model, tmp_path, dmlkit):
    place = tmp_path / "gallery"
    labels = sorted(one.name for one in (photos / "known").iterdir())

    def patches(folder: GalleryFolder) -> dict[str, list[float]]:
        kept = folder.local_at(torch.arange(len(folder)).flip(0)).flip(0)
        return {name: one.flatten().tolist() for name, one in zip(folder.ids, kept, strict=True)}

    whole = patches(GalleryFolder(gallery))
    create_gallery(patches_run, photos / "known" / labels[0], place, label=labels[0], model=model)
    for label in labels[1:]:
        add_images(place, photos / "known" / label, label=label, model=ON_CPU)
    added = patches(GalleryFolder(place))
    assert added.keys() == whole.keys()  # in other batches, which round differently
    assert all(added[name] == pytest.approx(whole[name], abs=2e-3) for name in whole)
    before = GalleryFolder(place).version
    remove_images(place, labels=labels[:1])
    assert patches(GalleryFolder(place)) == {name: added[name] for name in GalleryFolder(place).ids if name in added}
    assert dmlkit("gallery", "compact", place).code == 0
    assert not migrate_gallery(place, patches_run, model=model).is_new
    dropped = migrate_gallery(place, patches_run, model=ON_CPU)
    assert dropped.is_new and dropped.lost == "patches" and GalleryFolder(place).manifest.local is None
    assert search(place, photos / "asked", model=ON_CPU).similarity_name == "cosine"
    restore_version(place, before)
    assert patches(GalleryFolder(place)) == added
    assert migrate_gallery(place, patches_run, model=ON_CPU).is_new
    assert migrate_gallery(place, patches_run, model=model).lost is None
    assert patches(GalleryFolder(place)).keys() == whole.keys()
    shown = dmlkit("gallery", "info", place, "--verify")
    assert "with 0.40 of matches of patches" in shown.out and "verified: all files match" in shown.out
    assert json.loads((place / "gallery.json").read_text())["format"] == 1


def test_an_interrupted_addition_resumes(gallery, photos, tmp_path, patches_run, model, monkeypatch):
    from dmlkit.gallery import change

    place = tmp_path / "gallery"
    create_gallery(patches_run, None, place, model=model)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(change, "commit", killed)
        add_images(place, photos / "known", model=ON_CPU)
    assert len(GalleryFolder(place)) == 0
    incoming = add_images(place, photos / "known", model=ON_CPU)
    assert incoming.resumed == incoming.added == len(GalleryFolder(gallery))
    assert set(GalleryFolder(place).ids) == set(GalleryFolder(gallery).ids)


def test_mistakes(gallery: Path, photos: Path, patches_run: Path, tmp_path: Path, dmlkit: Cli):
    asked, device = photos / "asked", ("--device", "cpu")
    assert dmlkit("embed", patches_run, asked, "-o", tmp_path / "points", *device).code == 0
    dmlkit("search", gallery, tmp_path / "points").refused("points: has no patches, which")
    only = "--with local: only eval, verify and gallery create take"
    dmlkit("identify", gallery, asked, "--with", "local", *device).refused(only)
    assert "cosine" in dmlkit("search", gallery, asked, "--rerank", "expansion:n=2,alpha=1", "--json", *device).out


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the batches that passed the network."""
    from dmlkit.model import EmbeddingModel

    sizes, forward = list[int](), EmbeddingModel.forward

    def counted(self: EmbeddingModel, inputs: Tensor) -> Tensor:
        sizes.append(len(inputs))
        return forward(self, inputs)

    monkeypatch.setattr(EmbeddingModel, "forward", counted)
    return sizes


def test_a_query_passes_the_network_once(gallery: Path, photos: Path, dmlkit: Cli, embedded: list[int]):
    asked = len([*(photos / "asked").rglob("*.jpg")])
    for words in (("search", gallery, photos / "asked"), ("identify", gallery, photos / "asked")):
        embedded.clear()
        assert dmlkit(*words, "--device", "cpu").code == 0 and sum(embedded) == asked


def test_verify_keeps_what_it_calibrates_with_patches(photos, patches_run, tmp_path, dmlkit, embedded):
    run, device = Path(shutil.copytree(patches_run, tmp_path / "run")), ("--device", "cpu")
    first, second = sorted(map(str, (photos / "asked").rglob("*.jpg")))[:2]
    words = ("verify", run, first, second, "--with", "local", "--json", *device)
    assert dmlkit("calibrate", run, "--far", "0.1", *device).code == 0
    validation = len(split_of(run, "validation"))
    embedded.clear()
    result = dmlkit(*words)
    once = validation + 2
    assert result.code == 0 and sum(embedded) == once
    assert dmlkit(*words).out == result.out and sum(embedded) == 2 * once - validation
    embedded.clear()
    assert dmlkit("calibrate", run, "--far", "0.2", *device).code == 0 and not embedded
    assert dmlkit(*words).json()["far"] == 0.2 and sum(embedded) == once
    (run / "threshold-local.json").write_text("{")
    assert dmlkit(*words).code == 0 and sum(embedded) == 2 * once


def test_verify_with_patches(photos: Path, patches_run: Path, model: ModelChoice, tmp_path: Path, dmlkit: Cli):
    """Scores against a loop; the threshold lets the requested share of the validation pairs through."""
    run = Path(shutil.copytree(patches_run, tmp_path / "run"))
    assert dmlkit("calibrate", run, "--far", "0.1", "--device", "cpu").code == 0
    first, *others = sorted(map(str, (photos / "asked").rglob("*.jpg")))
    (tmp_path / "pairs.csv").write_text("a,b\n" + "".join(f"{first},{other}\n" for other in others))
    words = ("verify", run, tmp_path / "pairs.csv", "--with", "local", "--json", "--device", "cpu")
    report = dmlkit(*words).json()
    fusion = choose_second(run, Path("local"), ranks=start_ranks("cpu"))
    assert isinstance(fusion, LocalFusion) and report["fusion"] == fusion.weight.model_dump(mode="json")
    assert report["similarity"] == "cosine_and_matches"

    def scores(paths: list[str]) -> np.ndarray:
        points = load(run, device="cpu").embed(paths).astype(float)
        patches = naive_patches(run, paths, torch.tensor(fusion.mean))
        matches = [[naive_match(patch, other) for other in patches] for patch in patches]
        return (1 - fusion.share) * points @ points.T + fusion.share * np.array(matches)

    expected = scores([first, *others])[0, 1:]
    assert [pair["score"] for pair in report["pairs"]] == pytest.approx(expected.tolist(), abs=2e-3)
    dataset, paths = RunFolder(run).recipe().dataset.build("validation"), list[str]()
    for index in range(len(dataset)):
        paths.append(str(tmp_path / f"{index}.png"))
        Image.fromarray(dataset.sample(index).permute(1, 2, 0).numpy()).save(paths[-1])
    upper = np.triu_indices(len(paths), 1)
    different = (dataset.labels[:, None] != dataset.labels).numpy()[upper]
    accepted = (scores(paths)[upper][different] >= report["threshold"]).mean()
    assert accepted == pytest.approx(0.1, abs=0.02)  # equal cells of glyphs match either way
    assert "of matches of patches" in dmlkit(*words[:-3]).out
    dmlkit("verify", run, first, others[0], "--with", "flip").refused(
        "--with flip: only eval compares means with mirror images"
    )


def test_patches_of_other_weights_are_refused(gallery: Path, trained_run: Path):
    local = GalleryFolder(gallery).manifest.local
    trained = load_model(RunFolder(trained_run), start_ranks("cpu"))
    message = r"its patches are those of weights .* and cannot be compared with those of"
    refuses(message, with_local, trained, local, "birds")


def test_the_threshold_for_pairs_is_told_only_where_it_is_used(gallery, patches_run, model, tmp_path, monkeypatch):
    place = Path(shutil.copytree(gallery, tmp_path / "gallery"))

    def calibrated(trained: TrainedModel, run: Path) -> GalleryModel:
        return gallery_model(trained, run).model_copy(update={"threshold": 0.5})

    monkeypatch.setattr("dmlkit.gallery.migrate.gallery_model", calibrated)
    for choice, threshold in ((ON_CPU, 0.5), (model, None)):
        migrated, opened = migrate_gallery(place, patches_run, model=choice), GalleryFolder(place)
        assert migrated.is_new and opened.manifest.threshold == 0.5
        assert migrated.threshold == Identifier(opened, second=LocalMatches.of(opened)).threshold == threshold
