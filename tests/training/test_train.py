"""Training: what a run folder holds, the same weights through any interruption, and what cannot be trained."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier

import pytest
import torch

from dmlkit.loading import batches
from dmlkit.recipe.file import parse_recipe, read_recipe
from dmlkit.run_folder.documents import Environment
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.experiment import assemble
from dmlkit.training.train import ALONE, train
from tests.conftest import END, ONE_EPOCH, ROOT, TINY_RECIPE, refuses
from tests.processes import Forked, held_command_line, start, wait_until


def weights(run: Path, name: str = "last") -> dict[str, torch.Tensor]:
    checkpoint = RunFolder(run).load_checkpoint(name)
    return {**checkpoint["model"], **{f"objective.{key}": value for key, value in checkpoint["objective"].items()}}


def assert_equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def assert_same_weights(first: Path, second: Path):
    assert_equal_weights(weights(first), weights(second))


def test_trainings_in_threads_have_the_weights_of_one_alone(trained_once, tmp_path):
    alone = trained_once(tmp_path)
    runs = [tmp_path / f"thread {index}" for index in range(2)]
    together = Barrier(len(runs))

    def run(folder: Path) -> None:
        together.wait()
        train(tmp_path / "recipe.yaml", folder, device="cpu")

    with ThreadPoolExecutor(len(runs)) as threads:
        list(threads.map(run, runs))
    for folder in runs:
        assert_same_weights(folder, alone)


def test_a_process_forked_during_a_training_can_train(trained_once, tmp_path):
    alone = trained_once(tmp_path)
    with ThreadPoolExecutor(1) as other:
        other.submit(ALONE.acquire).result()
        words = {"recipe": tmp_path / "recipe.yaml", "folder": tmp_path / "child", "device": "cpu"}
        child = get_context("fork").Process(target=train, kwargs=words)
        child.start()
        child.join(END)
        child.kill()  # if it still waits
        other.submit(ALONE.release).result()
    assert_same_weights(tmp_path / "child", alone)


@pytest.mark.parametrize("options", ["", ", ema: 0.5, validate_every: 3"], ids=["any", "last"])
def test_the_summary_scores_the_checkpoints_that_were_kept(options: str, dmlkit, trained_once, tmp_path):
    run = trained_once(tmp_path, TINY_RECIPE.replace("epochs: 3", f"epochs: 3{options}"))
    summary = json.loads((run / "summary.json").read_text())
    assert not options or summary["best"]["epoch"] == summary["last"]["epoch"] == 3  # validated then alone
    for kept in ("best", "last"):
        result = dmlkit("eval", run, "--checkpoint", kept, "--json", "--device", "cpu")
        assert json.loads(result.out)["metrics"] == pytest.approx(summary[kept]["test"], abs=1e-7)


def test_the_summary_takes_the_metrics_of_the_best_epoch_from_its_checkpoint(dmlkit, trained_once, tmp_path):
    run = trained_once(tmp_path)
    expected = json.loads((run / "summary.json").read_text())
    (run / "summary.json").unlink()
    rows = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(rows.replace("map@r", "mAp@r"))  # a damaged byte
    assert dmlkit("train", tmp_path / "recipe.yaml", "-o", run, "--device", "cpu", "--resume").code == 0
    assert json.loads((run / "summary.json").read_text())["best"] == expected["best"]


def test_the_run_folder_tells_the_whole_story(dmlkit, pictures_are_drawn: None, tiny_recipe, tmp_path):
    run = tmp_path / "run"
    result = dmlkit("train", tiny_recipe, "-o", run, "--device", "cpu")
    assert "epoch 3/3" in result.out and "best (epoch" in result.out and "pretrained" not in result.out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert set(rows[0]["validation"]) == {"recall@1", "recall@2", "map@r"}
    summary = json.loads((run / "summary.json").read_text())
    scores = [row["validation"]["map@r"] for row in rows]
    assert summary["best"]["epoch"] == scores.index(max(scores)) + 1
    assert summary["last"]["epoch"] == 3 and summary["last"]["validation"] == rows[-1]["validation"]
    assert summary["pretrained"] is None and not (run / "evaluations").exists()  # of random weights
    assert read_recipe(run / "recipe.yaml") == read_recipe(tiny_recipe)
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name in ("last", "best"):
        torch.load(run / "checkpoints" / f"{name}.pt", weights_only=True)
    assert not list(run.rglob("*.partial"))


LONG = TINY_RECIPE.replace("epochs: 3", "epochs: 8").replace(
    "{name: plain, size: 16}", "{name: imagenet, size: 16, resize: 16}"
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run with random augmentation."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = folder / "long.yaml"
    recipe.write_text(LONG)
    process = start("train", recipe, "-o", folder / "run", "--device", "cpu")
    assert process.wait(END) == 0, process.communicate()[0]
    return recipe, weights(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_run_ends_with_the_same_bits(number, uninterrupted, tmp_path: Path):
    recipe, expected = uninterrupted
    run, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    words = ("train", recipe, "-o", run, "--device", "cpu")
    process = Forked(held_command_line, 10, str(marks), *map(str, words))  # in the fourth epoch
    wait_until(lambda: any(marks.iterdir()), process)
    process.send_signal(number)
    output = process.communicate()[0]
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), output
    assert len(RunFolder(run).read_metrics()) == 3
    resumed = start(*words, "--resume")
    output = resumed.communicate()[0]
    assert resumed.returncode == 0, output
    assert "epoch 4/8" in output and "epoch 2/8" not in output
    assert [row.epoch for row in RunFolder(run).read_metrics()] == list(range(1, 9))
    assert_equal_weights(weights(run), expected)


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_training_and_its_readers_stops_it_after_a_checkpoint(number, tiny_recipe: Path, tmp_path: Path):
    """Ctrl-C in a terminal and a scheduler's SIGTERM go to every process of a job."""
    words = ["-m", "dmlkit", "train", str(tiny_recipe), "-o", str(tmp_path / "run"), "--device", "cpu"]
    command = [sys.executable, *words, "--set", "training.epochs=100000", "--set", "training.workers=2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    )
    wait_until(RunFolder(tmp_path / "run").checkpoint_path("last").exists, process)
    os.killpg(process.pid, number)
    output = process.communicate(timeout=END)[0]
    assert process.returncode == 130 and "to resume, rerun the same command with --resume" in output, output
    epochs = len(RunFolder(tmp_path / "run").read_metrics())
    assert RunFolder(tmp_path / "run").load_checkpoint("last")["epoch"] == epochs < 100_000


def test_validation_uses_its_readers_again(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    starts: list[None] = []
    monkeypatch.setattr(batches, "release_freed_memory", lambda: starts.append(None))  # before readers are started
    counts: list[int] = []
    for epochs in (1, 4):
        starts.clear()
        overrides = ["training.workers=1", f"training.epochs={epochs}"]
        train(tiny_recipe, tmp_path / str(epochs), overrides=overrides, device="cpu")
        counts.append(len(starts))
    assert 3 <= counts[0] <= counts[1] <= counts[0] + 1  # training, validation, test; and the test of the best epoch


def test_dry_run_writes_nothing(dmlkit, tiny_recipe, tmp_path):
    result = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", "--dry-run")
    assert result.code == 0 and "24 images of 4 classes" not in result.out
    assert "18 images of 3 classes" in result.out and "nothing was trained" in result.out
    assert not (tmp_path / "run").exists()


@pytest.mark.heavy
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("inductor", ["training.epochs=1"]),
        (
            "aot_eager",
            ["training.epochs=2", "backbone.freeze_epochs=1", "backbone.tuning={name: lora, targets: all, rank: 2}"],
        ),
        (
            "aot_eager",
            [
                "training.epochs=1",
                "training.gradient_checkpointing=true",
                "backbone={name: timm, model: test_vit, image_size: 32}",
                "transform.size=32",
            ],
        ),
    ],
    ids=["full", "lora after a frozen epoch", "blocks computed again"],
)
def test_a_compiled_backbone_trains_to_the_same_weights(dmlkit, tiny_recipe, tmp_path, monkeypatch, backend, changes):
    """The graphs of forward and backward are ours, their code in C++ is torch's: once, since it takes 20 s and more."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=backend))
    for name in ("true", "false"):
        sets = [word for change in (f"training.compile={name}", *changes) for word in ("--set", change)]
        # Adam would make whole steps of the rounding of gradients near 0
        sets += ["--device", "cpu", "--set", "optimizer={name: riemannian_sgd, lr: 0.03}"]
        dmlkit("train", tiny_recipe, "-o", tmp_path / name, *sets).ok()
    state, expected = weights(tmp_path / "true"), weights(tmp_path / "false")
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_machine_without_a_compiler_trains_without_it_and_says_so(
    dmlkit, tiny_recipe, trained_once, tmp_path, monkeypatch
):
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", (None, "/nonexistent/c++"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    torch.compiler.reset()  # what another test has compiled would be taken
    sets = ("--set", "training.compile=true", "--set", "training.epochs=1", "--device", "cpu")
    result = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *sets).ok()
    assert result.err.count("training.compile: trains without it") == 1
    assert_same_weights(tmp_path / "run", trained_once(tmp_path / "plain"))


def test_overwriting_removes_what_was_made_with_the_old_weights_and_nothing_else(dmlkit, trained_once, tmp_path):
    run = trained_once(tmp_path)
    assert dmlkit("eval", run, "--device", "cpu").code == 0
    assert dmlkit("embed", run, "--split", "test", "--device", "cpu").code == 0
    assert dmlkit("export", run / "embeddings" / "test", "--format", "npz").code == 0
    assert dmlkit("export", run, "--format", "safetensors").code == 0
    assert dmlkit("plot", "pca", run, "--device", "cpu").code == 0
    (run / "embeddings" / "notes.txt").write_text("mine")
    (run / "thesis.md").write_text("mine")
    before = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    assert len(before) == 22
    words = ("train", tmp_path / "recipe.yaml", "-o", run, "--overwrite", "--set", "seed=5", "--device", "cpu")
    assert dmlkit(*words).code == 0
    after = {path.relative_to(run) for path in run.rglob("*") if path.is_file()}
    fresh = {"recipe.yaml", "environment.json", "classes.json", "metrics.jsonl", "summary.json", "curves.png"}
    fresh |= {"test_classes.json", "checkpoints/best.pt", "checkpoints/last.pt", "thesis.md"}
    assert {str(path) for path in after} == fresh


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("option", "environment", "with_recipe"),
    [
        ("--device=cpu", "{}", True),
        ("--resume", '{"packages": {"torch": "2"}}', True),
        ("--overwrite", '{"format": 99, "dmlkit": "9"}', False),
        ("--overwrite", "[]", True),
        ("--resume", "no JSON", False),
        ("--overwrite", None, True),
    ],
)
def test_files_that_have_the_names_of_a_runs_make_no_run_r2(
    dmlkit, tiny_recipe: Path, tmp_path: Path, option: str, environment: str | None, with_recipe: bool
):
    work = tmp_path / "work"
    (work / "checkpoints").mkdir(parents=True)
    if environment is not None:
        (work / "environment.json").write_text(environment)
    if with_recipe:
        (work / "recipe.yaml").write_text(f"{tiny_recipe.read_text()}# my comment\n")
        (work / "checkpoints" / "imagenet.pth").write_text("weights")
    before = contents(work)
    dmlkit("train", tiny_recipe, "-o", work, option).refused(f"{work}: exists and is not a dmlkit run")
    assert contents(work) == before


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("last", ["last.pt: missing, though", "summary.json"]),
        ("best", ["best.pt: missing, though epoch 1 was the best"]),
    ],
)
def test_a_finished_run_without_a_checkpoint_is_refused_r1(name: str, parts: list[str], dmlkit, trained_once, tmp_path):
    run = trained_once(tmp_path)
    (run / "checkpoints" / f"{name}.pt").unlink()
    before = contents(run)
    dmlkit("train", tmp_path / "recipe.yaml", "-o", run, "--device", "cpu", "--resume").refused(*parts)
    assert contents(run) == before


def test_a_kill_after_the_first_best_checkpoint_and_before_the_last_one_starts_again(dmlkit, trained_once, tmp_path):
    run = trained_once(tmp_path)
    best = weights(run, "best")
    for name in ("checkpoints/last.pt", "summary.json", "curves.png"):
        (run / name).unlink()
    assert dmlkit("train", tmp_path / "recipe.yaml", "-o", run, "--device", "cpu", "--resume").code == 0
    assert_equal_weights(weights(run, "best"), best)


def test_a_run_killed_while_it_was_created_begins_anew(dmlkit, tiny_recipe: Path, tmp_path: Path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    Environment.here(read_recipe(tiny_recipe)).write(tmp_path / "run" / "environment.json")
    options = ("--set", "training.epochs=1", "--device", "cpu", "--resume")
    assert dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *options).code == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("loss={name: proxy_gml, ratio: 0.0001}", "loss: ProxyGML: ratio 0.0001"),
        ("backbone={name: vit, image_size: 225}", "backbone: "),
    ],
)
def test_what_a_part_objects_to_is_one_line_with_file_and_key(dmlkit, tiny_recipe: Path, tmp_path, change, message):
    key, _, value = change.partition("=")
    lines = [line for line in tiny_recipe.read_text().splitlines() if not line.startswith(f"{key}:")]
    tiny_recipe.write_text("\n".join([*lines, f"{key}: {value}"]))
    result = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", "--dry-run").refused()
    assert result.err.startswith(f"error: {tiny_recipe}:{len(lines) + 1}: {message}"), result.err


HEADLESS = ("head={name: none}", "embedding_dim=16", "backbone.freeze_epochs=1")  # 16 features of small_cnn
FROZEN = ("backbone.tuning={name: none}", *HEADLESS[:2], "loss={name: triplet}")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (["embedding_dim=10000000000"], "embedding_dim: needs more memory than this machine has"),
        (["backbone.width=1000000"], "backbone: needs more memory than this machine has"),
        (["loss={name: cross_batch_memory, size: 100000000000}"], "loss: needs more memory than this machine has"),
        (["backbone={name: bn_inception}", "transform.size=40"], "transform.size: bn_inception: the feature map"),
        (["backbone={name: googlenet}", "transform.size=8"], "transform.size: "),
        (["backbone={name: resnet18}", "sampler.batch_size=1"], "sampler: a batch of 1 image per rank is too small"),
        ([*HEADLESS, "loss={name: triplet}"], "backbone.freeze_epochs: got 1, expected 0, because nothing outside the"),
        ([*FROZEN, "manifold={name: sphere}"], "backbone.tuning: nothing trains with head none and loss triplet"),
        ([*FROZEN, "manifold={name: poincare}"], "backbone.tuning: nothing trains with head none and loss triplet"),
        ([*FROZEN, "loss={name: proxy_anchor}", "training.ema=0.5"], "training.ema: got 0.5, but the model has no"),
    ],
)
def test_what_cannot_train_is_one_line_before_anything_is_written_t2_t3(dmlkit, tiny_recipe, tmp_path, changes, error):
    words = [word for change in changes for word in ("--set", change)]
    dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *words).refused(error)
    assert not (tmp_path / "run").exists()


def test_what_starts_after_the_last_epoch_is_told(dmlkit, tiny_recipe, tmp_path):
    changes = ("loss={name: cross_batch_memory, start_epoch: 2}", "backbone.freeze_epochs=2")
    words = [word for change in changes for word in ("--set", change)]
    for epochs, is_late in ((1, True), (2, True), (3, False)):
        options = (*words, "--set", f"training.epochs={epochs}")
        result = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *options, "--dry-run").ok()
        count = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        for key, effect in (("loss.start_epoch", "the memory is not used"), ("freeze_epochs", "the backbone does not")):
            assert (f"{key}: got 2, but the run has {count}: {effect}" in " ".join(result.err.split())) == is_late
        assert f"per epoch, {count}, batches of 8 images\n" in result.out


LATER = """
from dmlkit.losses import Contrastive

