"""The contract of schedules."""

from math import isclose

from dmlkit.schedules import ScheduleConfig
from dmlkit.testing.promise import Promise, changed, expect, hold


def check_schedule(config: ScheduleConfig) -> None:
    """Check a schedule against its contract: a factor from 0 to 1 that rises linearly in the warm-up up to 1.

    Raises:
        AssertionError: the contract is broken; the message says how.

    Example:
        >>> from dmlkit.schedules import CosineConfig
        >>> check_schedule(CosineConfig(final=0.1))
    """
    hold(SCHEDULE, config.name, config)


def factors_are_shares(config: ScheduleConfig) -> None:
    """Check that the factor is from 0 to 1 at any time of any training."""
    for epochs in (1, 2, 7, 60, 200):
        for warmup in (0.0, 0.5, 5.0):
            for step in range(101):
                expect_share(changed(config, warmup_epochs=warmup), step / 100 * epochs, epochs)


def expect_share(config: ScheduleConfig, epoch: float, epochs: int) -> None:
    """Check that a factor is from 0 to 1."""
    factor = config.factor(epoch, epochs)
    expect(0 <= factor <= 1, f"got {factor} at epoch {epoch} of {epochs} with warmup_epochs {config.warmup_epochs}")


def warmup_is_linear_and_ends_at_one(config: ScheduleConfig) -> None:
    """Check that the factor rises linearly from 0 over the warm-up and is 1 at its end."""
    schedule = changed(config, warmup_epochs=4.0)
    rising = [schedule.factor(epoch, 100) for epoch in (0, 1, 2, 3)]
    expect(rising == [0, 0.25, 0.5, 0.75], f"got {rising} during a warm-up of 4 epochs")
    expect(isclose(schedule.factor(4, 100), 1, rel_tol=1e-6), f"got {schedule.factor(4, 100)} after the warm-up")


SCHEDULE: tuple[Promise, ...] = (factors_are_shares, warmup_is_linear_and_ends_at_one)
