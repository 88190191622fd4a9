"""Export of a model as a folder for the Hugging Face Hub: weights, config, recipe, and a model card with figures."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import save_file

from dmlkit import __version__
from dmlkit.backbones.base import BackboneConfig
from dmlkit.backbones.pretrained.timm_models import FOLDER
from dmlkit.backbones.pretrained.weights import is_file
from dmlkit.backbones.timm import TimmConfig
from dmlkit.backbones.torchvision import TorchvisionConfig
from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.hub import CARD, CONFIG, FILES, RECIPE, WEIGHTS, HubConfig, load_hub
from dmlkit.embedding.manifest import VectorInput
from dmlkit.embedding.trained import TrainedModel, describe, merged_recipe, without_pretrained_weights
from dmlkit.errors import UserError
from dmlkit.export.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_name, write_adapter
from dmlkit.export.model import TOLERANCE, Parity, parity_samples
from dmlkit.files.atomic import atomic_folder, write_text
from dmlkit.files.escape import printable
from dmlkit.files.outputs import writing
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import threshold_of

LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
UNKNOWN = "unknown"


class CardFigures(BaseModel, frozen=True, extra="ignore"):
    """Metrics of test classes, as `dmlkit eval` or training has written them into the run.

    Args:
        metrics: value by name.
        intervals: 95 % interval over classes by name; None for too few classes.
        queries, classes: numbers of queries and of their classes, where known.
    """

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float] | None] = {}
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
        run: the run.
        trained: its model on the CPU, with low-rank updates added to the weights.
        output: the folder. An earlier export there is replaced in one step.
        license_name: identifier of the license, for the card. Default: unknown.
        unmerged: the model with its low-rank updates, if it has some, for an adapter.

    Returns:
        Difference between the embeddings of the folder, read again, and those of the run; and why there is no adapter
        for low-rank updates.

    Raises:
        UserError: the license is not an identifier, the folder has other files, or embeddings differ.
    """
    check_license(license_name)
    check_hub_output(output)
    recipe = public_recipe(trained.recipe)
    description = dict(describe(replace(trained, recorded=trained.fingerprint, recipe=recipe)))
    config = HubConfig(**description, threshold=threshold_of(run, trained.fingerprint))
    with writing(output, SafetensorError):
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(output) as partial:
            tensors = {name: tensor.contiguous() for name, tensor in trained.model.state_dict().items()}
            save_file(tensors, partial / WEIGHTS, {"format": "pt"})
            config.write(partial / CONFIG)
            write_text(partial / RECIPE, dump_recipe(recipe))
            parity = _compare(partial, trained)
            reason, name = "", output.resolve().name
            card = model_card(name, config, recipe, figures_of(run, config), license_name or UNKNOWN)
            if unmerged:
                backbone = unmerged.recipe.backbone
                reason = write_adapter(backbone, unmerged.model.backbone, partial)
                card += "" if reason else adapter_section(name, backbone)
            write_text(partial / CARD, card)
    return parity, reason


def adapter_section(name: str, backbone: BackboneConfig) -> str:
    """Return the section of a model card about its adapter, see `write_adapter`."""
    assert isinstance(backbone, TimmConfig | TorchvisionConfig)
    weights = backbone.weights or ""
    of = Path(weights).name if is_file(weights) else weights
    return f"""
## Adapter

`{ADAPTER_WEIGHTS}` has only the low-rank updates, for the network {_cell(base_name(backbone))} with the weights
{_cell(of)}. `peft.PeftModel.from_pretrained(network, {json.dumps(printable(name))})` adds them to it, without the head.
"""


def check_license(name: str | None) -> None:
    """Check that a license is an identifier as the Hub's, such as ``apache-2.0``.

    Raises:
        UserError: it is not.
    """
    if name is not None and not LICENSE.fullmatch(name):
        raise UserError(f"--license {name}: expected an identifier of the Hub in lower case, e.g. mit or apache-2.0")


def check_hub_output(output: Path) -> None:
    """Check that a folder is new, empty, or an earlier export without other files.

    Raises:
        UserError: it is not.
    """
    if not output.exists():
        return
    entries = [entry.name for entry in output.iterdir()] if output.is_dir() else [output.name]
    others = [name for name in entries if name not in (*FILES, ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    if others or (entries and not HubConfig.is_at(output / CONFIG)):
        what = "a file" if not output.is_dir() else f"a folder with {others[0] if others else entries[0]}"
        raise UserError(f"--output {output}: is {what}, which dmlkit export --format hub did not write; choose another")


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
        return f"{source}{path.name}" if path.is_absolute() else value

    text = yaml.safe_dump(shown(yaml.safe_load(dump_recipe(clean))), sort_keys=False)
    return parse_recipe(text, RECIPE, is_trained=True)


@torch.inference_mode()
def _compare(folder: Path, trained: TrainedModel) -> Parity:
    """Compare the model of a folder with that of the run on a few images.

    Raises:
        UserError: embeddings differ.
    """
    inputs = torch.stack(parity_samples(trained)[1])
    loaded = load_hub(folder, start_ranks("cpu"))
    difference = (loaded.model(inputs) - trained.model(inputs)).abs().max().item()
    if not difference <= TOLERANCE:
        raise UserError(f"the exported model differs from the run by {difference:.1e}; nothing was written")
    return Parity(images=len(inputs), largest_difference=difference)


def figures_of(run: RunFolder, config: HubConfig) -> CardFigures | None:
    """Return the metrics of a model on test classes: of ``dmlkit eval``, with intervals, else of training."""
    stored = run.evaluations / f"test-{config.model.checkpoint}.json"
    with suppress(OSError, ValueError):
        found = CardFigures.model_validate(json.loads(stored.read_text(encoding="utf-8")))
        if found.question.get("weights") == config.model.fingerprint:
            return found
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
        metrics = [{"type": one, "name": one, "value": round(value, 4)} for one, value in figures.metrics.items()]
        result = {
            "task": {"type": "image-retrieval"},
            "dataset": {"type": dataset, "name": dataset},
            "metrics": metrics,
        }
        header["model-index"] = [{"name": name, "results": [result]}]
    front = yaml.safe_dump(header, sort_keys=False, allow_unicode=True)
    backbone = " ".join(
        [recipe.backbone.name, *[str(v) for k, v in recipe.backbone if k in ("model", "variant", "size")]]
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

{_figures(figures)}

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


def _figures(figures: CardFigures | None) -> str:
    if figures is None:
        return "None were measured on test classes."
    rows = ["| metric | test classes | 95 % interval |", "|---|---|---|"]
    for name, value in figures.metrics.items():
        ends = figures.intervals.get(name)
        rows.append(f"| {name} | {value:.4f} | {f'{ends[0]:.4f} .. {ends[1]:.4f}' if ends else ''} |")
    about = "Classes that were not trained on."
    if figures.queries is not None:
        about = f"{figures.queries:,} queries of {figures.classes:,} classes that were not trained on"
        about += "; intervals by bootstrap over classes." if any(figures.intervals.values()) else "."
    return "\n".join([*rows, "", about])


def _cell(text: str) -> str:
    """Escape the characters that Markdown interprets, and line breaks."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", printable(text))
