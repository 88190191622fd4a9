"""`eval --evidence`: its share against painted images and naive loops, and what is refused."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone
from dmlkit.datasets import TableConfig
from dmlkit.datasets.files.samples import samples_named
from dmlkit.files.image_file import Box
from dmlkit.heads import Linear
from dmlkit.look.evidence import evidence_of, read_regions
from dmlkit.manifolds import Euclidean, Manifold, Poincare, Sphere
from dmlkit.metrics.statistics import bootstrap_intervals, ratio_interval
from dmlkit.model import EmbeddingModel
from dmlkit.pooling import Avg
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.images import images_at
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.trained import TrainedModel
from tests.conftest import refuses
from tests.datasets import trees
from tests.metrics.naive import at_rank

SIDE = 12


class Dots(Backbone):
    """A network that sees small neighborhoods of pixels."""

    num_features = 8

    def __init__(self, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, kernel_size=size, padding="same", bias=False)
        self.pooling = Avg()

    def blocks(self) -> list[nn.Module]:
        return [self.convolution]

    def forward(self, images: Tensor) -> Tensor:
        return self.pooling(self.convolution(images.float() / 255).relu())


def model_of(backbone: Backbone, manifold: Manifold) -> EmbeddingModel:
    torch.manual_seed(1)
    head = Linear(backbone.num_features, manifold)
    for parameter in (*backbone.parameters(), *head.parameters()):
        nn.init.normal_(parameter)
    nn.init.zeros_(head.get_parameter("linear.bias"))
    return EmbeddingModel(nn.Identity(), backbone, head, samples_named("image").of(None)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 8 classes: the color of half of the classes is in a box, that of the others around it."""
    root, random = tmp_path_factory.mktemp("evidence"), np.random.default_rng(0)
    boxes, masks = ["path,x1,y1,x2,y2"], ["path,mask"]
    (root / "masks").mkdir()
    for label in range(8):
        (root / "images" / str(label)).mkdir(parents=True)
        for number in range(5):
            pixels = random.integers(1, 120, (SIDE, SIDE, 3))
            color = np.random.default_rng(label).integers(100, 250, 3)
            mask = np.zeros((SIDE, SIDE), dtype=bool)
            left, top = random.integers(0, 6, 2)
            mask[top : top + 6, left : left + 6] = True
            pixels[mask if label % 2 else ~mask] = color + random.integers(-30, 5, 3)
            name = f"{label}/{number}.png"
            Image.fromarray(pixels.clip(1, 255).astype(np.uint8)).save(root / "images" / name)
            Image.fromarray(mask).save(root / "masks" / f"{label}-{number}.png")
            # the box in two halves, which are united
            boxes += [
                f"images/{name},{left},{top},{left + 2},{top + 6}",
                f"images/{name},{left + 2},{top},{left + 6},{top + 6}",
            ]
            masks.append(f"images/{name},masks/{label}-{number}.png")
    (root / "boxes.csv").write_text("\n".join(boxes))
    (root / "masks.csv").write_text("\n".join(masks))
    return root


def trained_on(folder: Path, manifold: Manifold, size: int = 1) -> tuple[Any, ...]:
    recipe = Recipe.model_validate(
        {
            "dataset": {"name": "folder", "root": str(folder / "images")},
            "transform": {"name": "plain", "size": SIDE},
            "loss": {"name": "proxy_anchor"},
            "sampler": {"name": "random", "batch_size": 8},
        }
    )
    model, dataset = model_of(Dots(size), manifold), images_at(folder / "images")
    images = torch.stack([dataset.sample(row) for row in range(len(dataset))])
    with torch.no_grad():
        points = model(images)
    trained = TrainedModel.of(recipe, model)
    return trained, dataset, Embeddings(points, dataset.labels, torch.arange(len(dataset)), []), images


