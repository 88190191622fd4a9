"""Training: one visible loop, and what it writes."""

from dmlkit.training.train import train

__all__ = ["train"]
