"""Search on a GPU, block by block with torch."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from dmlkit.metrics.ranking.products import block_rows, inner_products_into
from dmlkit.metrics.ranking.search import Depth, Search, Standing, repeated_rows

SORT_ABOVE = 8  # positives; each needs a pass over the products, and sorting them takes about as long as ten passes


def standings(search: Search, blocks: Iterable[Tensor], depth: Depth) -> Iterator[Standing]:
    """Count for blocks of queries (n,); all positives are ranked at any depth."""
    copies, originals = repeated_rows(search.gallery)
    rows = block_rows(len(search.gallery))
    out = search.gallery.new_empty(rows, len(search.gallery))
    for block in blocks:
        width = int(search.positives.count[block].max())
        standings: list[tuple[Tensor, ...]] = []
        for few in block.split(rows):
            products = inner_products_into(search.queries[few], search.gallery, out)
            products[:, copies] = products[:, originals]
            hidden, present = search.excluded.columns(few)
            row = torch.arange(len(few), device=few.device)[:, None].expand_as(hidden)
            products[row[present], hidden[present]] = -torch.inf
            columns, present = search.positives.columns(few)
            scores = products.new_full((len(few), width), -torch.inf)
            scores[:, : columns.shape[1]] = products.gather(1, columns).masked_fill(~present, -torch.inf)
            scores, order = scores.sort(1, descending=True)
            levels = scores[:, :1] if depth.first_only else scores
            nearest = products.argmax(1)
            above, reached = count_levels(products, levels.contiguous())
            absent = levels == -torch.inf
            size = products.shape[1]
            found = scores, above.masked_fill(absent, size), reached.masked_fill(absent, size + 1), nearest
            if search.levels is not None:
                found = (*found, pad(columns, (0, width - columns.shape[1])).gather(1, order))
            standings.append(found)
        yield Standing(*(torch.cat(column) for column in zip(*standings, strict=True)))


def count_levels(products: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Count how many entries of each row (n, N) are above each of its levels (n, J), and how many reach it, (n, J).

    Example:
        >>> above, reached = count_levels(torch.tensor([[3.0, 1.0, 2.0, 2.0]]), torch.tensor([[2.0, 1.0]]))
        >>> above.tolist(), reached.tolist()
        ([[1, 3]], [[3, 4]])
    """
    if levels.shape[1] <= SORT_ABOVE:
        columns = levels[:, :, None].unbind(1)
        above = torch.stack([(products > level).sum(1) for level in columns], 1)
        return above, torch.stack([(products >= level).sum(1) for level in columns], 1)
    ascending = products.sort(1).values
    above = products.shape[1] - torch.searchsorted(ascending, levels, right=True)
    return above, products.shape[1] - torch.searchsorted(ascending, levels)
