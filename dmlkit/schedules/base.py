"""The schedule interface: a factor on all learning rates, as a pure function of progress."""

from pydantic import NonNegativeFloat

from dmlkit.component import ComponentConfig


class ScheduleConfig(ComponentConfig, frozen=True):
    """Root of the schedule family."""

    warmup_epochs: NonNegativeFloat = 0.0
    """Number of epochs, possibly fractional, over which the factor rises linearly from 0."""

    def factor(self, epoch: float, epochs: int) -> float:
        """Return the factor at ``epoch`` (possibly fractional) out of ``epochs``.

        Example:
            >>> from dmlkit.schedules import CosineConfig
            >>> CosineConfig(warmup_epochs=2.0).factor(epoch=1.0, epochs=10)
            0.5
        """
        if epoch < self.warmup_epochs:
            return epoch / self.warmup_epochs
        return self.after_warmup(epoch, epochs)

    def after_warmup(self, epoch: float, epochs: int) -> float:
        """Return the factor after the warm-up."""
        raise NotImplementedError
