"""Training of a recipe in one visible loop, with its checkpoints, metrics and baselines."""

from dmlkit.training.train import train

__all__ = ["train"]
