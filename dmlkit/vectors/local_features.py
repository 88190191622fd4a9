"""Local features of images: patches of a run's own network, or keypoints; galleries keep them next to the points.

Keypoints (SIFT) need no training: those of two images match if they fit one affine map.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.source import LOCAL, SIFT
from dmlkit.model import EmbeddingModel
from dmlkit.pooling import Pooling
from dmlkit.vectors.in_memory import embed_dataset
from dmlkit.vectors.manifest import LocalFusion
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import TrainedModel

LEAST_CELLS = 64  # of a map: on the 5 x 5 cells of the last map of Lite0 at 160 pixels, matches say little
BLOCK = 256  # images whose patches are centered at once


def maps_of(trained: TrainedModel, fabric: Ranks, dataset: Dataset, rows: Tensor, bar: Bar = no_bar) -> Tensor:
    """Return the cells (N, P, C) float16 of the maps of images, from which `centered` makes features of patches.

    They are those of the last map of a block of convolutions with at least `LEAST_CELLS` cells, or the tokens of a
    transformer.

    Args:
        rows: (N,) indices of the images, all of which can be read.
    """
    if not trained.samples.has_pixels:
        raise UserError(f"--with {LOCAL}: matches patches of images, got {trained.samples.name}s; leave it out")
    require_one_process(LOCAL, fabric)
    with bar("features of patches", len(rows)) as advance, kept_maps(trained.model) as maps:
        embed_dataset(
            fabric,
            trained.model,
            dataset,
            trained.recipe.transform,
            indices=rows.tolist(),
            workers=trained.recipe.training.workers if len(rows) > BLOCK else 0,
            advance=advance,
        )
    return torch.cat(maps)


@contextmanager
def kept_maps(model: EmbeddingModel) -> Generator[list[Tensor]]:
    """Yield a list to which the cells (n, P, C) float16 of each batch are appended that the network embeds."""
    last, parts = dict[str, Tensor](), list[Tensor]()

    def keep(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        maps = inputs[0] if isinstance(module, Pooling) else output
        if isinstance(maps, Tensor) and maps.ndim == 4 and maps.shape[2] * maps.shape[3] >= LEAST_CELLS:
            last["maps"] = maps

    def end(*_: Any) -> None:
        if "maps" not in last:
            raise UserError(
                f"--with {LOCAL}: the network has no map of at least {LEAST_CELLS} cells; use larger images"
            )
        parts.append(last.pop("maps").flatten(2).transpose(1, 2).half().cpu())

    network = model.backbone
    convolutions = {one: sum(isinstance(part, nn.Conv2d) for part in one.modules()) for one in network.modules()}
    blocks = [one for one, count in convolutions.items() if isinstance(one, Pooling) or count > 1]
    handles = [one.register_forward_hook(keep) for one in blocks if one is not network]
    handles.append(network.register_forward_hook(end))
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()


def mean_of(maps: Tensor) -> Tensor:
    """Return the mean (C,) of all cells of maps (N, P, C)."""
    return torch.stack([part.float().mean((0, 1)) for part in maps.split(BLOCK)]).mean(0)


def centered(maps: Tensor, mean: Tensor) -> Tensor:
    """Return cells (N, P, C) less a mean (C,), as unit vectors in float16."""
    return torch.cat([nn.functional.normalize(part.float() - mean, dim=-1).half() for part in maps.split(BLOCK)])


def features_of(
    local: LocalFusion, trained: TrainedModel, fabric: Ranks, dataset: Dataset, rows: Tensor, bar: Bar = no_bar
) -> Tensor:
    """Return the local features (N, P, C) float16 of images, to be compared with others of the same fusion."""
    if local.run == SIFT:
        require_one_process(SIFT, fabric)
        return keypoints_of(dataset, rows, bar).packed
    return centered(maps_of(trained, fabric, dataset, rows, bar), torch.tensor(local.mean))


@contextmanager
def batch_features(
    local: LocalFusion, trained: TrainedModel, dataset: Dataset
) -> Generator[Callable[[Tensor], Tensor]]:
    """Yield a function that returns the local features (n, P, C) float16 of the batch that the model embedded last.

    It takes the rows (n,) of the batch in the dataset.
    """
    if local.run == SIFT:
        yield lambda rows: keypoints_of(dataset, rows).packed
        return
    mean = torch.tensor(local.mean)
    with kept_maps(trained.model) as maps:
        yield lambda _: centered(maps.pop(), mean)


Match = Callable[[int, Tensor], Tensor]
"""Function of a row of some queries and rows (K,) of some images, which returns how well they match (K,), from 0."""
AT_ONCE = 16  # queries whose candidates are in memory at once: 36 MB of 100 patches of 112 numbers


def match_scores(
    kind: str, features_at: Callable[[Tensor], Tensor], advance: Callable[[int], None] = lambda _: None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the scores of a `dmlkit.nearest.rescore.Rescorer`: how well local features of images match.

    Args:
        features_at: returns the features (M, P, C) float16 of images, given their numbers (M,).
    """

    def patches(ours: Tensor, theirs: Tensor) -> Match:
        return lambda row, rows: match_patches(ours[row].float(), theirs.index_select(0, rows).float())

    def scores(queries: Tensor, items: Tensor) -> Tensor:
        found = torch.empty(items.shape, dtype=torch.float64)
        for rows in torch.arange(len(queries)).split(AT_ONCE):
            once, places = items[rows].unique(return_inverse=True)
            ours, theirs = features_at(queries[rows]), features_at(once)
            match = match_keypoints(Keypoints.of(ours), Keypoints.of(theirs)) if kind == SIFT else patches(ours, theirs)
            for row, place in enumerate(places):
                found[rows[row]] = match(row, place)
            advance(len(rows))
        return found

    return scores


