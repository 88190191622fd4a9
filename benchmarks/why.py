"""Explanations: whether the patches that `dmlkit why` names are those that make two images similar.

For pairs of images of one class, the fifth of the patches with the largest contributions is deleted, and in turn as
many patches drawn at random (the mean of 5 draws). The cells have the share of pairs for which deleting the named
patches lowers the cosine more, and by how much it falls on average. Patches are deleted in the `first` image or in
`both`: `painted` with the mean color of the image, `blurred` with a Gaussian whose standard deviation is half a patch,
or left out of the `map` from which the features are pooled. The explanations:

- contributions: what `dmlkit why` prints, summed over the patches of the other image;
- direction: the slope of the cosine along a patch, which also counts what the patch does to the length of the vector;
- specific: contributions with the other vector less the mean vector of 64 images, which all images share;
- contributions, direction or specific, spread: each spread over the patches of the image that the patch of the map
  depends on, by the squared slope along their pixels; `by change`: by the absolute slope times the difference from the
  mean color; `by center`: as the patch in the middle depends on those around it;
- slope of pixels: the slope of the cosine along the difference of each pixel from the mean color;
- occlusion: by how much the cosine falls when this patch alone is painted, as in the heat maps of `dmlkit why`. It
  takes as many passes as there are patches. `painted` deletes in the same way, `blurred` in another.

All of them were compared on 60 pairs of training classes. What `dmlkit why` prints and what its heat maps show were
then measured on 200 pairs of test classes, once. `sum` is the largest difference of a cosine from the sum of its
contributions.

Run: dmlkit train start/frozen_lite0 -o runs/grocery --set dataset.root=PHOTOS --set transform.size=160
python benchmarks/why.py runs/grocery. PHOTOS are those of the Grocery Store data set, one folder per product.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from operator import gt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import write_report
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, conv2d, interpolate, normalize, pad

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_ranks
from dmlkit.identify.why import pair_contributions, patch_vectors
from dmlkit.loading.inputs import inputs_of
from dmlkit.model import EmbeddingModel
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.trained import TrainedModel, load_model

SHARE, DRAWS = 5, 5
CHOICE, TEST = 60, 200
SHOWN, CEILING = "contributions", "occlusion"
RANDOM = "(random patches)"
Deletion = tuple[str, str]  # how, and where
DELETIONS: list[Deletion] = [(how, where) for how in ("painted", "blurred", "map") for where in ("first", "both")]
Scores = dict[str, Tensor]  # by explanation, what each patch (P,) contributes


def blurred(image: Tensor, deviation: float) -> Tensor:
    """Return an image (3, S, S), blurred with a Gaussian."""
    reach = min(int(3 * deviation), image.shape[-1] - 1)
    weights = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
    result = image[:, None]
    for size, padding in (((1, -1), (reach, reach, 0, 0)), ((-1, 1), (0, 0, reach, reach))):
        result = conv2d(pad(result, padding, mode="reflect"), (weights / weights.sum()).view(1, 1, *size))
    return result[:, 0]


class Side(NamedTuple):
    """One image of a pair."""

    image: Tensor  # (3, S, S) float
    parts: Tensor  # (P, d) float64, which sum to the vector
    grid: tuple[int, int]

    @property
    def whole(self) -> Tensor:
        """Vector (d,)."""
        return self.parts.sum(0)

    def filled(self, how: str) -> Tensor:
        """Return the image with all patches painted or blurred."""
        if how == "blurred":
            return blurred(self.image, self.image.shape[-1] / self.grid[1] / 2)
        return self.image.mean((1, 2), keepdim=True).expand_as(self.image)

    def without(self, patches: Tensor, how: str) -> Tensor:
        """Return the image without some patches, (3, S, S) uint8."""
        mask = torch.zeros(len(self.parts)).index_fill(0, patches, 1.0).reshape(1, 1, *self.grid)
        mask = interpolate(mask, self.image.shape[1:], mode="nearest")[0]
        return torch.where(mask.bool(), self.filled(how), self.image).round().to(torch.uint8)


def points_of(model: EmbeddingModel, images: list[Tensor]) -> Tensor:
    """Return the unit vectors (n, d) of images."""
    with torch.no_grad():
        vectors = [
            model.head.project(model.backbone(model.normalization(batch))) for batch in torch.stack(images).split(32)
        ]
    return normalize(torch.cat(vectors).double(), dim=1)


def left_out(side: Side, patches: list[Tensor], how: str, model: EmbeddingModel) -> Tensor:
    """Return the unit vectors (n, d) of an image without each of n sets of patches."""
    if how == "map":
        return normalize(torch.stack([side.whole - side.parts[subset].sum(0) for subset in patches]), dim=1)
    once = {tuple(sorted(subset.tolist())): subset for subset in patches}
    vectors = dict(zip(once, points_of(model, [side.without(subset, how) for subset in once.values()]), strict=True))
    return torch.stack([vectors[tuple(sorted(subset.tolist()))] for subset in patches])


def influence(model: EmbeddingModel, side: Side, direction: Tensor) -> dict[str, Tensor]:
    """Return by how much each patch of the map depends on each patch of the image, (P, P) with columns of sum 1.

    A patch of the map stands for its product with a direction (d,) of vectors. `pixels` is (P,), see the module.
    """
    maps = list[Tensor]()

    def keep(_: Any, __: Any, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output.shape[2] > 1:
            maps.append(output)

    pixels, fill = (
        model.normalization(image[None].round().to(torch.uint8)) for image in (side.image, side.filled("painted"))
    )
    pixels.requires_grad_()
    handles = [module.register_forward_hook(keep) for module in model.backbone.modules()]
    features = model.backbone(pixels).detach().requires_grad_()
    for handle in handles:
        handle.remove()
    (weights,) = torch.autograd.grad(model.head.project(features)[0] @ direction.float(), features)
    products = torch.einsum("c,chw->hw", weights[0], maps[-1][0]).flatten()
    rows, columns = side.grid
    matrices = {name: torch.zeros(len(products), len(products)) for name in ("", ", by change", ", by center")}
    total = torch.zeros(len(products))
    for patch, product in enumerate(products):
        (slope,) = torch.autograd.grad(product, pixels, retain_graph=True)
        change = slope * (pixels.detach() - fill)
        values = slope**2, change.abs(), change
        squares, absolute, signed = (adaptive_avg_pool2d(per_pixel.sum(1), side.grid).flatten() for per_pixel in values)
        matrices[""][:, patch], matrices[", by change"][:, patch] = squares, absolute
        total += signed
    middle = matrices[""][:, rows // 2 * columns + columns // 2].reshape(rows, columns)
    for patch in range(len(products)):
        row, column = patch // columns - rows // 2, patch % columns - columns // 2
        moved = torch.zeros(rows, columns)
        moved[max(row, 0) : rows + row, max(column, 0) : columns + column] = middle[
            max(-row, 0) : rows - row, max(-column, 0) : columns - column
        ][: rows - max(row, 0), : columns - max(column, 0)]
        matrices[", by center"][:, patch] = moved.flatten()
    shares = {name: (matrix / matrix.sum(0).clamp(min=1e-30)).double() for name, matrix in matrices.items()}
    return shares | {"pixels": total.double()}


def explanations(model: EmbeddingModel, side: Side, other: Side, common: Tensor | None) -> Scores:
    """Return what each patch of an image contributes, by explanation; all of them if the common vector is known."""
    vector, other_vector = (normalize(image.whole, dim=0) for image in (side, other))
    length, cosine = side.whole.norm(), vector @ other_vector
    singles = [side.without(torch.tensor([patch]), "painted") for patch in range(len(side.parts))]
    scores = {SHOWN: side.parts @ other_vector / length, CEILING: cosine - points_of(model, singles) @ other_vector}
    if common is None:
        return scores
    scores["direction"] = side.parts @ (other_vector - cosine * vector) / length
    scores["specific"] = side.parts @ (other_vector - common) / length
    shares = influence(model, side, other_vector / length)
    scores["slope of pixels"] = shares.pop("pixels")
    for name in (SHOWN, "direction", "specific"):
        scores |= {f"{name}, spread{how}": share @ scores[name] for how, share in shares.items()}
    return scores


def measured(trained: TrainedModel, split: Split, pairs: int, *, is_choice: bool) -> Iterator[list[str]]:
    """Yield a row of the table for each explanation and deletion."""
    dataset, model = trained.recipe.dataset.build(split), trained.model
    inputs = inputs_of(dataset, trained.recipe.transform, training=False)

    def shown(index: int) -> Tensor:
        image = inputs[index, 0].input
        assert isinstance(image, Tensor)
        return image

    generator, common, worst = torch.Generator().manual_seed(0), None, 0.0
    if is_choice:
        rows = torch.randperm(len(dataset), generator=generator)[:64]
        common = points_of(model, [shown(int(index)) for index in rows]).mean(0)
    results: defaultdict[str, defaultdict[Deletion, list[float]]] = defaultdict(lambda: defaultdict(list))
    sides = list[Side]()
    for _ in range(pairs):
        first = int(torch.randint(len(dataset), (1,), generator=generator))
        same = (dataset.labels == dataset.labels[first]).nonzero().flatten()
        same = same[same != first]
        second = int(same[int(torch.randint(len(same), (1,), generator=generator))])
        images = [shown(first), shown(second)]
        whole = pair_contributions(model, images[0], images[1])
        worst = max(worst, abs(float(whole.values.sum()) - whole.score))
        sides = [Side(image.float(), patch_vectors(model, image).parts, whole.grid) for image in images]
        scores = [explanations(model, one, other, common) for one, other in (sides, sides[::-1])]
        count = max(1, len(sides[0].parts) // SHARE)
        drawn = [[torch.randperm(len(side.parts), generator=generator)[:count] for _ in range(DRAWS)] for side in sides]
        deleted = [
            [*(contributions.topk(count).indices for contributions in score.values()), *draws]
            for score, draws in zip(scores, drawn, strict=True)
        ]
        for how, where in DELETIONS:
            points = [left_out(side, patches, how, model) for side, patches in zip(sides, deleted, strict=True)]
            theirs = points[1] if where == "both" else normalize(sides[1].whole, dim=0)
            falls = whole.score - (points[0] * theirs).sum(1)
            for name, fall in zip(scores[0], falls.tolist(), strict=False):
                results[name][how, where].append(fall)
            results[RANDOM][how, where].append(float(falls[len(scores[0]) :].mean()))
    classes = f"{pairs} of {'training' if is_choice else 'test'} classes, {sides[0].grid[0]} x {sides[0].grid[1]}"
    for name, of_deletion in results.items():
        cells = list[str]()
        for deletion, falls in of_deletion.items():
            lower = sum(map(gt, falls, results[RANDOM][deletion])) / pairs
            cells.append(("" if name == RANDOM else f"{lower:.3f}, ") + f"{sum(falls) / pairs:.3f}")
        yield [classes, name, *cells, f"{worst:.0e}"]


def main() -> None:
    (name,) = sys.argv[1:]
    trained = load_model(RunFolder(Path(name)), start_ranks("cpu"))
    rows = list(measured(trained, "train", CHOICE, is_choice=True))
    for row in rows:
        print(" | ".join(row), flush=True)
    rows += measured(trained, "test", TEST, is_choice=False)
    header = ["pairs, patches", "explanation", *map(", ".join, DELETIONS), "sum"]
    write_report("why", __doc__, header, rows)


if __name__ == "__main__":
    main()
