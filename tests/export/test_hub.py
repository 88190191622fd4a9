"""Folders for the Hub: read by dmlkit.load, by safetensors and PyYAML alone, and by huggingface_hub's card reader."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file

import dmlkit as package
from dmlkit.errors import UserError
from dmlkit.evaluation.calibration import calibrate_run
from dmlkit.evaluation.run import evaluate_run
from dmlkit.export.hub import model_card, public_recipe
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.hub import HubConfig
from tests.conftest import ONE_EPOCH, Cli


@pytest.fixture(scope="module")
def run(trained_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_once(tmp_path_factory.mktemp("hub"))


def pixels_of(run: Path) -> list[np.ndarray]:
    dataset = RunFolder(run).recipe().dataset.build("test")
    return [dataset.sample(row).permute(1, 2, 0).numpy() for row in range(6)]


def header_of(folder: Path) -> dict[str, object]:
    _, front, _ = (folder / "README.md").read_text().split("---\n", 2)
    found = yaml.safe_load(front)
    assert isinstance(found, dict)
    return found


def test_a_folder_gives_the_embeddings_of_the_run(run: Path, tmp_path: Path, dmlkit: Cli):
    calibrate_run(run, far=0.1)
    folder = tmp_path / "birds [model]"
    result = dmlkit("export", run, "--format", "hub", "--license", "mit", "-o", folder)
    assert result.code == 0 and "agrees with the run on 16 images to 0e+00" in result.out, result.err
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors", "recipe.yaml"}
    model, own = package.load(folder, device="cpu"), package.load(run, device="cpu")
    images = pixels_of(run)
    assert np.array_equal(model.embed(images), own.embed(images))
    assert model.trained.fingerprint == own.trained.fingerprint and model.trained.epoch == own.trained.epoch
    weights = own.trained.model.state_dict()
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == weights.keys() and all((stored[name] == weights[name]).all() for name in stored)
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["fingerprint"] == own.trained.fingerprint and config["dim"] == 8
    assert config["threshold"]["threshold"] == json.loads((run / "threshold.json").read_text())["threshold"]
    for path in folder.iterdir():  # no file names this machine
        assert str(tmp_path).encode() not in path.read_bytes() and str(run).encode() not in path.read_bytes()
    card = model_card("a|b `c`\n# d", HubConfig.read(folder / "config.json"), model.trained.recipe, None, "mit")
    assert "# a\\|b \\`c\\`\\\\n\\# d\n" in card and "None were measured" in card


GLYPHS = "{name: glyphs, classes: 12, images_per_class: 6, size: 16, validation_fraction: 0.34}"
NETWORK = "{name: timm, model: 'local-dir:/home/me/net', architecture: resnet18, weights: /home/me/w.pt}"


@pytest.mark.parametrize(
    ("old", "new", "part", "public"),
    [
        (GLYPHS, "{name: folder, root: /home/me/secret/birds}", "dataset", {"root": "birds"}),
        ("{name: small_cnn, width: 4}", NETWORK, "backbone", {"model": "local-dir:net", "weights": None}),
        (GLYPHS, '{name: table, file: /home/me/a.csv, separator: "/"}', "dataset", {"file": "a.csv", "separator": "/"}),
    ],
)
def test_a_public_recipe_names_no_folder(old: str, new: str, part: str, public: dict[str, str | None]):
    text = ONE_EPOCH.replace(old, new).replace("proxy_anchor", "sup_con")  # which takes several labels
    text += "regularizers: [{name: distill, teacher: /home/me/teacher}]\n"
    recipe = public_recipe(parse_recipe(text, "recipe.yaml", is_trained=True))
    assert "/home" not in recipe.model_dump_json() and recipe.regularizers == ()
    assert getattr(recipe, part).model_dump().items() >= public.items()


def test_the_card_has_the_figures_of_the_run(run: Path, tmp_path: Path, dmlkit: Cli):
    summary = json.loads((run / "summary.json").read_text())
    shutil.rmtree(run / "evaluations", ignore_errors=True)
    assert dmlkit("export", run, "--format", "hub", "-o", tmp_path / "of_training").code == 0
    text = (tmp_path / "of_training" / "README.md").read_text()
    for name, value in summary["best"]["test"].items():
        assert f"| {name} | {value:.4f} |  |" in text
    assert (
        header_of(tmp_path / "of_training")["license"] == "unknown" and "license of these weights is not given" in text
    )
    report = evaluate_run(run, metrics=["recall@1", "map@r"]).report
    plain = evaluate_run(run).report
    assert dmlkit("export", run, "--format", "hub", "-o", tmp_path / "of_eval").code == 0
    text = (tmp_path / "of_eval" / "README.md").read_text()
    for name, ends in plain.intervals.items():
        assert ends is not None
        assert f"| {name} | {plain.metrics[name]:.4f} | {ends[0]:.4f} .. {ends[1]:.4f} |" in text
    assert f"{report.queries} queries of {report.classes} classes" in text
    index = header_of(tmp_path / "of_eval")["model-index"]
    assert isinstance(index, list) and index[0]["name"] == "of_eval"
    found = {one["name"]: one["value"] for one in index[0]["results"][0]["metrics"]}
    assert found == pytest.approx(plain.metrics, abs=1e-4)
    hub = pytest.importorskip("huggingface_hub", reason="it comes with the extra dmlkit[timm]")
    card = hub.ModelCard.load(tmp_path / "of_eval" / "README.md")
    assert (card.data.license, card.data.library_name, card.data.model_name) == ("unknown", "dmlkit", "of_eval")
    assert card.data.pipeline_tag == "image-feature-extraction" and card.text.strip().startswith("# of\\_eval")
    assert {one.metric_name: one.metric_value for one in card.data.eval_results} == found


@pytest.mark.slow
def test_low_rank_updates_are_part_of_every_export(trained_once: Callable[..., Path], tmp_path: Path, dmlkit: Cli):
    tuned = "{name: small_cnn, width: 4, tuning: {name: lora, targets: all, rank: 2}}"
    run = trained_once(tmp_path / "lora", ONE_EPOCH.replace("{name: small_cnn, width: 4}", tuned))
    calibrate_run(run, far=0.3)
    own = package.load(run, device="cpu")
    assert dmlkit("export", run, "--format", "hub", "-o", tmp_path / "m").code == 0
    images = pixels_of(run)
    assert np.array_equal(package.load(tmp_path / "m", device="cpu").embed(images), own.embed(images))
    assert not any("lora" in name for name in load_file(tmp_path / "m" / "model.safetensors"))
    assert dmlkit("export", run, "--format", "safetensors", "-o", tmp_path / "x.safetensors").code == 0
    for path in (tmp_path / "m" / "config.json", tmp_path / "x.safetensors.json"):
        written = json.loads(path.read_text())
        assert written["model"]["fingerprint"] == own.trained.fingerprint and written["threshold"] is not None


@pytest.mark.slow
def test_what_does_not_belong_together_is_refused(run: Path, tmp_path: Path, dmlkit: Cli):
    folder = tmp_path / "m"

    def load_refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            package.load(folder, device="cpu")

    words = ("export", run, "--format", "hub", "-o", folder)
    assert dmlkit(*words).code == 0
    (folder / "notes.txt").touch()
    dmlkit(*words).refused("is a folder with notes.txt")
    (folder / "notes.txt").unlink()
    dmlkit(*words, "--license", "MIT").refused("--license MIT: expected an identifier")
    weights = load_file(folder / "model.safetensors")
    weights["head.linear.bias"] += 1
    save_file(weights, folder / "model.safetensors")
    load_refused("all files must be of one export")
    (folder / "model.safetensors").write_bytes(b"no weights")
    load_refused("cannot read these weights")
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("width: 4", "width: 5"))
    save_file(weights, folder / "model.safetensors")
    load_refused("these weights do not fit")
    for key, value, message in (
        ("embedding_dim: 8", f"embedding_dim: {10**18}", "recipe.yaml:[0-9]+: embedding_dim: needs more memory than"),
        ("width: 4", f"width: {10**13}", "recipe.yaml:[0-9]+: backbone: needs more memory than this machine has"),
        (" size: 16", f" size: {10**9}", "transform.size: got 1000000000, expected less than or equal to 16384"),
    ):
        assert key in recipe
        (folder / "recipe.yaml").write_text(recipe.replace(key, value))
        load_refused(message)


def test_the_first_coordinates_of_a_tuned_run_have_one_fingerprint(tmp_path: Path, trained_once, dmlkit, monkeypatch):
    """That of their embeddings, although the export adds the low-rank updates to the weights itself."""
    tuned = "{name: small_cnn, width: 4, tuning: {name: lora, targets: all, rank: 2}}"
    run = trained_once(tmp_path / "lora", ONE_EPOCH.replace("{name: small_cnn, width: 4}", tuned))
    dmlkit("embed", run, "--split", "test", "--dims", 4, "-o", tmp_path / "e", "--device", "cpu").ok()
    expected = json.loads((tmp_path / "e" / "manifest.json").read_text())["model"]["fingerprint"]
    out = tmp_path / "model.pt2"
    dmlkit("export", run, "--format", "torch-export", "--dims", 4, "--input", "squares", "-o", out).ok()
    assert json.loads(out.with_name("model.pt2.json").read_text())["model"]["fingerprint"] == expected