def mutual_nearest(cosines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the nearest feature of an image for each one of a query, and whether each is also the nearest of the other.

    Args:
        cosines: (K, I, P), of I features of each of K images with P of the query.

    Returns:
        The largest cosine, the number of the feature that has it, and whether both are nearest, (K, P) each.
    """
    best, nearest = cosines.max(1)
    back = torch.from_numpy(cosines.numpy().argmax(2))  # the same as torch's, in a fifth of the time
    return best, nearest, back.gather(1, nearest) == torch.arange(cosines.shape[2])


def match_patches(query: Tensor, items: Tensor) -> Tensor:
    """Score how well the patches of images match those of a query: the mean cosine of mutual nearest neighbors.

    Pairs of patches that are each other's nearest add their cosine, at least 0; the sum is divided by the number of
    patches. The score is symmetric.

    Args:
        query: (P, C) unit vectors of patches.
        items: (K, P, C) those of K images.

    Returns:
        (K,) scores from 0 to 1.

    Example:
        >>> query = torch.eye(2)
        >>> match_patches(query, torch.stack([query.flip(0), query[[0, 0]]]))
        tensor([1.0000, 0.5000])
    """
    best, _, mutual = mutual_nearest(items @ query.T)
    return (best.clamp(min=0) * mutual).mean(1)


def require_one_process(kind: str, fabric: Ranks) -> None:
    """Raise a `UserError` if there are several processes."""
    if fabric.world_size > 1:
        raise UserError(f"--with {kind}: runs in one process, got {fabric.world_size}; start it without ranks")


MOST_KEYPOINTS = 128  # of an image, those of the highest contrast: 100 candidates are matched in 18 ms
KEYPOINT_SIDE = 320  # pixels; larger images are reduced
LARGEST_RATIO = 0.8  # of the distances of the nearest and the second keypoint (Lowe 2004)
TOLERANCE = 0.03  # of the longer side
HYPOTHESES = 128  # of three matches each: with 3 of 10 matches right, 97 % of the pairs have a right one among them
LARGEST_CHANGE = 16.0  # of the area by a map, to either side: objects 4 times as large, or as small
LEAST_MATCHES = 3  # that define a map


class Keypoints(NamedTuple):
    """Keypoints of N images, at most `MOST_KEYPOINTS` of each."""

    places: Tensor
    """(N, P, 2) float32, by the longer side of the image."""
    descriptors: Tensor
    """(N, P, 128) float16, unit vectors; 0 where an image has fewer keypoints."""

    @property
    def packed(self) -> Tensor:
        """The same bits as one tensor (N, P, 132) float16: each float32 of a place takes two numbers."""
        return torch.cat([self.descriptors, self.places.contiguous().view(torch.float16)], dim=2)

    @classmethod
    def of(cls, packed: Tensor) -> "Keypoints":
        """Return the keypoints of `packed`."""
        return cls(packed[..., 128:].contiguous().view(torch.float32), packed[..., :128])


def keypoints_of(dataset: Dataset, rows: Tensor, bar: Bar = no_bar) -> Keypoints:
    """Return the keypoints of images (SIFT, Lowe 2004), described by the roots of its histograms.

    The roots are those of RootSIFT (Arandjelović & Zisserman 2012), whose cosine compares histograms.

    Args:
        rows: (N,) indices of the images, all of which can be read.
    """
    try:
        cv2: Any = import_module("cv2")
    except ImportError:
        raise UserError(f"--with {SIFT}: this needs OpenCV; install it with: pip install 'dmlkit[sift]'") from None
    if not dataset.kind.has_pixels:
        raise UserError(f"--with {SIFT}: matches keypoints of images, got {dataset.kind.name}s; leave it out")
    detector = cv2.SIFT_create(nfeatures=MOST_KEYPOINTS)
    places = torch.zeros(len(rows), MOST_KEYPOINTS, 2)
    descriptors = torch.zeros(len(rows), MOST_KEYPOINTS, 128, dtype=torch.float16)
    with bar("keypoints", len(rows)) as advance:
        for row, index in enumerate(rows.tolist()):
            pixels = dataset.sample(index).permute(1, 2, 0).numpy()
            gray, longest = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), max(pixels.shape[:2])
            scale = min(1.0, KEYPOINT_SIDE / longest)
            if scale < 1:
                gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
            points, histograms = detector.detectAndCompute(gray, None)
            if points:
                roots = torch.from_numpy(np.sqrt(np.maximum(histograms[:MOST_KEYPOINTS], 0)))
                descriptors[row, : len(roots)] = nn.functional.normalize(roots, dim=1).half()
                spots = np.array([point.pt for point in points[:MOST_KEYPOINTS]], np.float32) / (scale * longest)
                places[row, : len(roots)] = torch.from_numpy(spots)
            advance(1)
    return Keypoints(places, descriptors)


def match_keypoints(queries: Keypoints, gallery: Keypoints) -> Match:
    """Return a function that scores how well images (K,) of the gallery match a query, from 0 to 1: (K,).

    Keypoints match if they are each other's nearest, and clearly nearer than the second. The score is the logarithm of
    the number of matches that fit one affine map, plus one, by its largest value.
    """

    def scores(row: int, rows: Tensor) -> Tensor:
        descriptors = gallery.descriptors.index_select(0, rows)  # indexing by [rows] takes four times as long
        place, matched = matches(queries.descriptors[row].float(), descriptors.float())
        others = gallery.places[rows].gather(1, place[..., None].expand(-1, -1, 2))
        found = verify_affine(queries.places[row], others, matched, TOLERANCE)
        return (found.sum(1) + 1).log() / log(MOST_KEYPOINTS + 1)

    return scores


def matches(query: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
    """Match keypoints of a query with those of other images.

    Args:
        query: (P, 128) unit vectors, or zeros.
        items: (K, P, 128) those of K images.

    Returns:
        The nearest keypoint of each one of the query, (K, P), and whether it is a match, (K, P) bool.
    """
    cosines = (items.flatten(0, 1) @ query.T).unflatten(0, items.shape[:2])  # (K, keypoints of the item, of the query)
    best, nearest, mutual = mutual_nearest(cosines)
    second = cosines.scatter_(1, nearest[:, None], -1.0).amax(1)
    is_clear = (1 - best) < LARGEST_RATIO**2 * (1 - second)  # squared distances of unit vectors by two
    return nearest, mutual & is_clear & (best > 0)


def verify_affine(query: Tensor, items: Tensor, matched: Tensor, tolerance: float) -> Tensor:
    """Find the matches that fit the affine map of most of them, by RANSAC (Fischler & Bolles 1981), (K, M) bool.

    Maps that mirror, or change the area more than `LARGEST_CHANGE` times, are left out. The same matches give the same
    result.

    Args:
        query: (M, 2) places in the query.
        items: (K, M, 2) the matched places in K other images.
        matched: (K, M) bool, which of these are matches.
        tolerance: distance within which a match fits, in the units of the places.

    Example:
        >>> query = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.2]])
        >>> turned = torch.stack([2 - query[:, 1], query[:, 0]], dim=1)  # by 90 degrees, and moved
        >>> turned[4] = 9.0
        >>> verify_affine(query, turned[None], torch.ones(1, 5, dtype=torch.bool), 0.1).tolist()
        [[True, True, True, True, False]]
    """
    inliers = torch.zeros_like(matched)
    enough = (matched.sum(1) >= LEAST_MATCHES).nonzero()[:, 0]
    if not len(enough):
        return inliers
    places, others, kept = query.T, items[enough].movedim(2, 0), matched[enough]  # (2, M), (2, K', M) and (K', M)
    pairs, numbers = kept.nonzero(as_tuple=True)  # the T matches of all pairs in one list, since most pairs have few
    first, second, counts = places[:, numbers], others[:, pairs, numbers], kept.sum(1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(len(enough), HYPOTHESES, LEAST_MATCHES, generator=generator) * counts[:, None, None]
    drawn = drawn.long() + (counts.cumsum(0) - counts)[:, None, None]  # (K', H, 3), places in the list
    tried = _maps_through(first[:, drawn], second[:, drawn], tolerance)  # (3, 2, K', H)
    fits = _fitting(first[..., None], second[..., None], tried.index_select(2, pairs), tolerance)  # (T, H)
    rows = torch.arange(len(enough))
    votes = (rows[:, None] == pairs).float() @ fits.float()  # (K', H)
    fitted = tried[:, :, rows, votes.argmax(1)]
    found = _fitting(places[:, None], others, fitted[..., None], tolerance) & kept
    again = _least_squares(places, others, found, fitted)
    wider = _fitting(places[:, None], others, again[..., None], tolerance) & kept
    is_better = wider.sum(1) > found.sum(1)
    found[is_better] = wider[is_better]
    inliers[enough] = found
    return inliers


def _maps_through(places: Tensor, items: Tensor, tolerance: float) -> Tensor:
    """Return the maps (3, 2, ...) of three places (2, ..., 3) to three others; zeros if they are on a line."""
    start, end = places[..., 0], items[..., 0]
    (x, y), (u, v) = ((three[..., 1:] - three[..., :1]).unbind() for three in (places, items))  # sides: (..., 2) each
    area = x[..., 0] * y[..., 1] - x[..., 1] * y[..., 0]
    is_line = area.abs() < tolerance**2  # or a match twice
    inverse = torch.stack([y[..., 1], -y[..., 0], -x[..., 1], x[..., 0]]).unflatten(0, (2, 2)) / area.where(~is_line, 1)
    linear = (inverse[:, :, None] * torch.stack([u, v]).movedim(-1, 0)).sum(1)  # (2, 2, ...)
    return torch.cat([linear, (end - (start[:, None] * linear).sum(0))[None]]).where(~is_line, 0)


def _fitting(places: Tensor, items: Tensor, maps: Tensor, tolerance: float) -> Tensor:
    """Return which of the places (2, ...) a map (3, 2, ...) brings near the others (2, ...), if it is allowed."""
    areas = maps[0, 0] * maps[1, 1] - maps[0, 1] * maps[1, 0]
    is_allowed = (areas > 1 / LARGEST_CHANGE) & (areas < LARGEST_CHANGE)
    moved = maps[2].addcmul(maps[0], places[0]).addcmul_(maps[1], places[1])  # coordinates first: 128 maps in a row
    return ((moved - items).square_().sum(0) <= tolerance**2) & is_allowed


def _least_squares(places: Tensor, items: Tensor, used: Tensor, otherwise: Tensor) -> Tensor:
    """Return the maps (3, 2, K) with the smallest squared errors of the matches used (K, M), if there are enough."""
    rows = torch.cat([places, torch.ones_like(places[:1])]).T  # (M, 3)
    weighted = (rows * used[..., None]).mT  # (K, 3, M)
    gram = weighted @ rows + 1e-9 * torch.eye(3)
    enough = (used.sum(1) > LEAST_MATCHES) & (torch.linalg.det(gram).abs() > 1e-9)
    fitted = torch.linalg.solve(gram.where(enough[:, None, None], torch.eye(3)), weighted @ items.movedim(0, 2))
    return fitted.movedim(0, 2).where(enough, otherwise)
