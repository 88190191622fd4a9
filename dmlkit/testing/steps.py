"""The contracts of what training steps need: samplers, miners, optimizers and schedules."""

from itertools import product
from math import isclose

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlkit.errors import UserError
from dmlkit.manifolds import Sphere
from dmlkit.miners import Miner, MinerConfig, Triplets
from dmlkit.optimizers import LearningRateMultipliers, OptimizerConfig
from dmlkit.samplers.base import Sampler, SamplerConfig
from dmlkit.schedules import ScheduleConfig
from dmlkit.testing.promise import changed, expect, expect_close, expect_refused, fitting_manifolds, hold

SUPER_CLASSES = torch.arange(30) % 3
LABELS = torch.arange(30).repeat_interleave(20)[torch.randperm(600, generator=torch.Generator().manual_seed(0))]


def check_sampler(config: SamplerConfig) -> None:
    """Check a sampler against its contract: pure in (seed, epoch), with the reported length and batch size.

    Example:
        >>> from dmlkit.samplers import Random
        >>> check_sampler(Random.Config())
    """
    promises = [
        batches_depend_on_seed_and_epoch_alone,
        a_checkpoint_changes_no_batch,
        length_and_batch_size_are_honest,
        too_few_images_or_classes_are_refused,
    ]
    hold(promises, config.name, config)


def build_sampler(config: SamplerConfig, seed: int = 1) -> Sampler:
    """Build the sampler as training does, for images without groups."""
    return config.build(LABELS, seed, SUPER_CLASSES, None)


def batches_depend_on_seed_and_epoch_alone(config: SamplerConfig) -> None:
    """Check that batches depend only on seed and epoch, not on earlier draws, and differ for others."""
    first, again, other = (build_sampler(config, seed) for seed in (1, 1, 2))
    random_state = torch.get_rng_state()
    again.batches(epoch=7)  # drawing other epochs changes nothing
    expect(torch.equal(torch.get_rng_state(), random_state), "it changes the model's random state")
    expect(first.batches(epoch=3) == again.batches(epoch=3), "the same seed and epoch give other batches")
    expect(first.batches(epoch=3) != first.batches(epoch=4), "another epoch gives the same batches")
    expect(first.batches(epoch=3) != other.batches(epoch=3), "another seed gives the same batches")


def a_checkpoint_changes_no_batch(config: SamplerConfig) -> None:
    """Check that a sampler restored from its state after two epochs has the batches of one that continued."""
    space, centers = Sphere(DIM), torch.randn(30, DIM)
    continued, restored = build_sampler(config), build_sampler(config)
    samplers = [continued]
    for epoch in range(4):
        if epoch == 2:
            restored.restore(continued.state())
            samplers.append(restored)
        for sampler in samplers:
            sampler.set_epoch(epoch, space)
        batches, *others = (sampler.batches(epoch) for sampler in samplers)
        expect(others in ([], [batches]), f"epoch {epoch} has other batches")
        for sampler, batch in product(samplers, batches):
            sampler.learn_from(space.from_features(centers[LABELS[batch]]), LABELS[batch], space)


def length_and_batch_size_are_honest(config: SamplerConfig) -> None:
    """Check that an epoch has len(sampler) batches, each of batch_size valid indices."""
    sampler = build_sampler(config)
    batches = sampler.batches(epoch=0)
    expect(len(batches) == len(sampler) > 0, f"got {len(batches)} batches, expected {len(sampler)}")
    sizes = {len(batch) for batch in batches}
    expect(sizes == {sampler.batch_size}, f"got batches of {sorted(sizes)} images, expected {sampler.batch_size}")
    expect(all(0 <= index < len(LABELS) for batch in batches for index in batch), "an index is out of range")


def too_few_images_or_classes_are_refused(config: SamplerConfig) -> None:
    """Check that four images of two classes raise a UserError that names the sampler, if a batch has more images."""
    few = torch.tensor([0, 0, 1, 1]), 1, torch.tensor([0, 1])
    if build_sampler(config).batch_size > len(few[0]):
        expect_refused(lambda: config.build(*few), UserError, "sampler", "4 images of 2 classes")


DIM = 6


