"""Groups that are answered together: what is left out against loops, probabilities of new groups, and the command."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.datasets.files.image import VideoFrames
from dmlkit.errors import UserError
from dmlkit.files.where import Where
from dmlkit.gallery.change import add_images, create_gallery
from dmlkit.gallery.folder import GalleryFolder
from dmlkit.gallery.sources import open_points
from dmlkit.identify import decisions
from dmlkit.identify.calibration import SIZES, calibrate_gallery
from dmlkit.identify.decisions import Decider, labeled_decider
from dmlkit.identify.identify import identify
from dmlkit.identify.probability import LEAST, NO_STRANGERS, Strangers, estimate_probability, together, trials_of
from dmlkit.identify.rule import LabelRule
from dmlkit.manifolds.sphere import Sphere
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.points import PointsInMemory
from tests.conftest import Cli, csv_rows
from tests.datasets import trees
from tests.vectors.stored import ON_CPU

DIM = 8


def drawn(classes: np.ndarray, seed: int, spread: float = 1.5) -> torch.Tensor:
    """Unit vectors around one direction per class."""
    centers = torch.randn(200, DIM, generator=torch.Generator().manual_seed(5))[torch.from_numpy(classes)]
    noise = torch.randn(len(classes), DIM, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(centers + spread * noise, dim=1)


def decider_of(codes: np.ndarray, points: torch.Tensor, **more: object) -> Decider:
    names = [str(code) for code in codes]
    return Decider(PointsInMemory("points", Sphere(DIM), points, names, names), codes, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3])
def test_the_images_of_a_group_are_left_out_together(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decisions, "BLOCK_ROWS", 8)
    codes = np.repeat(np.arange(5), 7)
    near = np.arange(35) - np.isin(np.arange(35), [1, 8])  # two pairs of near-duplicates
    points = drawn(codes, 1)
    part, groups = together(decider_of(codes, points, groups=near), size, seed=3)
    rows, images = groups[:, 0], groups.ravel().tolist()
    assert max(Counter(near[images].tolist()).values()) == 1  # no image twice, and no two near-duplicates
    sizes = {code: len(np.unique(near[codes == code])) // size for code in range(5)}
    assert Counter(codes[rows].tolist()) == sizes
    asked = part.points_of(groups)
    for absent in (False, True):
        decided = part.decide(asked, rows, absent=absent)
        for row, members, point, found in zip(rows, groups, asked, decided, strict=True):
            assert len(members) == size and len(set(codes[members])) == 1
            assert torch.equal(point, points[members])
            kept = codes != codes[row] if absent else ~np.isin(near, near[members])
            similarities = (points.double() @ point.double().T).numpy()
            scores = {}
            for code in set(codes[kept]):
                scores[code] = float(similarities[kept & (codes == code)].max(0).mean())
            first, second = sorted(scores, key=scores.__getitem__, reverse=True)[:2]
            assert (found.code, found.score) == (first, pytest.approx(scores[first], abs=1e-6))
            assert found.margin == pytest.approx(scores[first] - scores[second], abs=1e-6)


def test_the_probabilities_are_those_of_new_groups():
    """Of new groups, half of them of absent labels, as many are right as it says, while one image says too little."""
    codes = np.arange(900) % 10
    decider = decider_of(codes, drawn(codes, 0))
    single, together = estimate_probability(decider), estimate_probability(decider, 4)
    assert single is not None and together is not None
    classes = np.concatenate([np.repeat(np.arange(400) % 10, 4), np.repeat(10 + np.arange(400) % 190, 4)])
    found = decider.decide(drawn(classes, 9).reshape(800, 4, DIM))
    right = np.array([decision.code for decision in found]) == classes[::4]
    said, alone = (
        np.array([sigmoid.at(decision.margin, decision.score) for decision in found]) for sigmoid in (together, single)
    )
    assert 0.35 < right.mean() < 0.5
    for third in np.array_split(said.argsort(), 3):
        assert said[third].mean() == pytest.approx(right[third].mean(), abs=0.08)
    assert np.mean((said - right) ** 2) < np.mean((alone - right) ** 2)


def test_too_few_images_or_groups_give_no_probability():
    for codes in (np.zeros(30, int), np.arange(30), np.append(np.arange(LEAST - 2) % 2, 2)):
        assert estimate_probability(decider_of(codes, drawn(codes, 0))) is None
    codes = np.arange(60) % 10  # 6 images of each label
    decider = decider_of(codes, drawn(codes, 0))
    assert estimate_probability(decider, 7) is None
    assert estimate_probability(decider, 6) is None  # no other image of the label remains
    assert estimate_probability(decider, 4) is not None


@pytest.fixture(scope="module")
def gallery(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grouped")
    for label in range(4):
        for index in range(7):
            trees.photo(folder / "photos" / f"bird{label}" / f"{index}.jpg", 100 * label + index, (40, 30))
    create_gallery(place / "run", folder / "photos", folder / "birds", model=ON_CPU)
    for name, count in (("a", 3), ("b", 1), ("c", 9)):
        for index in range(count):
            trees.photo(folder / "asked" / name / f"{index}.jpg", 7000 + 10 * ord(name) + index, (40, 30))
    return folder


def test_one_answer_per_folder(gallery: Path, dmlkit: Cli):
    identified = identify(gallery / "birds", gallery / "asked", rule=LabelRule(by="folder"), model=ON_CPU)
    assert identified.neighbors.queries == [str(gallery / "asked" / name) for name in "abc"]
    assert [answer.images for answer in identified.answers] == [3, 1, 9]
    folder = shutil.copytree(gallery / "asked", gallery / "asked.npy")  # no array
    same = identify(gallery / "birds", folder, rule=LabelRule(by="folder"), model=ON_CPU)
    assert [answer.guess for answer in same.answers] == [answer.guess for answer in identified.answers]
    alone = identify(gallery / "birds", gallery / "asked" / "b" / "0.jpg", model=ON_CPU)
    assert identified.answers[1].guess == alone.answers[0].guess and identified.answers[1].images == 1
    assert identified.answers[1].probability == pytest.approx(alone.answers[0].probability, abs=1e-5)
    _, decider = labeled_decider(open_points(gallery / "birds"))
    of_sizes = zip((*identified.answers[::2], *alone.answers), (2, 4, 1), strict=True)
    for answer, size in of_sizes:  # of 3 images, of 9, and of one
        sigmoid = estimate_probability(decider, size)
        assert sigmoid is not None and answer.probability == pytest.approx(sigmoid.at(answer.margin, answer.score))
    words = ("identify", gallery / "birds", gallery / "asked", "--by", "folder", "--device", "cpu")
    page, table, file = (gallery / name for name in ("page.html", "answers.csv", "answers.json"))
    result = dmlkit(*words, "-o", table, "-o", page)
    assert result.code == 0 and "3 groups, 0 unknown" in result.out and "9 images" in result.out
    rows = {Path(row["path"]).name: row for row in csv_rows(table)}
    assert {name: row["images"] for name, row in rows.items()} == {"a": "3", "b": "1", "c": "9"}
    assert dmlkit(*words, "-o", file).code == 0
    images = json.loads(file.read_text())["images"]
    assert [image["images"] for image in images] == [3, 1, 9]
    assert images[0]["probability"] == pytest.approx(float(rows["a"]["probability"]))
    html = page.read_text()
    assert "9 images" in html and html.count("<section") == 3 and "no picture" not in html


def test_groups_have_their_own_threshold(gallery: Path, dmlkit: Cli):
    """Fits of a calibrated gallery are those of trials on groups; answers take the largest that is not above them."""
    birds = shutil.copytree(gallery / "birds", gallery / "calibrated")
    calibrated = calibrate_gallery(birds, fpir=0.5, strangers=gallery / "asked", model=ON_CPU)
    assert [fit.size for fit in calibrated.fits] == list(SIZES)
    assert len({fit.threshold for fit in calibrated.fits}) == 3 and all(fit.fpir.rate <= 0.5 for fit in calibrated.fits)
    file = gallery / "own.json"
    words = ("identify", birds, gallery / "asked", "--by", "folder", "-o", file, "--device", "cpu")
    assert "(probability below" in dmlkit(*words).ok().out
    by_size = {fit.size: fit for fit in calibrated.fits}
    for one, size in zip(json.loads(file.read_text())["images"], (2, 1, 4), strict=True):
        fit = by_size[size]
        assert one["probability"] == pytest.approx(fit.sigmoid.at(one["margin"], one["score"]))
        assert one["least_probability"] == fit.threshold
        assert one["label"] == (one["guess"] if one["probability"] >= fit.threshold else "unknown")


def test_strangers_are_tried_in_groups_too():
    codes = np.arange(60) % 10
    decider = decider_of(codes, drawn(codes, 0))
    classes = np.repeat(np.arange(4), 5)
    strangers = Strangers(drawn(100 + classes, 3), classes)
    alone, more = (trials_of(decider, 2, 100, strangers=one)[0] for one in (NO_STRANGERS, strangers))
    draws = 2  # of 30 groups each, with 2 groups of each class of strangers
    assert len(alone.right) == 60 * draws and alone.absent.sum() == 30 * draws
    assert Counter(more.classes[more.classes >= 10].tolist()) == dict.fromkeys(range(10, 14), 2 * draws)
    assert len(more.right) - len(alone.right) == 8 * draws


def test_groups_of_a_table(gallery: Path, dmlkit: Cli):
    table = gallery / "asked.csv"
    paths = [f"asked/c/{index}.jpg" for index in range(6)]
    rows = zip(paths, ["bird0", "bird0", "x", "bird1", "x", "bird2"], ["p", "p", "q", "s", "", "t"], strict=True)
    table.write_text("path,label,track\n" + "".join(f"{path},{label},{track}\n" for path, label, track in rows))
    identified = identify(gallery / "birds", table, rule=LabelRule(by="track"), model=ON_CPU)
    assert identified.neighbors.queries[:3] == ["p", "q", "s"] and identified.neighbors.queries[3].endswith("c/4.jpg")
    assert [(answer.images, answer.known) for answer in identified.answers[:2]] == [(2, "bird0"), (1, None)]
    for by, message in (
        ("day", "has no column 'day'; it has path, track"),
        ("folder", "has images of 'bird0' and of 'bird1'; expected images of one label in each group"),
    ):
        result = dmlkit("identify", gallery / "birds", table, "--by", by, "--device", "cpu")
        assert result.code == 2 and message in " ".join(result.err.split()) and "Traceback" not in result.err
    result = dmlkit("identify", gallery / "birds", gallery / "asked", "--by", "track", "--device", "cpu")
    assert result.code == 2 and "is no table and has no columns; use folder" in " ".join(result.err.split())


def write_video(path: Path, frames: list[np.ndarray], rate: int) -> None:
    av: Any = pytest.importorskip("av", reason="needs PyAV (pip install 'dmlkit[video]')")
    with av.open(str(path), "w") as video:
        stream = video.add_stream("mpeg4", rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            video.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        video.mux(stream.encode())


def test_a_video_needs_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"frames of a video need PyAV; install it with: pip install 'dmlkit\[video\]'"):
        VideoFrames(tmp_path / "a.mp4")


def test_the_frames_of_a_video_are_a_group(place: Path, tmp_path: Path, dmlkit: Cli):
    """Two frames per second, with the pixels that were written; one answer, like that of the frames as files."""
    shades = np.linspace(0, 255, 30).astype(np.uint8)
    write_video(tmp_path / "a.mp4", [np.full((32, 48, 3), shade, np.uint8) for shade in shades], rate=10)
    video = VideoFrames(tmp_path / "a.mp4")
    assert video.times == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5])
    for index in (0, 1, 5, 2, 3):  # also backward
        found = video.sample(index)
        assert found.shape == (3, 32, 48) and found.float().mean() == pytest.approx(shades[5 * index], abs=6)
    create_gallery(place / "run", place / "photos", tmp_path / "gallery", model=ON_CPU)
    words = ("identify", tmp_path / "gallery", tmp_path / "a.mp4", "-o", tmp_path / "a.json", "--device", "cpu")
    assert "1 group, " in dmlkit(*words).ok().out
    (one,) = json.loads((tmp_path / "a.json").read_text())["images"]
    (tmp_path / "files").mkdir()
    for index in range(len(video)):
        Image.fromarray(video.sample(index).permute(1, 2, 0).numpy()).save(tmp_path / "files" / f"{index}.png")
    same = identify(tmp_path / "gallery", tmp_path / "files", rule=LabelRule(by="folder"), model=ON_CPU).answers[0]
    assert one["path"] == str(tmp_path / "a.mp4") and one["images"] == same.images == 6
    assert (one["label"], one["score"]) == (same.label, pytest.approx(same.score, abs=1e-5))
    near = dmlkit("search", tmp_path / "gallery", tmp_path / "a.mp4", "--device", "cpu", "--json")
    assert [Path(query["path"]).name for query in json.loads(near.out)["queries"]][:2] == ["0.00", "0.50"]
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mkv").write_text("no video")
    import av

    with av.open(str(tmp_path / "sound.mp4"), "w") as sound:
        stream: Any = sound.add_stream("aac", rate=8000)
        frame: Any = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        sound.mux(stream.encode(frame))
        sound.mux(stream.encode())
    for name, more, *messages in (
        ("empty.mp4", (), "empty.mp4: cannot read this video: "),
        ("text.mkv", (), "text.mkv: cannot read this video: "),
        ("sound.mp4", (), "sound.mp4: this video has no frames"),
        ("a.mp4", ("--boxes", tmp_path / "files"), "--boxes: applies to images, but"),
        ("a.mp4", ("--column", "label=bird"), "--column: applies to images, but"),
        ("a.mp4", ("--method", "vote"), "--method vote: ", "a.mp4 is a video, whose frames are a group; use --method"),
    ):
        dmlkit(*words[:2], tmp_path / name, *more, "--device", "cpu").refused(*messages)


def test_groups_are_parts_of_the_path(gallery: Path, tmp_path: Path):
    """Of a folder and of a table, whose pattern is that of the labels too."""
    names = ("01_cam1_0.jpg", "02_cam2_0.jpg", "01_cam1_1.jpg")
    folder, table = trees.photos(tmp_path / "asked", names, first=8000, side=(40, 30)), tmp_path / "asked.csv"
    table.write_text("\n".join(["path", *(f"asked/{name}" for name in names)]))
    boxes = Boxes(columns={"label": r"(?P<label>\d\d)_(?P<group>cam\d)"})
    single = identify(gallery / "birds", folder / names[1], model=ON_CPU).answers[0]
    for images in (folder, table):
        identified = identify(gallery / "birds", images, rule=LabelRule(by="group"), boxes=boxes, model=ON_CPU)
        assert identified.neighbors.queries == ["cam1", "cam2"]
        assert [answer.images for answer in identified.answers] == [2, 1]
        assert identified.answers[1].score == pytest.approx(single.score, abs=1e-6)
    add_images(birds := shutil.copytree(gallery / "birds", tmp_path / "birds"), folder, label="wren", boxes=boxes)
    added = GalleryFolder(birds)
    assert added.labels[-3:] == ["wren"] * 3
    found = {Path(path).name: cell for path, cell in zip(added.paths, added.cells()["group"], strict=True) if cell}
    assert found == {name: name[3:7] for name in names}


@pytest.mark.parametrize("kind", ["label", "label and id", "boxes"])
def test_conditions_on_labels_leave_each_image_in_its_own_group(kind: str, files: Path):
    asked, bursts = ["C/0", "A/0", "B/0", "A/1", "D/0", "B/1"], "zpqpzq"
    cells = {"path": [f"{name}.png" for name in asked], "burst": [*bursts]}
    cells |= {} if kind == "boxes" else {"label": [name[0] for name in asked]}
    cells |= {"id": [str(number) for number in range(6)]} if kind == "label and id" else {}
    cells |= {side: ["0" if side < "x2" or side == "y1" else "12"] * 6 for side in ("x1", "y1", "x2", "y2")}
    table = files / "photos" / "asked.csv"
    table.write_text("\n".join([",".join(cells), *map(",".join, zip(*cells.values(), strict=True))]))
    boxes = Boxes(source=table if kind == "boxes" else None, where=Where.of("label in A, B"))
    images, model = files / "photos" if kind == "boxes" else table, ModelChoice(files / "run", device="cpu")
    identified = identify(files / "gallery", images, rule=LabelRule(by="burst"), boxes=boxes, model=model)
    assert identified.neighbors.queries == ["p", "q"] and identified.table_rows == [[1, 3], [2, 5]]
    assert [(answer.images, answer.known) for answer in identified.answers] == [(2, "A"), (2, "B")]
