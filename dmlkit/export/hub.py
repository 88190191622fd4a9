"""Export of a model as a folder for the Hugging Face Hub: weights, config, recipe, and a model card with figures.

Low-rank updates are also written as an adapter that peft loads onto the network of timm or torchvision. peft is not
needed to write it: `adapter_config.json` is a few settings, and the tensors have peft's names.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dmlkit import __version__
from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.timm import Timm
from dmlkit.backbones.timm_models import HUB
from dmlkit.backbones.torchvision import Torchvision
from dmlkit.backbones.tuning import LoRAConfig, LowRankUpdate
from dmlkit.backbones.weights import LICENSE, UNKNOWN, is_file, license_words
from dmlkit.distributed.launch import start_ranks
from dmlkit.errors import UserError
from dmlkit.export.model import TOLERANCE, Parity, parity_samples
from dmlkit.files.atomic import atomic_folder, json_text, write_text
from dmlkit.files.escape import printable
from dmlkit.files.outputs import writing
from dmlkit.files.source import FOLDER
from dmlkit.recipe.file import dump_recipe, parse_recipe, plain
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import threshold_of
from dmlkit.vectors.hub import CARD, CONFIG, FILES, RECIPE, WEIGHTS, HubConfig, load_hub
from dmlkit.vectors.manifest import VectorInput
from dmlkit.vectors.trained import TrainedModel, describe, merged_recipe, without_pretrained_weights


class CardFigures(BaseModel, frozen=True, extra="ignore"):
    """Metrics of test classes, as `dmlkit eval` or training has written them into the run."""

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float] | None] = {}  # of 95 % over classes; None for too few
    queries: int | None = None
    classes: int | None = None
    question: dict[str, Any] = {}


def export_hub(
    run: RunFolder,
    trained: TrainedModel,
    output: Path,
    license_name: str | None = None,
    unmerged: TrainedModel | None = None,
) -> tuple[Parity, str]:
    """Write the model of a run as a folder that can be uploaded to the Hub, and read by `dmlkit.load`.

    The recipe in it has no absolute path of this machine, no pretrained weights to load, and no regularizers.

    Args:
        trained: its model on the CPU, with low-rank updates added to the weights.
        output: the folder. An earlier export there is replaced in one step.
        unmerged: the model with its low-rank updates, if it has some, for an adapter.

    Returns:
        Difference between the embeddings of the folder, read again, and those of the run; and why there is no adapter
        for low-rank updates.
    """
    if license_name is not None and not LICENSE.fullmatch(license_name):
        raise UserError(
            f"--license {license_name}: expected an identifier of the Hub in lower case, e.g. mit or apache-2.0"
        )
    check_hub_output(output)
    recipe = public_recipe(trained.recipe)
    description = dict(describe(replace(trained, recorded=trained.fingerprint, recipe=recipe)))
    config = HubConfig(**description, threshold=threshold_of(run, trained.fingerprint))
    with writing(output, SafetensorError), atomic_folder(output) as partial:
        tensors = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
        save_file(tensors, partial / WEIGHTS, {"format": "pt"})
        config.write(partial / CONFIG)
        write_text(partial / RECIPE, dump_recipe(recipe))
        with torch.inference_mode():
            inputs = torch.stack(parity_samples(trained)[1])
            loaded = load_hub(partial, start_ranks("cpu"))
            difference = (loaded.model(inputs) - trained.model(inputs)).abs().max().item()
        if not difference <= TOLERANCE:
            raise UserError(f"the exported model differs from the run by {difference:.1e}; nothing was written")
        reason, name = "", output.resolve().name
        card = model_card(name, config, recipe, figures_of(run, config), license_name or UNKNOWN)
        if unmerged:
            backbone: Any = unmerged.recipe.backbone  # its keys follow from a constructor
            reason = write_adapter(backbone, unmerged.model.backbone, partial)
            if not reason:
                of = Path(backbone.weights).name if is_file(backbone.weights) else backbone.weights
                card += f"""
## Adapter

`{ADAPTER_WEIGHTS}` has only the low-rank updates, for the network {_cell(_base_name(backbone))} with the weights
{_cell(of)}. `peft.PeftModel.from_pretrained(network, {json.dumps(printable(name))})` adds them to it, without the head.
"""
        write_text(partial / CARD, card)
    return Parity(images=len(inputs), largest_difference=difference), reason


def check_hub_output(output: Path) -> None:
    """Check that a folder is new, empty, or an earlier export without other files."""
    if not output.exists():
        return
    entries = [entry.name for entry in output.iterdir()] if output.is_dir() else [output.name]
    others = [name for name in entries if name not in (*FILES, ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    if others or (entries and not HubConfig.is_at(output / CONFIG)):
        existing = "a file" if not output.is_dir() else f"a folder with {others[0] if others else entries[0]}"
        raise UserError(
            f"--output {output}: is {existing}, which dmlkit export --format hub did not write; choose another"
        )


def public_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of a model whose weights come with it, without absolute paths, which tell of this machine."""
    clean = without_pretrained_weights(merged_recipe(recipe)).model_copy(update={"regularizers": ()})

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [shown(inner) for inner in value]
        if not isinstance(value, str):
            return value
        source = FOLDER if value.startswith(FOLDER) else ""  # local-dir:/home/me/model
        path = Path(value.removeprefix(source))
        return f"{source}{path.name}" if path.is_absolute() and path.name else value  # / may separate labels

    return parse_recipe(yaml.safe_dump(shown(plain(clean)), sort_keys=False), RECIPE, is_trained=True)


