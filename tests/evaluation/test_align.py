"""A newer model with older embeddings: SciPy's and scikit-learn's maps, naive loops, and turned copies of a run."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from sklearn.linear_model import Ridge

from dmlkit.distributed.launch import start_ranks
from dmlkit.errors import UserError
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.look.align import align, check_can_be_mapped
from dmlkit.look.point_map import SharedImages, fit_map, split_images
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.run_folder.checkpoint_file import write_checkpoint
from dmlkit.run_folder.documents import Alignment
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.embedder import load
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.manifest import Fusion, Manifest
from dmlkit.vectors.points import load_same_model
from dmlkit.vectors.trained import load_model
from tests.conftest import ON_THE_BALL, ONE_EPOCH, ROOT, Cli, refuses
from tests.metrics.naive import at_rank

FLAT = ONE_EPOCH + "manifold: {name: euclidean}\n"
NARROW = ONE_EPOCH.replace("embedding_dim: 8", "embedding_dim: 5")


def drawn(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_orthogonal_map_is_scipys():
    new, old = drawn(40, 6, 1), drawn(40, 6, 2)
    expected, _ = orthogonal_procrustes(new.numpy(), old.numpy())
    fitted = fit_map(new, old, centered=False)
    assert fitted.matrix.T.numpy() == pytest.approx(expected) and not fitted.offset.any()
    centered = fit_map(new, old, centered=True)
    expected, _ = orthogonal_procrustes((new - new.mean(0)).numpy(), (old - old.mean(0)).numpy())
    assert centered.matrix.T.numpy() == pytest.approx(expected)
    assert centered(new, Euclidean(6)).mean(0).numpy() == pytest.approx(old.mean(0).numpy(), abs=1e-6)


@pytest.mark.parametrize("widths", [(6, 6), (4, 7), (7, 4)])
@pytest.mark.parametrize("centered", [False, True])
def test_the_linear_map_is_a_ridge_regression_of_what_the_orthogonal_one_leaves(widths, centered):
    new, old = drawn(40, widths[0], 3), drawn(40, widths[1], 4)
    turn = fit_map(new, old, centered=centered).matrix
    x = new - new.mean(0) if centered else new
    ridge = Ridge(alpha=0.2 * float((x.T @ x).trace()) / widths[0], fit_intercept=centered)
    ridge.fit(new.numpy(), (old - new @ turn.T).numpy())
    fitted = fit_map(new, old, centered=centered, shrinkage=0.2)
    assert fitted.matrix.numpy() == pytest.approx(ridge.coef_ + turn.numpy())
    assert fitted.offset.numpy() == pytest.approx(np.asarray(ridge.intercept_) + np.zeros(widths[1]), abs=1e-9)


def test_the_map_of_another_width_keeps_the_angles_if_there_is_room():
    new = Sphere(4).from_features(drawn(30, 4, 5))
    turn, _ = torch.linalg.qr(drawn(7, 4, 6))
    assert fit_map(new, new @ turn.T, centered=False).matrix.numpy() == pytest.approx(turn.numpy())


def test_images_are_divided_by_labels_where_these_are_many():
    labels = [f"class {row % 24}" for row in range(240)]
    parts = split_images(labels)
    assert sorted(torch.cat(parts[:3]).tolist()) == list(range(240)) and parts.held_out == "labels"
    assert [len({labels[row] for row in part.tolist()}) for part in parts[:3]] == [12, 6, 6]
    few = split_images(["a", "b"] * 20)
    assert [len(part) for part in few[:3]] == [20, 10, 10] and few.held_out == "images"


@pytest.fixture(scope="module")
def images() -> SharedImages:
    """Points of 240 images in two spaces: a turn with noise, around centers of 24 labels."""
    codes = torch.arange(240) % 24
    points = drawn(24, 6, 7)[codes] + 0.8 * drawn(240, 6, 8)
    turn, _ = torch.linalg.qr(drawn(6, 6, 9))
    old = (points @ turn.T + 0.4 * drawn(240, 6, 10)).float()
    spaces = (Sphere(6), Sphere(6))
    points, old = spaces[0].from_features(points.float()), spaces[1].from_features(old)
    return SharedImages(points, old, [f"{code}" for code in codes.tolist()], spaces)


def test_the_choice_looks_at_neither_fitted_nor_measured_images(images: SharedImages):
    found, parts, chosen = images.choice()
    by_hand = {}
    for name in chosen["errors"]:
        shrinkage = None if name == "orthogonal" else float(name.partition(" ")[2])
        fitted = images.fit(parts.fit, shrinkage)
        mapped = images.new[parts.choose].double() @ fitted.matrix.T
        mapped = mapped / mapped.norm(dim=1, keepdim=True)
        by_hand[name] = float(((mapped - images.old[parts.choose]) ** 2).sum(1).mean())
    assert chosen["errors"] == pytest.approx(by_hand, rel=1e-5)
    best = min(by_hand, key=lambda name: by_hand[name])
    assert best == ("orthogonal" if chosen["shrinkage"] is None else f"linear {chosen['shrinkage']:g}")
    both = torch.cat([parts.fit, parts.choose])
    assert torch.equal(found.matrix, images.fit(both, chosen["shrinkage"]).matrix) and chosen["fitted"] == len(both)


def test_figures_against_naive_loops(images: SharedImages):
    found, parts, _ = images.choice()
    fields = images.figures(found, parts)
    rows = parts.measure.tolist()
    old = images.old.double().numpy()
    mapped = found(images.new, Sphere(6)).double().numpy()
    clouds = {"old": old, "new": images.new.double().numpy(), "new, mapped": mapped}
    assert fields["finds"] == "label" and len(fields["figures"]) == 5
    for figure in fields["figures"]:
        firsts, precisions = [], []
        for query in rows:
            others = [row for row in rows if row != query]
            others.sort(key=lambda row: -clouds[figure.queries][query] @ clouds[figure.gallery][row])
            hits = [images.labels[row] == images.labels[query] for row in others]
            firsts.append(hits[0])
            precisions.append(at_rank(hits, sum(hits), "map@r", 1))
        assert figure.metrics == pytest.approx({"recall@1": np.mean(firsts), "map@r": np.mean(precisions)})
        ends = figure.intervals["recall@1"]
        assert ends is not None and ends[0] < figure.metrics["recall@1"] < ends[1]
    cross, within = (
        next(figure for figure in fields["figures"] if figure.queries == q) for q in ("new, mapped", "old")
    )
    difference = cross.metrics["map@r"] - within.metrics["map@r"]
    assert fields["gain"]["map@r"].difference == pytest.approx(difference)


def test_images_without_labels_have_to_find_themselves(images: SharedImages):
    images = SharedImages(images.new, images.old, [None] * 240, images.spaces)
    found, parts, _ = images.choice()
    fields = images.figures(found, parts)
    nearest = (found(images.new[parts.measure], Sphere(6)) @ images.old[parts.measure].T).argmax(1)
    cross = next(figure for figure in fields["figures"] if figure.queries == "new, mapped")
    assert cross.metrics["recall@1"] == pytest.approx(float((nearest == torch.arange(len(nearest))).double().mean()))
    assert fields["finds"] == "image" and fields["gain"] == {} and len(fields["figures"]) == 2


def turned(run: Path, output: Path, *, shift: float = 0.0) -> Path:
    """A copy of a run whose head is turned, and moved."""
    shutil.copytree(run, output)
    for name in ("best", "last"):
        state = RunFolder(run).load_checkpoint(name)
        turn, _ = torch.linalg.qr(drawn(8, 8, 11))
        for key in ("weight", "bias"):
            weight = state["model"][f"head.linear.{key}"].double()
            state["model"][f"head.linear.{key}"] = (turn @ weight + (shift if key == "bias" else 0)).float()
        write_checkpoint(output / "checkpoints" / f"{name}.pt", state)
    return output


@pytest.fixture(scope="module")
def place(trained_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three spaces and a narrow one, and photos of their test classes."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("align")
    for name, text in (("old", ONE_EPOCH), ("flat", FLAT), ("ball", ON_THE_BALL), ("narrow", NARROW)):
        shutil.copytree(trained_once(folder / f"of_{name}", text), folder / name)
    dataset = RunFolder(folder / "old").recipe().dataset.build("test")
    for index in range(len(dataset)):
        path = folder / "photos" / dataset.class_names[int(dataset.labels[index])] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dataset.sample(index).permute(1, 2, 0).numpy()).save(path)
    return folder


def embedded(run: Path, place: Path, dmlkit: Cli) -> Path:
    """Embeddings of the photos by a run."""
    output = place / f"embeddings_{run.name}"
    if not output.exists():
        assert dmlkit("embed", run, place / "photos", "-o", output, "--device", "cpu").code == 0
    return output


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shift"), [("old", 0.0), ("flat", 0.7)])
def test_a_turned_copy_is_recovered_and_searches_among_the_older(name, shift, place, tmp_path, dmlkit):
    older, photos = embedded(place / name, place, dmlkit), place / "photos"
    new = turned(place / name, tmp_path / "new", shift=shift)
    files = sorted(photos.glob("*/*.png"))
    expected = load(place / name, device="cpu").embed(files)
    assert abs(load(new, device="cpu").embed(files) - expected).max() > 0.1
    report = dmlkit("align", older, new, photos, "--json", "--device", "cpu").json()
    assert report["map"] == "orthogonal" and report["fitted"] + report["measured"] == len(files)
    aligned = tmp_path / "new-aligned"
    assert Alignment.read(aligned / "alignment.json").plain() == {k: report[k] for k in list(report)[2:]}
    model = load(aligned, device="cpu")
    assert abs(model.embed(files) - expected).max() < 1e-5
    assert model.trained.aligned_to == load(place / name, device="cpu").trained.fingerprint
    assert dmlkit("search", older, files[0], "-k", 1, "--run", new).code == 2
    found = dmlkit("search", older, files[0], "-k", 1, "--run", aligned, "--json", "--device", "cpu").json()["queries"]
    assert found[0]["neighbors"][0]["path"] == str(files[0])
    queries = tmp_path / "queries"
    assert dmlkit("embed", aligned, photos, "-o", queries, "--device", "cpu").code == 0
    assert dmlkit("search", older, queries, "-k", 1).code == 0  # manifests say that both may be compared
    assert json.loads((queries / "manifest.json").read_text())["aligned_to"] == report["fingerprint"]


@pytest.mark.slow
def test_a_narrower_model_gets_the_older_width(place: Path, tmp_path: Path, dmlkit: Cli):
    older = embedded(place / "old", place, dmlkit)
    result = dmlkit("align", older, place / "narrow", place / "photos", "-o", tmp_path / "out", "--device", "cpu")
    assert result.code == 0 and "new, mapped" in result.out and f"wrote {tmp_path / 'out'}" in result.out
    assert max(map(len, result.out.partition("wrote ")[0].splitlines())) <= 80
    files = sorted((place / "photos").glob("*/*.png"))
    points, narrow = (load(run, device="cpu").embed(files) for run in (tmp_path / "out", place / "narrow"))
    assert points.shape == (len(files), 8) and narrow.shape == (len(files), 5)
    state = RunFolder(tmp_path / "out").load_checkpoint("best")["model"]
    weight = RunFolder(place / "narrow").load_checkpoint("best")["model"]["head.linear.weight"]
    matrix = torch.linalg.lstsq(weight.T.double(), state["head.linear.weight"].T.double()).solution
    expected = narrow.astype(float) @ matrix.numpy()
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert points == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match="cannot be trained further"):
        RunFolder(tmp_path / "out").check_same_recipe(RunFolder(tmp_path / "out").recipe())
    for words in (("final", tmp_path / "out"), ("train", tmp_path / "out" / "recipe.yaml", "-o", tmp_path / "out")):
        refused = dmlkit(*words, "--device", "cpu")
        assert refused.code == 2 and "dmlkit align" in refused.err and "--resume" not in refused.err, refused.err
    assert f"use {place / 'narrow'}, which was aligned" in dmlkit("final", tmp_path / "out").err


@pytest.mark.slow
def test_what_cannot_be_aligned_is_refused(place: Path, tmp_path: Path, dmlkit: Cli):
    older, photos = embedded(place / "old", place, dmlkit), place / "photos"
    few = tmp_path / "few"
    few.mkdir()
    for file in sorted(photos.glob("*/*.png"))[:5]:
        (few / file.name).symlink_to(file)
    refused: list[tuple[tuple[Any, ...], str]] = [
        ((older, place / "ball", photos), "manifold poincare is curved"),
        ((embedded(place / "ball", place, dmlkit), place / "old", photos), "manifold poincare is curved"),
        ((older, place / "flat", photos), "points on euclidean, but"),
        ((older, place / "old", photos), "can be compared with"),
        ((older, place / "narrow", few), "has 5 images of .* expected at least 10, twice the 5 dimensions"),
        ((place / "old", place / "narrow", photos), "is a run; expected a folder of embeddings or a gallery"),
        ((older, place / "narrow", photos, place / "flat"), "exists already; choose another --output"),
        ((older, place / "narrow", photos, photos / "out"), "where every file is read as data"),
    ]
    for arguments, message in refused:
        refuses(message, align, *arguments, device="cpu")
    flat, narrow = (load(place / name, device="cpu").trained for name in ("flat", "narrow"))
    clipped = flat.recipe.model_copy(update={"manifold": Euclidean.Config(clip_distance=2.0)})
    other = Manifest.read(embedded(place / "flat", place, dmlkit) / "manifest.json")
    other = other.model_copy(update={"aligned_to": "0" * 64})
    with pytest.raises(UserError, match="clip_distance shortens points"):
        check_can_be_mapped(replace(flat, recipe=clipped), place / "flat", other, older)
    fusion = Fusion(run="b", checkpoint="best", fingerprint="0", share=0.5, weights="mean", alone=None, together=None)
    joined = Manifest.read(older / "manifest.json").model_copy(update={"fusion": fusion})
    refuses("has embeddings of two runs", check_can_be_mapped, narrow, place / "narrow", joined, older)


def with_threshold(gallery: Path, threshold: float) -> None:
    path = gallery / "gallery.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "threshold": threshold, "threshold_is_own": True}))


@pytest.mark.slow
def test_a_gallery_knows_images_by_their_content(place: Path, tmp_path: Path, dmlkit: Cli):
    pytest.importorskip("lancedb", reason="the extra dmlkit[lancedb] is not installed")
    gallery, moved = tmp_path / "gallery", tmp_path / "moved"
    assert dmlkit("gallery", "create", place / "old", place / "photos", "-o", gallery, "--device", "cpu").code == 0
    for number, file in enumerate(sorted((place / "photos").glob("*/*.png"))):
        target = moved / file.parent.name / f"renamed_{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    (moved / "broken.png").write_bytes(b"no image")
    new = turned(place / "old", tmp_path / "new")
    dmlkit("align", gallery, new, moved, "--device", "cpu").ok()
    files = sorted(moved.glob("*/*.png"))
    points, expected = (load(run, device="cpu").embed(files) for run in (tmp_path / "new-aligned", place / "old"))
    assert abs(points - expected).max() < 1e-5
    other = tmp_path / "other" / "x.png"
    other.parent.mkdir()
    shutil.copy(files[0], other)
    other.write_bytes(other.read_bytes() + b"another file")
    result = dmlkit("gallery", "add", gallery, other.parent, "--label", "a", "--run", tmp_path / "new-aligned")
    assert result.code == 0 and "1 image added" in result.out, result.err
    assert "another model than that of" in result.err and "may not hold for it" in result.err
    assert dmlkit("calibrate", gallery, "--fpir", "0.9", "--device", "cpu").code == 0
    for what in ("calibration", "threshold"):
        notes: list[str] = []
        for options in ((), ("--run", tmp_path / "new-aligned"), ("--run", tmp_path / "new-aligned", "--threshold", 0)):
            shown = dmlkit("identify", gallery, files[0], *options, "--device", "cpu").ok()
            notes.append(" ".join(shown.out.split()))
        assert [f"so the {what} may not hold" in note for note in notes] == [False, True, False]
        with_threshold(gallery, 0.1)  # is used instead of the calibration
    dmlkit("identify", gallery, files[0], "--run", new, "--device", "cpu").refused(
        "embeddings of another model", "dmlkit align"
    )


@pytest.mark.slow
def test_an_alignment_that_fails_leaves_nothing(place, tmp_path, dmlkit, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    older = embedded(place / "old", place, dmlkit)
    monkeypatch.setattr(RunFolder, "save_checkpoint", fail)
    result = dmlkit("align", older, place / "narrow", place / "photos", "-o", tmp_path / "out", "--device", "cpu")
    assert result.code == 2 and "Traceback" not in result.err and not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_network_without_a_trained_head_is_refused_before_images_are_embedded(
    place: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch
):
    def work(*_: object) -> None:
        raise AssertionError("the work has started")

    older = embedded(place / "old", place, dmlkit)
    monkeypatch.setattr("dmlkit.look.align.shared_images", work)
    words = ("align", older, place / "narrow", place / "photos", "--checkpoint", "pretrained", "--device", "cpu")
    dmlkit(*words).refused("its checkpoint pretrained has no trained head")


def test_images_that_cannot_be_read_are_counted(tmp_path: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(ROOT / "tests/fixtures/0.1.0", tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    turned(Path("run"), Path("new"))
    Path("photos/A/0.png").write_bytes(b"no image")
    shown = dmlkit("align", "embeddings", "new", "photos", "--device", "cpu").ok().out
    assert "1 image could not be read:" in shown and "photos/A/0.png: " in shown
    alignment = Alignment.read(Path("new-aligned/alignment.json"))
    assert [message.partition(":")[0] for message in alignment.skipped] == ["photos/A/0.png"]
    assert alignment.fitted + alignment.measured == 39  # of 40


def recorded(gallery: Path, **model: str) -> None:
    """Let a gallery be of another checkpoint, or of other weights."""
    path = gallery / "gallery.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "model": {**data["model"], **model}}))


def test_the_mapped_run_embeds_for_older_points_of_any_checkpoint(tmp_path: Path, dmlkit: Cli, monkeypatch):
    """The checkpoint of the older points is that of another run: the mapped one has its own, also of this name."""
    shutil.copytree(ROOT / "tests/fixtures/0.1.0", tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    gallery, ranks = Path("gallery"), start_ranks("cpu")
    turned(Path("run"), Path("new"))
    dmlkit("align", gallery, "new", "photos", "--device", "cpu").ok()
    words = ("search", gallery, "photos/B/3.png", "-k", 1, "--run", "new-aligned", "--json", "--device", "cpu")
    for checkpoint in ("last", "pretrained"):
        recorded(gallery, checkpoint=checkpoint)
        assert dmlkit(*words).json()["queries"][0]["neighbors"][0]["path"].endswith("photos/B/3.png")
    shutil.copy("new/checkpoints/last.pt", "new-aligned/checkpoints")
    recorded(gallery, checkpoint="last")
    aligned = load_same_model(GalleryFolder(gallery), ModelChoice(Path("new-aligned")), ranks)
    assert aligned.checkpoint == "best" and aligned.aligned_to is not None


def test_a_run_that_has_moved_embeds_by_the_recorded_checkpoint(tmp_path: Path):
    files, ranks = Path(shutil.copytree(ROOT / "tests/fixtures/0.1.0", tmp_path / "files")), start_ranks("cpu")
    moved = turned(files / "run", tmp_path / "moved")
    shutil.copy(files / "run/checkpoints/best.pt", moved / "checkpoints")
    last = load_model(RunFolder(moved), ranks, "last")
    recorded(files / "gallery", checkpoint="last", fingerprint=last.fingerprint)
    same = load_same_model(GalleryFolder(files / "gallery"), ModelChoice(moved), ranks)
    assert (same.checkpoint, same.fingerprint) == ("last", last.fingerprint)
