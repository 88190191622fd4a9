"""Stored forms of a run's embeddings: ranges come from the training split, not from the evaluated images."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmlkit.manifolds import Sphere
from dmlkit.metrics import retrieval_metrics
from dmlkit.metrics.ranking.codec import Codec, Stored
from tests.conftest import Result
from tests.vectors.stored import split_of


def test_the_ranges_of_int8_are_those_of_training(trained_run: Path, tmp_path: Path, dmlkit: Callable[..., Result]):
    run = shutil.copytree(trained_run, tmp_path / "run")
    words: Any = ("eval", run, "--precision", "int8", "--dims", "4", "--metric", "map@r", "--device", "cpu", "--json")
    report = json.loads(dmlkit(*words).out)
    assert "int8: the ranges of the coordinates are those of the training split" in report["notes"]
    (train, test), labels = (split_of(run, name).points for name in ("train", "test")), split_of(run).labels
    codecs = [Codec(Sphere(8), Stored(4, "int8"), ranges) for ranges in (train, test)]
    expected, other = (
        retrieval_metrics(codec.decode(test), labels, manifold=codec.space, metrics=["map@r"])["map@r"]
        for codec in codecs
    )
    assert report["forms"][0]["metrics"]["map@r"] == pytest.approx(expected) != pytest.approx(other)