def map_at_r(points: Tensor, labels: Tensor, manifold: Manifold, favor: float = 0.0) -> Tensor:
    """The metric by loops, with an amount added to the similarities of the same class."""
    is_same = (labels[:, None] == labels).tolist()
    similarities = manifold.paired_similarity(points[:, None], points).tolist()
    values: list[float] = []
    for query, (same, similarity) in enumerate(zip(is_same, similarities, strict=True)):
        others = [row for row in range(len(points)) if row != query]
        others.sort(key=lambda row: -similarity[row] - favor * same[row])
        hits = [same[row] for row in others]
        values.append(at_rank(hits, sum(hits), "map@r", 1))
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("table", "size", "manifold"),
    [
        ("boxes.csv", 1, Sphere(5)),
        ("masks.csv", 5, Sphere(5)),
        ("masks.csv", 1, Euclidean(5)),
        ("boxes.csv", 5, Poincare(5)),
    ],
)
def test_the_share_is_that_of_painted_images(table: str, size: int, manifold: Manifold, folder: Path):
    trained, dataset, embeddings, images = trained_on(folder, manifold, size)
    evidence = evidence_of(trained, dataset, embeddings, "map@r", str(folder / table))
    files = [folder / "masks" / f"{path.parent.name}-{path.stem}.png" for path in map(Path, dataset.paths)]
    masks = np.stack([np.array(Image.open(file)) for file in files])
    color = np.array([round(float(images.numpy()[:, channel].mean())) for channel in range(3)], dtype=np.uint8)
    shown: list[Tensor] = []
    for kept in (masks, ~masks):
        painted = images.permute(0, 2, 3, 1).numpy().copy()
        painted[~kept] = color
        shown.append(torch.from_numpy(painted).permute(0, 3, 1, 2).contiguous())
    with torch.no_grad():
        embedded = embeddings.points, *map(trained.model, shown)
    for value, points in zip((evidence.whole, evidence.inside, evidence.outside), embedded, strict=True):
        # processors round similarities differently, so that neighbors that are equally near change places
        low, high = (float(map_at_r(points, dataset.labels, manifold, favor).mean()) for favor in (-2e-7, 2e-7))
        assert low - 1e-3 < value < high + 1e-3 and high - low < 0.01
    whole, inside, outside = (map_at_r(points, dataset.labels, manifold) for points in embedded)
    # by chance: positives are equally likely at each rank; 4 of 39 are of the class
    chance = sum((1 + place * 3 / 38) / (place + 1) * 4 / 39 for place in range(4)) / 4
    assert evidence.chance == pytest.approx(chance, abs=1e-6) and evidence.area == pytest.approx(0.75)
    expected = float(((outside - chance) + (whole - inside)).mean() / 2 / (whole - chance).mean())
    assert evidence.share == pytest.approx(expected, abs=5e-3)
    assert evidence.interval is not None and evidence.interval[0] < expected < evidence.interval[1]


def test_images_without_an_outside_resemble_all_others(folder: Path, tmp_path: Path):
    trained, dataset, embeddings, _ = trained_on(folder, Sphere(5))
    whole = tmp_path / "whole.csv"
    rows = [f"{path},0,0,{SIDE},{SIDE}" for path in dataset.paths]
    whole.write_text("\n".join(["path,x1,y1,x2,y2", *rows]))
    evidence = evidence_of(trained, dataset, embeddings, "map@r", str(whole))
    assert evidence.area == 0 and evidence.inside == pytest.approx(evidence.whole)
    assert evidence.share == pytest.approx(0, abs=1e-6)


def test_a_ratio_to_the_number_of_queries_has_the_interval_of_a_mean():
    values = torch.rand(60, generator=torch.Generator().manual_seed(0)).double()
    classes = torch.arange(60) % 13
    expected = bootstrap_intervals({"x": values}, classes)["x"]
    found = ratio_interval(values, torch.ones(60), classes)
    assert (found.mean, found.low, found.high) == pytest.approx((expected.mean, expected.low, expected.high))
    assert ratio_interval(values, torch.ones(60), classes % 4).ends is None
    assert ratio_interval(values, torch.ones(60), classes % 5).ends


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("path,x1,y1,x2,y2\nimages/0/0.png,0,0,1,1", "has no box of"),
        ("path,x1,y1,x2,y2\nimages/0/0.png,left,0,1,1", "column 'x1' has a value that is not a number"),
        ("path,x1,y1,x2,y2\nimages/0/0.png,nan,0,9,9", "the box nan, 0, 9, 9 of"),
        ("path,x1,y1,x2,y2\nimages/0/0.png,5,0,1,1", "the box 5, 0, 1, 1 of"),
        ("path,mask\nimages/0/0.png,masks/0-0.png", "has no mask of"),
        ("path,side\nimages/0/0.png,left", "has no column 'mask'"),
        ("name\n0", "has no column 'path'"),
        ("path,x1,y1,x2,y2\n,0,0,1,1", r"other\.csv:2: no path; add it"),
    ],
)
def test_tables_without_regions_are_refused(rows: str, message: str, folder: Path):
    trained, dataset, embeddings, _ = trained_on(folder, Sphere(5))
    table = folder / "other.csv"
    table.write_text(rows)
    refuses(message, evidence_of, trained, dataset, embeddings, "map@r", str(table))


