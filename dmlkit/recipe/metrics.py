"""Short notation of metrics in recipes, by the names of their figures: ``[recall@1, map@r, ndcg@8]``."""

from typing import Any

from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.scoring import metric_configs
from dmlkit.recipe.yaml_tree import Key, Tree


def spell_out(tree: Tree) -> None:
    """Replace the names under ``metrics`` of a recipe's tree by mappings; unknown names stay and are reported later.

    Consecutive names of the same metric become one metric with several cut-offs: ``recall@1, recall@2`` becomes
    ``{name: recall, k: [1, 2]}``. A recipe may also contain such a mapping, for options that a name cannot express.

    Example:
        >>> from dmlkit.recipe.yaml_tree import parse_yaml
        >>> tree = parse_yaml("metrics: [recall@1, recall@2, map@r]", "r.yaml")
        >>> spell_out(tree)
        >>> tree.data
        {'metrics': [{'name': 'recall', 'k': [1, 2]}, {'name': 'map_at_r'}]}
    """
    items = tree.data.get("metrics") if isinstance(tree.data, dict) else None
    if not isinstance(items, list):
        return
    spelled: list[Any] = []
    origins: dict[Key, str] = {}
    for index, item in enumerate(items):
        entry = _mapping(item)
        if entry is not None and spelled and _is_more_of(spelled[-1], entry, items[index - 1]):
            option = MetricConfig.variants[entry["name"]].listed()
            spelled[-1][option] += entry[option]
            continue
        for key, origin in tree.origins.items():
            if key[:2] == ("metrics", index):
                origins["metrics", len(spelled), *key[2:]] = origin
        spelled.append(item if entry is None else entry)
    tree.data["metrics"] = spelled
    kept = {key: origin for key, origin in tree.origins.items() if key[:1] != ("metrics",) or len(key) == 1}
    tree.origins = kept | origins


def _mapping(item: Any) -> dict[str, Any] | None:
    if not isinstance(item, str):
        return None
    try:
        (config,) = metric_configs([item])
    except ValueError:
        return None
    return {"name": config.name} | config.model_dump(mode="json", exclude_unset=True)


def _is_more_of(last: Any, entry: dict[str, Any], item: Any) -> bool:
    """Return whether a name belongs to the same metric as the name before it."""
    option = MetricConfig.variants[entry["name"]].listed()
    if not (isinstance(item, str) and isinstance(last, dict) and option in entry):
        return False
    return {**last, option: None} == {**entry, option: None}


def names_of(metrics: tuple[MetricConfig, ...]) -> list[Any]:
    """Return metrics as names where names express all options, else as mappings; this reverses `spell_out`.

    Example:
        >>> from dmlkit.metrics import NmiConfig, RecallConfig
        >>> names_of((RecallConfig(k=(1, 8)), NmiConfig(restarts=3)))
        ['recall@1', 'recall@8', {'name': 'nmi', 'iterations': 20, 'restarts': 3, 'seed': 0}]
    """
    found: list[Any] = []
    for config in metrics:
        option = config.listed()
        options = {option: getattr(config, option)} if option else {}
        compat = getattr(config, "compat", None)
        plain = type(config)(**options, **({"compat": compat} if compat else {}))
        names = [f"{name}:{compat}" if compat else name for name in config.asked()]
        found += names if plain == config else [config.model_dump(mode="json")]
    return found