def figures_of(run: RunFolder, config: HubConfig) -> CardFigures | None:
    """Return the metrics of a model on test classes: of ``dmlkit eval``, with intervals, else of training."""
    stored = run.evaluations / f"test-{config.model.checkpoint}.json"
    with suppress(OSError, ValueError):
        figures = CardFigures.model_validate(json.loads(stored.read_text(encoding="utf-8")))
        if figures.question.get("weights") == config.model.fingerprint:
            return figures
    with suppress(UserError):
        summary = Summary.read(run.summary_path)
        scored = summary.best if config.model.checkpoint == "best" else summary.last
        if scored is not None and scored.test is not None and scored.epoch == config.model.epoch:
            return CardFigures(metrics=scored.test)
    return None


def model_card(name: str, config: HubConfig, recipe: Recipe, figures: CardFigures | None, license_name: str) -> str:
    """Return the text of a model card: the header that the Hub reads, what the model is, its figures, and its use."""
    has_pixels = not isinstance(config.preprocessing, VectorInput)
    dataset, kind = recipe.dataset.name, "images" if has_pixels else "vectors"
    header: dict[str, Any] = {
        "license": license_name,
        "library_name": "dmlkit",
        "pipeline_tag": "image-feature-extraction" if has_pixels else "feature-extraction",
        "tags": ["metric-learning", "embeddings", "image-retrieval" if has_pixels else "retrieval"],
    }
    if figures:
        metrics = [
            {"type": metric, "name": metric, "value": round(value, 4)} for metric, value in figures.metrics.items()
        ]
        tested: dict[str, Any] = {"task": {"type": "image-retrieval"}, "dataset": {"type": dataset, "name": dataset}}
        header["model-index"] = [{"name": name, "results": [{**tested, "metrics": metrics}]}]
    front = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    backbone = " ".join(
        [recipe.backbone.name, *[str(value) for key, value in recipe.backbone if key in ("model", "variant", "size")]]
    )
    rows = [
        ("network", backbone),
        ("embedding", f"{config.dim} x {config.dtype}"),
        ("space", f"{config.manifold.name}, compared by {config.similarity}"),
        ("input", config.preprocessing.input),
        ("loss", recipe.loss.name),
        ("checkpoint", f"{config.model.checkpoint}, epoch {config.model.epoch}"),
        ("fingerprint", config.model.fingerprint[:12]),
    ]
    if pretrained := recipe.backbone.license():
        rows.append(("pretrained weights", license_words(pretrained)))
    if config.threshold:
        rows.append(("same class from", f"{config.similarity} {config.threshold.threshold:.6g}"))
    table = "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows)
    return f"""---
{front}---

# {_cell(name)}

A deep metric learning model, trained with dmlkit {__version__}. It maps {kind} to embeddings,
in which those of one class are near each other.

| | |
|---|---|
{table}

## Figures

{_figures(figures, recipe)}

## Use

```python
import dmlkit

model = dmlkit.load({json.dumps(printable(name))})  # this folder, or on the Hub "hf://OWNER/NAME"
embeddings = model.embed({'["a.jpg", "b.jpg"]' if has_pixels else "vectors"})
print(model.similarity(embeddings, embeddings))
```

`config.json` describes preprocessing and geometry, `recipe.yaml` the training, and `model.safetensors` has the weights.

## License

{"The license of these weights is not given." if license_name == UNKNOWN else f"`{license_name}`."}
Those of pretrained weights and of the training images may apply too.
"""


def _figures(figures: CardFigures | None, recipe: Recipe) -> str:
    if figures is None:
        return "None were measured on test classes."
    rows = ["| metric | test classes | 95 % interval |", "|---|---|---|"]
    for name, value in figures.metrics.items():
        interval = figures.intervals.get(name)
        rows.append(f"| {name} | {value:.4f} | {f'{interval[0]:.4f} .. {interval[1]:.4f}' if interval else ''} |")
    about = "not trained on"
    if recipe.dataset.tests_known:
        about = "trained on; the gallery has the training images, and the queries are others"
    if figures.queries is not None:
        about = f"{figures.queries:,} queries of {figures.classes:,} classes that were {about}"
        about += "; intervals by bootstrap over classes." if any(figures.intervals.values()) else "."
    else:
        about = f"Classes that were {about}."
    return "\n".join([*rows, "", about])


