"""Proxy-Anchor loss: one learnable proxy per class pulls its class and pushes the others."""

from dmlkit.losses.proxies.anchor_loss import AnchorLoss
from dmlkit.losses.proxies.transport_weights import TransportWeights


class ProxyAnchor(AnchorLoss, name="proxy_anchor"):
    r"""Proxy-Anchor (Kim et al. 2020): each class proxy weights the images of the batch by how hard they are.

    Kim et al., CVPR 2020 (arXiv:2003.13911), eq. 4; s = relative similarity, P+ = classes in the batch.

    .. math:: \frac{1}{|P^+|} \sum_{p \in P^+} \log(1 + \sum_{y_x = p} e^{-\alpha (s(x,p) - \delta)})
            + \frac{1}{|P|} \sum_{p \in P} \log(1 + \sum_{y_x \ne p} e^{\alpha (s(x,p) + \delta)})

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> ProxyAnchor(Sphere(2), num_classes=10)(torch.eye(2), torch.tensor([3, 7])).shape
        torch.Size([])
    """

    transport: TransportWeights | None = None
    """Weights (1 + x) from transport plans of grouplets; null for none."""
