"""The contract of tunings."""

import torch
from torch import nn

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.tuning import TuningConfig
from dmlkit.testing.backbones import samples
from dmlkit.testing.promise import Promise, changed, expect, hold


def check_tuning(config: TuningConfig, backbone: BackboneConfig) -> None:
    """Check a tuning against its contract, on a backbone that it can tune.

    Weights that are not tuned have no gradient and stay bit-identical, including batch norms; tuned weights have a
    gradient and change; features need a gradient if anything is tuned.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.backbones import SmallCNNConfig
        >>> from dmlkit.backbones.tuning import LastBlocksConfig
        >>> check_tuning(LastBlocksConfig(blocks=2), SmallCNNConfig(width=4))
    """
    hold(TUNING, f"{config.name} of {backbone.name}", config, backbone)


def _tuned(config: TuningConfig, backbone: BackboneConfig) -> Backbone:
    return changed(backbone, tuning=config).build().train()


def what_is_tuned_alone_has_gradients(config: TuningConfig, backbone: BackboneConfig) -> None:
    """Check that exactly the tuned weights have a gradient."""
    network = _tuned(config, backbone)
    tuned = {id(parameter) for parameter in network.tuned_parameters()}
    features = network(samples(backbone, 4))
    expect(
        features.requires_grad == bool(tuned),
        f"{len(tuned)} weights are tuned, features.requires_grad is {features.requires_grad}",
    )
    nn.Linear(network.num_features, 2)(features).square().sum().backward()
    for name, parameter in network.named_parameters():
        message = f"{name}: tuned {id(parameter) in tuned}, has a gradient {parameter.grad is not None}"
        expect((parameter.grad is not None) == (id(parameter) in tuned) == parameter.requires_grad, message)


def what_is_not_tuned_stays_to_the_bit(config: TuningConfig, backbone: BackboneConfig) -> None:
    """Check that a training step changes only tuned weights and statistics, and some if any are tuned."""
    network = _tuned(config, backbone)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    head = nn.Linear(network.num_features, 2)
    head(network(samples(backbone, 4))).square().sum().backward()
    torch.optim.SGD([*network.tuned_parameters(), *head.parameters()], lr=0.1).step()
    moved = [name for name, tensor in network.state_dict().items() if not torch.equal(tensor, before[name])]
    training = {name for name, module in network.named_modules() if module.training}
    frozen = [name for name in moved if name.rpartition(".")[0] not in training or name in network.frozen_names]
    expect(not frozen, f"{', '.join(frozen[:3])} changed but must be frozen")
    tuned = len(network.tuned_parameters())
    expect(bool(moved) == bool(tuned), f"{tuned} weights are tuned, {len(moved)} tensors changed")


TUNING: tuple[Promise, ...] = (what_is_tuned_alone_has_gradients, what_is_not_tuned_stays_to_the_bit)
