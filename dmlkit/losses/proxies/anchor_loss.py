"""What Proxy-Anchor and MPA share: pull and push terms of each class, weighted by transport plans if wanted."""

from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.distributed.class_shard import ClassShard
from dmlkit.losses.proxies.anchor_terms import Anchors, number_of_classes_in
from dmlkit.losses.proxies.class_chunks import Pool
from dmlkit.losses.proxies.class_sum import sum_over_classes
from dmlkit.losses.proxies.proxy_loss import ProxyLoss, Selection
from dmlkit.losses.proxies.transport_weights import TransportWeights
from dmlkit.manifolds.base import Manifold

TRANSPORT_REASON = "transport plans of grouplets need the proxies of all classes"
TRANSPORT_REQUIREMENTS = (
    Requirement("training.shard_proxies", (False,), TRANSPORT_REASON),
    Requirement("loss.negative_fraction", (1.0,), TRANSPORT_REASON),
)


class AnchorLoss(ProxyLoss):
    """A loss of `Anchors` terms.

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        transport: weights (1 + x_ij); none if None.
        proxies_per_class: see `ProxyLoss`, as the rest.
        pool: makes one similarity of K.
        chunk_size: how many classes to compute at a time.
        negative_fraction: the part of the classes that a step computes; all with ``transport``.

    Raises:
        ValueError: a fraction out of range, or below 1 with ``transport``.
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        margin: float,
        scale: float,
        transport: TransportWeights | None,
        chunk_size: int | None,
        negative_fraction: float,
        proxies_per_class: int | None = None,
        pool: Pool | None = None,
    ) -> None:
        super().__init__(
            manifold,
            num_classes,
            proxies_per_class=proxies_per_class,
            pool=pool,
            chunk_size=chunk_size,
            negative_fraction=negative_fraction,
        )
        if transport is not None and negative_fraction < 1:
            raise ValueError(
                f"{type(self).__name__}: expected negative_fraction 1 with transport, got {negative_fraction}: "
                f"{TRANSPORT_REASON}"
            )
        self.margin, self.scale, self.transport = margin, scale, transport

    def keep_shard(self, shard: ClassShard) -> None:
        """See `ProxyLoss.keep_shard`.

        Raises:
            ValueError: with ``transport``.
        """
        if self.transport is not None and shard.ranks > 1:
            raise ValueError(f"{type(self).__name__}: cannot be shared out over ranks: {TRANSPORT_REASON}")
        super().keep_shard(shard)

    def anchor_terms(self, selection: Selection, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The terms of a batch with labels (B,) among all classes."""
        present = number_of_classes_in(labels, self.all_classes, like=embeddings)
        push_factor = present.new_full((), 1 / selection.num_classes)
        anchors = Anchors(selection.labels, self.scale, self.margin, 1 / present, push_factor)
        terms = sum_over_classes(selection.walk, anchors.score, embeddings, selection.proxies)
        if self.transport is None:
            return terms
        return terms + self.transport(selection.walk, embeddings, selection.proxies, anchors)