class Later(Contrastive, name='later'):
    start_epoch: int | None = None
"""


def test_a_start_epoch_of_a_plugin_is_not_that_of_a_memory(plugin, recwarn):
    plugin(LATER)
    for start_epoch in ("null", "9"):
        assemble(parse_recipe(TINY_RECIPE, "r.yaml", [f"loss={{name: later, start_epoch: {start_epoch}}}"]))
    assert not [warning for warning in recwarn if "start_epoch" in str(warning.message)]


def test_memory_that_runs_out_is_one_line_with_the_settings_that_need_less(dmlkit, tiny_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("dmlkit.training.train.compute_loss", lambda *_: torch.empty(2**52))
    result = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", "--device", "cpu").refused(
        "sampler: not enough memory for batches of 8 images (can't allocate memory: you tried"
    )
    assert "take smaller batches, or set training.precision=bf16" in result.err and "Error code" not in result.err


def test_the_environment_names_the_device_that_trains(tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU of {device}")
    recipe = read_recipe(tiny_recipe)
    gpus = [Environment.here(recipe, device).gpu for device in ("cpu", "cuda:1", "mps")]
    assert gpus == [None, "GPU of cuda:1", "Apple GPU"]


def test_a_thread_trains_as_the_main_one_does(tiny_recipe: Path, trained_once, tmp_path: Path):
    tiny_recipe.write_text(ONE_EPOCH)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(train, tiny_recipe, tmp_path / "thread", device="cpu").result()
    assert_same_weights(tmp_path / "thread", trained_once(tmp_path / "main"))


def test_overrides_of_a_recipe_that_is_read_already_are_refused(tmp_path: Path):
    recipe = parse_recipe(TINY_RECIPE, "tiny.yaml")
    refuses("overrides .*apply to a file or a name", train, recipe, tmp_path / "run", overrides=["training.epochs=1"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ("backbone={name: resnet18, freeze_batchnorm_statistics: true}", "sampler.batch_size=1"),
        (*HEADLESS, "loss={name: proxy_anchor}"),
    ],
    ids=["single images with frozen batch norms", "frozen epochs in which proxies train"],
)
def test_what_looks_like_too_little_to_train_is_assembled(overrides: tuple[str, ...]):
    assemble(parse_recipe(TINY_RECIPE, "r.yaml", overrides))
