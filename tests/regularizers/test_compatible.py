"""Backward-compatible training against a naive loop, and runs that learn from runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.distributed.launch import start_ranks
from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.manifolds import Poincare, Sphere
from dmlkit.recipe.file import read_recipe
from dmlkit.regularizers import Compatible
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.data import teach
from dmlkit.training.experiment import assemble
from dmlkit.training.progress import Silent
from dmlkit.training.train import train
from dmlkit.vectors.embedder import load
from tests.conftest import ONE_EPOCH, Cli, refuses
from tests.training.test_train import assert_equal_weights, weights
from tests.training.test_tuning import Stopper

LABELS = torch.tensor([0, 2, 1, 1, 0])


def drawn(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_loop_over_images_and_classes():
    older, labels = normalize(drawn(9, 1), dim=1), torch.arange(9) % 3
    features = drawn(5, 2).requires_grad_()
    x = normalize(features, dim=1)
    term = Compatible(Sphere(3), scale=5.0)
    term.learn_from(older.float(), labels)
    expected = torch.zeros((), dtype=torch.float64)
    for point, label in zip(x, LABELS.tolist(), strict=True):
        logits = []
        for c in range(3):
            mean = sum(older[row] for row in range(9) if row % 3 == c)
            logits.append(5 * (point @ mean) / mean.norm())
        expected = expected - logits[label] + torch.stack(logits).exp().sum().log()
    torch.testing.assert_close(term(x, LABELS), expected / 5, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(lambda features: term(normalize(features, dim=1), LABELS), features)


def test_images_that_cannot_be_read_move_no_center():
    older = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 0]])
    term = Compatible(Sphere(3))
    term.learn_from(older, torch.tensor([0, 0, 1]))
    assert term.centers[0].tolist() == pytest.approx([0.5**0.5, 0.5**0.5, 0])
    with pytest.raises(ValueError, match="got embeddings of 2 coordinates, expected 3"):
        term.learn_from(torch.ones(3, 2), torch.tensor([0, 0, 1]))


def test_a_center_in_the_ball_is_the_mean_of_log_maps():
    ball = Poincare(3)
    features = drawn(4, 3).float() / 5
    term = Compatible(ball)
    term.learn_from(ball.from_features(features), torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(ball.to_features(term.centers)[0], features.mean(0), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def older(trained_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_once(tmp_path_factory.mktemp("older"))


def recipe_with(folder: Path, term: str) -> Path:
    path = folder / "new.yaml"
    path.write_text(ONE_EPOCH.replace("seed: 3", "seed: 4") + f"regularizers: [{term}]\n")
    return path


@pytest.mark.slow
def test_a_run_learns_from_the_older_one_and_searches_among_its_embeddings(older, tmp_path, dmlkit):
    recipe = recipe_with(tmp_path, f"{{name: compatible, run: {older}, weight: 2.0}}")
    assert dmlkit("train", recipe, "-o", tmp_path / "new", "--device", "cpu").code == 0
    space = load(older, device="cpu").trained.fingerprint
    assert load(tmp_path / "new", device="cpu").trained.aligned_to == space
    assert dmlkit("embed", older, "--split", "test", "-o", tmp_path / "index", "--device", "cpu").code == 0
    assert dmlkit("embed", tmp_path / "new", "--split", "test", "-o", tmp_path / "asked", "--device", "cpu").code == 0
    result = dmlkit("search", tmp_path / "index", tmp_path / "asked", "-k", 1, "--json").ok()
    points = [np.load(tmp_path / name / "embeddings.npy") for name in ("asked", "index")]
    nearest = (points[0] @ points[1].T).argmax(1)
    items = json.loads(result.out)["queries"]
    assert [one["neighbors"][0]["id"] for one in items] == nearest.tolist()
    (tmp_path / "new" / "recipe.yaml").write_text(
        (tmp_path / "new" / "recipe.yaml").read_text().replace(str(older), str(tmp_path / "gone"))
    )
    assert RunFolder(tmp_path / "new").recipe().regularizers[0].source_run() == str(tmp_path / "gone")


@pytest.mark.slow
def test_a_teacher_of_another_width_embeds_the_training_images_and_resuming_changes_no_bit(older: Path, tmp_path: Path):
    recipe = recipe_with(tmp_path, f"{{name: distill, teacher: {older}}}")
    recipe = read_recipe(recipe, ["embedding_dim=5", "training.epochs=2"])
    train(recipe, tmp_path / "whole", device="cpu")
    experiment = assemble(recipe)
    teach(experiment, start_ranks("cpu"), Silent())
    train_split = recipe.dataset.build("train")
    pixels = [train_split.sample(row).permute(1, 2, 0).numpy() for row in range(len(train_split))]
    points = experiment.objective.regularizers[0].points
    assert points.numpy() == pytest.approx(load(older, device="cpu").embed(pixels), abs=1e-6)
    assert experiment.objective.aligned_to is None and "regularizers.0.points" not in experiment.objective.state_dict()
    with pytest.raises(TrainingStoppedError):
        train(recipe, tmp_path / "half", device="cpu", progress=Stopper(0, last=True))
    train(recipe, tmp_path / "half", device="cpu", resume=True)
    assert_equal_weights(weights(tmp_path / "half"), weights(tmp_path / "whole"))


def test_a_term_that_has_learned_nothing_says_what_to_call():
    with pytest.raises(ValueError, match="Compatible: got no embeddings of the older run, expected a call of"):
        Compatible(Sphere(2))(torch.eye(2), torch.tensor([0, 1]))


@pytest.mark.slow
def test_the_space_is_that_of_the_older_run_and_stays_so(tmp_path: Path):
    """Points of a ball are at other distances, or outside, in a ball of another curvature."""
    curved = ["manifold={name: poincare, learnable_curvature: true}", "training.epochs=1"]
    older = tmp_path / "older"
    train(read_recipe(recipe_with(tmp_path, ""), curved), older, device="cpu")
    recipe = recipe_with(tmp_path, f"{{name: compatible, run: {older}}}")
    for space, message in (
        ("{name: poincare, learnable_curvature: true}", "cannot follow a space that training changes"),
        ("{name: poincare}", r"another space \(manifold.curvature: was .*, now -1.0; .*learnable_curvature: was True"),
    ):
        refuses(message, teach, assemble(read_recipe(recipe, [f"manifold={space}"])), start_ranks("cpu"), Silent())


@pytest.mark.slow
def test_what_does_not_fit_the_older_run_is_refused(older: Path, tmp_path: Path, dmlkit: Cli):
    recipe = recipe_with(tmp_path, f"{{name: compatible, run: {older}}}")
    dmlkit("check", recipe, "--set", "embedding_dim=5").refused("compatible needs embedding_dim 8, got 5, because")
    dmlkit("check", recipe, "--set", "manifold={name: euclidean, similarity: cosine}").refused(
        "compatible needs manifold.name sphere, got euclidean"
    )
    dmlkit("check", recipe, "--set", f"regularizers=[{{name: compatible, run: {tmp_path / 'x'}}}]").refused(
        "no run here"
    )
    second = tmp_path / "second"
    shutil.copytree(older, second)
    state = RunFolder(second).load_checkpoint("best")
    state["model"]["head.linear.weight"] += 0.1
    from dmlkit.run_folder.checkpoint_file import write_checkpoint

    write_checkpoint(second / "checkpoints" / "best.pt", state)
    text = f"{{name: compatible, run: {older}}}, {{name: compatible, run: {second}}}"
    with pytest.raises(UserError, match="is another model than the one before"):
        train(read_recipe(recipe_with(tmp_path, text)), tmp_path / "run", device="cpu")
