"""Ranks of single-shot galleries, which have one image of each class, drawn at random."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dmlkit.metrics.ranking.search import Lookup, Search, repeated_rows

BLOCK_ENTRIES = 2**22  # counts per query, positive and class at once: 32 MB
NODES = 8  # of Gauss-Legendre quadrature: exact for up to 15 classes with an item that ties with a positive


@torch.no_grad()
def single_shot(
    search: Search, labels: tuple[Tensor, Tensor], queries: Tensor, k: int, *, is_pessimistic: bool = False
) -> Tensor:
    r"""Compute the probability of a hit among the 1..k nearest of a single-shot gallery, (n, k) float64.

    This is the mean over all draws, which the repeated draws of CUHK03's protocol estimate. For a positive with score
    s, a class of :math:`n_c` items, of which :math:`a_c` score above s, is before it with probability
    :math:`a_c / n_c`, independently of other classes; its rank minus one has the Poisson binomial distribution. The
    query and its junk are not drawn. Items that tie are in a random order.

    Args:
        labels: (Q,) and (N,) int64 of the classes of queries and gallery; empty if the queries are the gallery.
        queries: (n,) int64, the queries, each with a positive.
        is_pessimistic: put items that tie before the positive instead.
    """
    device = search.gallery.device
    query_labels, item_labels = (side.to(device) for side in labels)
    item_labels = item_labels if len(item_labels) else query_labels
    positives, count = Lookup.of(query_labels, item_labels), int(torch.cat([query_labels, item_labels]).max()) + 1
    sizes = item_labels.bincount(minlength=count)
    copies, originals = repeated_rows(search.gallery)
    widest = int(positives.count[queries].max())
    rows = max(1, min(BLOCK_ENTRIES // (count * (widest + 1)), BLOCK_ENTRIES // len(item_labels)))
    probabilities: list[Tensor] = []
    for block in queries.split(rows):
        if search.rows is not None:
            scores = search.rows(block)
        else:
            scores = search.queries[block] @ search.gallery.T
            scores[:, copies] = scores[:, originals]
        hidden, present = search.excluded.columns(block)
        row = torch.arange(len(block), device=device)[:, None].expand_as(hidden)
        scores[row[present], hidden[present]] = -torch.inf
        drawn = sizes.repeat(len(block), 1)  # (n, C), items of each class that may be drawn
        drawn.index_put_((row[present], item_labels[hidden[present]]), drawn.new_tensor(-1), accumulate=True)
        columns, present = positives.columns(block)
        levels = scores.gather(1, columns).masked_fill(~present, torch.inf)
        levels = levels.masked_fill(levels == -torch.inf, torch.inf).sort(1).values  # (n, P), absent ones last
        above, reached = (_counts(levels, scores, item_labels, count, right=right) for right in (is_pessimistic, True))
        others = (drawn > 0) & ~one_hot(query_labels[block], count).bool()
        row, column = (levels < torch.inf).nonzero(as_tuple=True)  # of the M positives
        above, reached = ((part[row, column] / drawn.clamp(min=1)[row]) * others[row] for part in (above, reached))
        within = _within(above, reached, k)
        total = torch.zeros(len(block), k, dtype=torch.float64, device=device).index_add_(0, row, within)
        probabilities.append(total / row.bincount(minlength=len(block))[:, None])
    return torch.cat(probabilities)


def _counts(levels: Tensor, scores: Tensor, items: Tensor, count: int, *, right: bool) -> Tensor:
    """Count the items of each class that score above each ascending level (n, P), or reach it: (n, P, C) float64."""
    n, width = levels.shape
    below = torch.searchsorted(levels, scores.contiguous(), right=right)  # (n, N), levels that an item is above
    cells = (torch.arange(n, device=levels.device)[:, None] * (width + 1) + below) * count + items
    histogram = cells.flatten().bincount(minlength=n * (width + 1) * count).view(n, width + 1, count)
    return histogram.flip(1).cumsum(1).flip(1)[:, 1:].double()


def _within(above: Tensor, reached: Tensor, k: int) -> Tensor:
    """Return the probability that fewer than 1..k classes are before each positive, (M, k) float64.

    Args:
        above, reached: (M, C), probability of each class that its item scores above the positive, or reaches it.
    """
    import numpy as np

    within = _poisson_binomial(above, k)
    tied = (above < reached).any(1)
    if tied.any():
        above, reached, within[tied] = above[tied], reached[tied], 0.0
        for node, weight in zip(*np.polynomial.legendre.leggauss(NODES), strict=True):
            position = (float(node) + 1) / 2  # of the positive among the tied items
            within[tied] += float(weight) / 2 * _poisson_binomial(above + position * (reached - above), k)
    return within


def _poisson_binomial(shares: Tensor, k: int) -> Tensor:
    """Return the probability that fewer than 1..k of independent events (M, C) happen, (M, k)."""
    happened = torch.zeros(k, len(shares), dtype=torch.float64, device=shares.device)  # exactly 0..k-1
    happened[0] = 1
    for share in shares.T.contiguous():
        moved = happened * share
        happened -= moved
        happened[1:] += moved[:-1]
    return happened.cumsum(0).T
