"""What the losses over ranks share: chunks, memory, and batches without anything to order."""

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from dmlkit.losses import ROADMAP, RecallSurrogate, SmoothAP, SupCon, ranks
from dmlkit.manifolds import Sphere

LOSSES = [SmoothAP, RecallSurrogate, ROADMAP]


def value_and_gradient(loss, x, labels):
    leaf = x.clone().requires_grad_()
    value = loss(leaf, labels)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("temperature", [0.1, 1e-4])  # the second has differences at which sigmoids are 0
@pytest.mark.parametrize("kind", LOSSES)
def test_neither_chunks_nor_a_list_of_positives_change_the_loss(pair_batch, kind, temperature, monkeypatch):
    loss = kind(Sphere(4), temperature=temperature)
    expected = value_and_gradient(loss, *pair_batch)
    monkeypatch.setattr(ranks, "CHUNK", 50)  # 4 pairs of 12 columns
    torch.testing.assert_close(value_and_gradient(loss, *pair_batch), expected)
    monkeypatch.setattr(ranks, "may_list", lambda positive: False)  # as a GPU for small batches
    torch.testing.assert_close(value_and_gradient(loss, *pair_batch), expected)


@pytest.mark.parametrize("kind", LOSSES)
def test_no_tensor_is_larger_than_the_pairs_or_a_chunk(kind, monkeypatch):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(one, torch.Tensor):
                    self.numel = max(self.numel, one.numel())
            return out

    monkeypatch.setattr(ranks, "CHUNK", 2**15)
    points, labels = normalize(torch.randn(240, 4), dim=1), torch.arange(240) // 8
    with Largest() as largest:
        value_and_gradient(kind(Sphere(4)), points, labels)
    assert largest.numel == 240 * 240  # 1 680 positives x 240 columns would be 403 200


@pytest.mark.parametrize("kind", [*LOSSES, SupCon])
@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2, 3], [0]], ids=["one class", "no pair", "one image"])
def test_without_anything_to_order_loss_and_gradient_are_0(kind, labels):
    points = normalize(torch.randn(len(labels), 4), dim=1)
    value, gradient = value_and_gradient(kind(Sphere(4)), points, torch.tensor(labels))
    assert value == 0 and not gradient.any()
