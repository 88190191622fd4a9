"""Groups in which every two are alike: complete linkage, cut at a threshold, from the pairs that reach it."""

from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from dmlkit.embedding.groups.near_pairs import NearPairs


def complete_groups(pairs: NearPairs, count: int) -> list[Tensor]:
    """The clusters of complete linkage at the threshold of the pairs: within one every pair reaches it.

    From the most alike on, two clusters become one where all pairs between them are there; their similarity is that of
    the least alike. Single linkage would join unlike images through a chain of others. Each part that hangs together is
    grouped alone, so that memory holds the pairs of one at a time.

    Args:
        pairs: of two of the points.
        count: N, how many points there are.

    Returns:
        Groups (n,) int64 of at least two, their rows ascending; the one with the smallest row first.

    Example:
        >>> chain = NearPairs(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([0.99, 0.98]).double())
        >>> complete_groups(chain, 3)  # 0 and 2 are not alike
        [tensor([0, 1])]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = (pairs.first.numpy(), pairs.second.numpy())
    graph = coo_array((torch.ones(len(pairs.first)).numpy(), ends), shape=(count, count))
    part_of = torch.from_numpy(connected_components(graph, directed=False)[1])[pairs.first]
    order = part_of.argsort(stable=True)
    sizes = part_of.unique(return_counts=True)[1].tolist()
    groups: list[Tensor] = []
    for rows in order.split(sizes):
        members = torch.cat([pairs.first[rows], pairs.second[rows]]).unique()
        if len(rows) == len(members) * (len(members) - 1) // 2:  # every two are alike
            groups.append(members)
        else:
            columns = (pairs.first[rows].tolist(), pairs.second[rows].tolist(), pairs.similarities[rows].tolist())
            groups += _merge(list(zip(*columns, strict=True)))
    return sorted(groups, key=lambda group: int(group[0]))


def _merge(edges: list[tuple[int, int, float]]) -> list[Tensor]:
    """Merge the two most alike clusters until none are joined by all pairs; of equally alike ones the first."""
    members: dict[int, list[int]] = {}
    links: dict[int, dict[int, float]] = {}  # of two clusters, where all pairs between them are there
    for one, other, similarity in edges:
        for row, near in ((one, other), (other, one)):
            members.setdefault(row, [row])
            links.setdefault(row, {})[near] = similarity
    waiting = [(-similarity, one, other) for one, other, similarity in edges]
    heapify(waiting)
    while waiting:
        negative, kept, gone = heappop(waiting)
        if links.get(kept, {}).get(gone) != -negative:
            continue  # one of them has become part of another since
        members[kept] += members.pop(gone)
        ours, theirs = links.pop(kept), links.pop(gone)
        links[kept] = {near: min(ours[near], theirs[near]) for near in ours.keys() & theirs.keys()}
        for near in (ours.keys() | theirs.keys()) - {kept, gone}:
            links[near].pop(kept, None)
            links[near].pop(gone, None)
        for near, similarity in links[kept].items():
            links[near][kept] = similarity
            heappush(waiting, (-similarity, min(kept, near), max(kept, near)))
    return [torch.tensor(sorted(rows)) for rows in members.values() if len(rows) > 1]