def _cell(text: str) -> str:
    """Escape the characters that Markdown interprets, and line breaks."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", printable(text))


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(config: BackboneConfig, backbone: Backbone, folder: Path) -> str:
    """Write the low-rank updates of a backbone into a folder, and return why not if that is not possible, else "".

    A layer whose output is not a sum of its own and that of the update, as peft computes it, is stored whole: a
    convolution with groups or dilation, torch's attention, and other classes.
    """
    if not isinstance(config, Timm.Config | Torchvision.Config):
        return f"peft adapts networks of timm and torchvision; this backbone is {config.name}"
    if not config.is_pretrained:
        return "the backbone has no pretrained weights to which the updates could be added"
    assert isinstance(config.tuning, LoRAConfig)
    network = backbone.get_submodule("network")
    low_rank, whole, tensors = _tensors(network)
    others = [name for name, _ in network.named_modules() if name not in whole and name.endswith(tuple(whole))]
    if others:  # peft looks for the end of the name
        return f"peft would also replace {others[0]}"
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": _base_name(config),
        "inference_mode": True,
        "r": config.tuning.rank,
        "lora_alpha": config.tuning.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": "|".join(map(re.escape, low_rank)) or None,  # a text is a pattern of the whole name
        "modules_to_save": whole or None,
    }
    write_text(folder / ADAPTER_CONFIG, json_text(settings))
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / ADAPTER_WEIGHTS)
    return ""


def _base_name(config: BackboneConfig) -> str:
    """Return the name of the network to which an adapter belongs, e.g. ``timm/resnet18.a1_in1k``."""
    keys: Any = config  # follow from a constructor, so that type checkers do not know them
    if isinstance(config, Torchvision.Config):
        return f"torchvision/{keys.with_options_only().architecture}"
    model: str = keys.model
    if model.startswith(FOLDER):
        return Path(model.removeprefix(FOLDER)).name
    return model.removeprefix(HUB) if model.startswith(HUB) else f"timm/{model}"


@torch.no_grad()
def _tensors(network: nn.Module) -> tuple[list[str], list[str], dict[str, Tensor]]:
    """Return the names of modules with updates, of modules to store whole, and the tensors under peft's names."""
    low_rank, whole, tensors = list[str](), list[str](), dict[str, Tensor]()
    for name, module, update in _updated(network):
        owner = name.removesuffix(".out_proj")  # torch's attention reads the weights of this layer itself
        attention = network.get_submodule(owner)
        if isinstance(attention, nn.MultiheadAttention):
            # peft 0.21 adapts it too, but adds the update of its last layer twice: huggingface/peft#3774
            name, module = owner, attention
        if _is_additive(module):
            low_rank.append(name)
            tensors |= _low_rank(name, module, update.down, update.up)
        elif name not in whole:
            whole.append(name)
            tensors |= {f"{name}.{key}": value for key, value in _merged_parameters(module)}
    if not low_rank:  # peft refuses an adapter without one: here is one that adds 0
        name, module = next(
            (name, module)
            for name, module in network.named_modules()
            if _is_additive(module) and not name.startswith(tuple(whole))
        )
        rank = len(next(_updated(network))[2].down)
        rows, columns = module.get_parameter("weight").flatten(1).shape
        low_rank.append(name)
        tensors |= _low_rank(name, module, torch.zeros(rank, columns), torch.zeros(rows, rank))
    return low_rank, whole, tensors


def _low_rank(name: str, module: nn.Module, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Return the factors A and B of an update under peft's names, in the form of a layer's weights."""
    sides: tuple[int, ...] = getattr(module, "kernel_size", ())
    return {
        f"{name}.lora_A.weight": down.view(len(down), -1, *sides),
        f"{name}.lora_B.weight": up.view(*up.shape, *(1 for _ in sides)),
    }


def _updated(network: nn.Module) -> Iterator[tuple[str, nn.Module, LowRankUpdate]]:
    """Yield the name of a module, the module, and its low-rank update."""
    for name, module in list(network.named_modules()):
        for updates in dict(getattr(module, "parametrizations", {})).values():
            if isinstance(updates[0], LowRankUpdate):
                yield name, module, updates[0]


def _merged_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of parameters with their updates; merging a copy would change the class of both."""
    for name, part in module.named_modules():
        if "parametrizations" not in name:
            updated = dict(getattr(part, "parametrizations", {}))
            for key in (*updated, *dict(part.named_parameters(recurse=False))):
                yield f"{name}.{key}" if name else key, getattr(part, key)


def _is_additive(module: nn.Module) -> bool:
    """Return whether a layer with W + BA gives the sum of its outputs with W and with BA, as peft computes them."""
    kind = parametrize.type_before_parametrizations(module)
    if kind is nn.Conv2d:
        return (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros")
    return kind is nn.Linear