def check_miner(config: MinerConfig) -> None:
    """Check a miner against its contract: valid positives and negatives, without gradient, for any batch.

    Example:
        >>> from dmlkit.miners import Hard
        >>> check_miner(Hard.Config())
    """
    promises = [
        it_keeps_positives_and_chooses_negatives,
        rows_without_positives_or_negatives_are_no_error,
        equal_distances_are_no_error,
    ]
    hold(promises, config.name, config)


def build(config: MinerConfig) -> Miner:
    """Build the miner on the first manifold that it supports."""
    return config.build(fitting_manifolds(config)[0].build(DIM))


def candidates(rows: int = 7, columns: int = 11, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return distances and labels of rows against more columns, the first of which are the rows."""
    generator = torch.Generator().manual_seed(seed)
    points = normalize(torch.randn(columns, DIM, dtype=torch.float64, generator=generator), dim=1)
    labels = torch.randint(3, (columns,), generator=generator)
    same = labels[:rows, None] == labels
    return Sphere(DIM).distance(points[:rows], points), same.clone().fill_diagonal_(False), ~same


def choices(triplets: Triplets, negative: Tensor) -> dict[tuple[int, int], set[int]]:
    """Return the set of negatives of each (anchor, positive)."""
    chosen: dict[tuple[int, int], set[int]] = {}
    for anchor, positive in triplets.keep.nonzero().tolist():
        if triplets.negative is None:
            chosen[anchor, positive] = set(negative[anchor].nonzero().flatten().tolist())
        else:
            chosen[anchor, positive] = {int(triplets.negative[anchor, positive])}
    return chosen


def _expect_negatives(triplets: Triplets, negative: Tensor) -> None:
    for (anchor, _), chosen in choices(triplets, negative).items():
        wrong = [column for column in chosen if not negative[anchor, column]]
        expect(not wrong, f"columns {wrong} are not negatives of anchor {anchor}")


def it_keeps_positives_and_chooses_negatives(config: MinerConfig) -> None:
    """Check that the miner keeps only positives and selects negatives of the anchor, without a gradient."""
    distance, positive, negative = candidates()
    triplets = build(config)(distance.requires_grad_(), positive, negative)
    expect(triplets.keep.dtype == torch.bool, f"keep is {triplets.keep.dtype}")
    expect(triplets.keep.any(), "the miner keeps nothing")
    expect(not (triplets.keep & ~positive).any(), "the miner keeps a pair that is not positive")
    _expect_negatives(triplets, negative)
    chosen = triplets.negative
    expect(chosen is None or chosen.dtype == torch.int64, "negative is not int64")
    expect(chosen is None or not chosen.requires_grad, "negative has a gradient")


def rows_without_positives_or_negatives_are_no_error(config: MinerConfig) -> None:
    """Check that a batch of one class or without positives gives no triplet, and columns in range."""
    for same in (True, False):
        mask = torch.full((4, 4), same).fill_diagonal_(True)
        triplets = build(config)(torch.rand(4, 4), mask.clone().fill_diagonal_(False), ~mask)
        case = "one class" if same else "no positives"
        expect(not any(choices(triplets, ~mask).values()), f"{case}: the miner selects something")
        chosen = triplets.negative
        expect(chosen is None or ((chosen >= 0) & (chosen < 4)).all(), f"{case}: a column is out of range")


def equal_distances_are_no_error(config: MinerConfig) -> None:
    """Check that the miner selects negatives if all distances are 0."""
    _, positive, negative = candidates()
    _expect_negatives(build(config)(torch.zeros(positive.shape), positive, negative), negative)


def check_optimizer(config: OptimizerConfig) -> None:
    """Check an optimizer against its contract: each part has its own learning rate, and a quadratic is minimized.

    A checkpoint changes no step. An optimizer that ``is_riemannian`` also keeps points on the sphere.

    Example:
        >>> from dmlkit.optimizers import AdamWConfig
        >>> check_optimizer(AdamWConfig())
    """
    promises = [groups_carry_their_rates, a_quadratic_is_minimized, a_checkpoint_changes_no_step]
    if config.is_riemannian:
        promises.append(points_stay_on_the_sphere)
    hold(promises, config.name, config)


def groups_carry_their_rates(config: OptimizerConfig) -> None:
    """Check that each part with parameters is a group with its name and its own learning rate."""
    multipliers = LearningRateMultipliers(head=10.0, loss=100.0)
    parts = {"backbone": [nn.Parameter(torch.ones(2))], "head": [], "loss": [nn.Parameter(torch.ones(2))]}
    groups = changed(config, lr=0.01, lr_multipliers=multipliers).build(parts, fused=True).param_groups
    rates = [(group["name"], group["lr"]) for group in groups]
    expect([name for name, _ in rates] == ["backbone", "loss"], f"got groups {rates}")
    expect(rates[0][1] == 0.01 and isclose(rates[1][1], 1.0, rel_tol=1e-6), f"got {rates}, expected 0.01 and 1")


def a_quadratic_is_minimized(config: OptimizerConfig) -> None:
    """Check that 1000 steps with lr 0.05 reach the minimum of a quadratic in two numbers."""
    parameter = nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = changed(config, lr=0.05, weight_decay=0.0).build({"backbone": [parameter]})
    for _ in range(1000):
        optimizer.zero_grad()
        (parameter - torch.tensor([1.0, 1.0])).square().sum().backward()
        optimizer.step()
    expect_close(parameter.data, torch.ones(2), "the minimum", atol=1e-2, rtol=0)


def a_checkpoint_changes_no_step(config: OptimizerConfig) -> None:
    """Check that an optimizer restored from its state_dict takes identical steps."""
    kept, restored = (nn.Parameter(torch.linspace(-3, 3, 50)) for _ in range(2))
    optimizers = [config.build({"backbone": [weights]}) for weights in (kept, restored)]
    for step in range(20):
        if step == 5:
            saved = optimizers[1].state_dict()
            optimizers[1] = config.build({"backbone": [restored]})
            optimizers[1].load_state_dict(saved)
        for weights, optimizer in zip((kept, restored), optimizers, strict=True):
            weights.grad = (weights - step).detach()
            torch.manual_seed(step)  # steps may have noise
            optimizer.step()
    expect(torch.equal(kept, restored), f"weights differ by up to {(kept - restored).abs().max().item():.2g}")


def points_stay_on_the_sphere(config: OptimizerConfig) -> None:
    """Check that points stay on the sphere."""
    proxies = Sphere(5, proxies="points").new_proxies(7)
    optimizer = changed(config, lr=0.1).build({"loss": [proxies]})
    target = torch.randn(7, 5)
    for _ in range(50):
        optimizer.zero_grad()
        (proxies * target).sum().neg().backward()
        optimizer.step()
    expect_close(proxies.norm(dim=1), torch.ones(7), "lengths", atol=1e-5, rtol=0)


def check_schedule(config: ScheduleConfig) -> None:
    """Check a schedule against its contract: a factor from 0 to 1 that rises linearly in the warm-up up to 1.

    Example:
        >>> from dmlkit.schedules import CosineConfig
        >>> check_schedule(CosineConfig(final=0.1))
    """
    hold([factors_are_shares, warmup_is_linear_and_ends_at_one], config.name, config)


def factors_are_shares(config: ScheduleConfig) -> None:
    """Check that the factor is from 0 to 1 at any time of any training."""
    for epochs, warmup, step in product((1, 2, 7, 60, 200), (0.0, 0.5, 5.0), range(101)):
        epoch = step / 100 * epochs
        factor = changed(config, warmup_epochs=warmup).factor(epoch, epochs)
        expect(0 <= factor <= 1, f"got {factor} at epoch {epoch} of {epochs} with warmup_epochs {warmup}")


def warmup_is_linear_and_ends_at_one(config: ScheduleConfig) -> None:
    """Check that the factor rises linearly from 0 over the warm-up and is 1 at its end."""
    schedule = changed(config, warmup_epochs=4.0)
    rising = [schedule.factor(epoch, 100) for epoch in (0, 1, 2, 3)]
    expect(rising == [0, 0.25, 0.5, 0.75], f"got {rising} during a warm-up of 4 epochs")
    expect(isclose(schedule.factor(4, 100), 1, rel_tol=1e-6), f"got {schedule.factor(4, 100)} after the warm-up")
