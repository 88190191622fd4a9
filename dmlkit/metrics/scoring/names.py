"""Metrics by the names that reports use: ``recall@1``, ``map@r``, ``map@10:pml``, ``tar@far=1e-3``."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from dmlkit.metrics.base import MetricConfig


def metric_configs(metrics: Sequence["MetricConfig | str"]) -> list[MetricConfig]:
    """Turn names into configs; configs stay as they are.

    Raises:
        ValueError: no metric, an unknown name, or a k below 1.

    Example:
        >>> from dmlkit.metrics import metric_configs
        >>> metric_configs(["recall@5"])
        [RecallConfig(name='recall', k=(5,))]
    """
    if not metrics:
        raise ValueError("metrics: expected at least one")
    return [_config(metric) if isinstance(metric, str) else metric for metric in metrics]


def _config(text: str) -> MetricConfig:
    name, _, compat = text.partition(":")
    options: dict[str, Any] = {"compat": compat} if compat else {}
    by_key = {variant.key: variant for variant in MetricConfig.variants.values()}
    variant = by_key.get(name) or MetricConfig.variants.get(name)
    head, _, cut = name.partition("@")
    if variant is None and re.fullmatch(r"-?[0-9]+", cut):
        variant = by_key.get(f"{head}@k")
        if len(cut) > 18:
            raise ValueError(f"metrics: {text[:30]!r}: k must fit into 64 bits")
        if int(cut) < 1:
            raise ValueError(f"metrics: {text!r}: k must be at least 1, got {cut}")
        options["k"] = (int(cut),)
    option, is_option, value = cut.partition("=")
    if variant is None and is_option:
        variant = by_key.get(f"{head}@{option}=x")
        try:
            options[option] = (float(value),)
        except ValueError:
            raise ValueError(f"metrics: {text[:50]!r}: expected a number after '='") from None
    if variant is None:
        raise ValueError(f"metrics: {text!r} is unknown; expected one of {', '.join(sorted(by_key))}")
    try:
        return variant(**options)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise ValueError(f"metrics: {text!r}: expected {variant.key}, with a number for x") from None
        raise ValueError(f"metrics: {text!r}: {first['msg']}") from None