def test_regions_are_read_by_the_names_of_columns_of_the_recipe(folder: Path, caplog: pytest.LogCaptureFixture):
    """Without a word on columns, although the table has no label."""
    trained, dataset, embeddings, _ = trained_on(folder, Sphere(5))
    named = {"name": "table", "file": str(folder / "photos.csv"), "columns": {"path": "photo", "bbox": "where"}}
    recipe = trained.recipe.model_copy(update={"dataset": TableConfig.model_validate(named)})
    (folder / "photos.csv").write_text("photo,label,where\n")
    for name, head in (("boxes", "photo,x1,y1,x2,y2"), ("masks", "photo,Mask")):
        expected = evidence_of(trained, dataset, embeddings, "map@r", str(folder / f"{name}.csv"))
        lines = (folder / f"{name}.csv").read_text().splitlines()[1:]
        table = folder / "renamed.csv"
        table.write_text("\n".join([head, *lines]))
        caplog.clear()
        evidence = evidence_of(replace(trained, recipe=recipe), dataset, embeddings, "map@r", str(table))
        assert evidence == expected.model_copy(update={"regions": str(table)}) and caplog.text == ""


def test_masks_of_another_size_and_other_inputs_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    trained, dataset, embeddings, _ = trained_on(folder, Sphere(5))
    Image.new("L", (4, 5), 255).save(folder / "masks" / "small.png")
    table = folder / "other.csv"
    table.write_text("\n".join(["path,mask", *(f"{path},masks/small.png" for path in dataset.paths)]))
    message = r"the mask masks/small.png has 4 x 5 pixels, but its image has 12 x 12"
    refuses(message, evidence_of, trained, dataset, embeddings, "map@r", str(table))
    vectors = replace(trained, samples=samples_named("vector").of(4))
    refuses("looks at regions of images, got vectors", evidence_of, vectors, dataset, embeddings, "map@r", "center")
    monkeypatch.setattr(dataset, "box", lambda row: Box(0, 0, 5, 5) if row == 3 else None)
    message = "are cropped to boxes; use --evidence center"
    refuses(message, evidence_of, trained, dataset, embeddings, "map@r", str(folder / "boxes.csv"))


def test_the_command_prints_the_share_and_refuses_what_does_not_go_with_it(dmlkit, trained_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    result = dmlkit("eval", run, "--metric", "map@r", "--evidence", "center", "--device", "cpu").ok()
    assert "of map@r comes from outside the central square (" in result.out and "outside alone" in result.out
    answer = dmlkit("eval", run, "--metric", "map@r", "--evidence", "center", "--json").json()["evidence"]
    assert answer["metric"] == "map@r" and f"{answer['share']:.2f} of map@r" in result.out
    np.save(tmp_path / "x.npy", np.eye(4))
    for words, message in (
        ((run, "--evidence", tmp_path / "missing.csv"), "missing.csv: no such file or folder; expected center"),
        ((run, "--evidence", "center", "--set", "transform.size=20"), "is measured on a run's own images"),
        ((run, "--evidence", "center", "--metric", "nmi"), "none of the metrics has a value per query"),
        (
            (tmp_path / "x.npy", "--labels", tmp_path / "x.npy", "--evidence", "center"),
            "--evidence center: applies to a run",
        ),
    ):
        dmlkit("eval", *words).refused(message)


def test_the_example_of_help_runs(dmlkit, trained_run, tmp_path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(trained_run, tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall("dmlkit eval (.* --evidence .*)", dmlkit("eval", "--help").out)
    dmlkit("eval", *example.split(), "--device", "cpu").ok()


def test_boxes_and_labels_that_the_recipe_reads_otherwise_do_not_matter(tmp_path: Path):
    """The run leaves out the boxes of its table; its labels are folders, which the other table lies in."""
    trees.photo(tmp_path / "fox" / "0.jpg", 0)
    (tmp_path / "t.csv").write_text("path\nfox/0.jpg\n")
    (tmp_path / "fox" / "boxes.csv").write_text("path,x1,y1,x2,y2\n0.jpg,2,3,12,8\n")
    columns = {"bbox": "", "label": "(?P<label>[a-z]+)/"}
    config = TableConfig(file=str(tmp_path / "t.csv"), columns=columns)
    mask_of = read_regions(tmp_path / "fox" / "boxes.csv", config, config.build("all"), torch.tensor([0]))
    expected = torch.zeros(18, 24, dtype=torch.bool)
    expected[3:8, 2:12] = True
    assert torch.equal(mask_of(0, 18, 24), expected)
