"""Near-duplicates of test images among those of other splits: what ``dmlkit data check --model`` adds."""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from torch import Tensor

from dmlkit.datasets.files.listing import LISTED_SPLITS, Listing
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.groups.collection import Collection, embedded_collection
from dmlkit.embedding.groups.duplicates import check_reachable
from dmlkit.embedding.groups.near_pairs import near_pairs
from dmlkit.embedding.in_memory import Bar, no_bar
from dmlkit.embedding.trained import load_model
from dmlkit.loading.check import Finding, Findings
from dmlkit.run_folder.folder import RunFolder


def check_leaks(
    listing: Listing,
    findings: Findings,
    run: Path,
    threshold: float,
    *,
    is_published: bool,
    device: str = "auto",
    bar: Bar = no_bar,
) -> None:
    """Embed all images by a run's model; pairs of two splits that are as alike as a threshold are added to findings.

    Args:
        listing: of the dataset.
        findings: that this adds to; a pair is a fault, or a note where the images are a benchmark's.
        run: whose model.
        threshold: the least similarity of a near-duplicate.
        is_published: the images are a benchmark's, whose splits are as their authors want them.
        device: see `start_fabric`.
        bar: shows each step.

    Raises:
        UserError: there is no such run, or it takes other samples, or see `duplicate_groups`.
    """
    fabric = start_fabric(device)
    trained = load_model(RunFolder(run), fabric)
    images = embedded_collection(trained, fabric, listing.everything(), str(listing.source or listing.root), bar)
    check_reachable(images, threshold)
    assert images.rows is not None
    splits = listing.splits[images.rows.numpy()]
    for one, other in combinations(range(len(LISTED_SPLITS)), 2):
        ones, others = ((images.rows.new_tensor(splits) == split).nonzero()[:, 0] for split in (one, other))
        if not len(ones) or not len(others):
            continue
        lines = list(_leaks(images, ones, others, threshold))
        verdict = ("note" if is_published else "fault") if lines else "ok"
        (findings.notes if is_published else findings.faults).extend(lines)
        named = f"{LISTED_SPLITS[one]} and {LISTED_SPLITS[other]}"
        findings.rows.append(Finding(f"near-duplicates in {named}", "0", str(len(lines)), verdict))


def _leaks(images: Collection, ones: Tensor, others: Tensor, threshold: float) -> Iterator[str]:
    pairs = near_pairs(images.manifold, images.points[ones], images.points[others], threshold)
    for first, second, similarity in zip(ones[pairs.first], others[pairs.second], pairs.similarities, strict=True):
        paths = f"{images.paths[int(first)]}, {images.paths[int(second)]}"
        yield f"near-duplicate in two splits, {similarity:.4f}: {paths}"
