from pathlib import Path

import pytest

from tests.datasets import trees


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, ``a`` and ``b``, whose images were moved from ``before`` to ``after``."""
    from dmlkit.training.train import train

    home = tmp_path_factory.mktemp("moved")
    trees.photos(home / "before", (f"{name}/{number}.png" for name in "abcdefgh" for number in range(3)))
    recipe = home / "recipe.yaml"
    recipe.write_text(
        f"dataset: {{name: folder, root: '{home / 'before'}'}}\ntransform: {{name: plain, size: 16}}\n"
        "backbone: {name: small_cnn, width: 4}\nembedding_dim: 4\nloss: {name: proxy_anchor}\n"
        "sampler: {name: random, batch_size: 6}\ntraining: {epochs: 1, workers: 0}\nmetrics: [recall@1, map@r]\n"
    )
    for name in ("a", "b"):
        train(recipe, home / name, device="cpu")
    (home / "before").rename(home / "after")
    return home


@pytest.mark.parametrize(
    "command",
    [
        ["export", "a", "--format", "safetensors"],
        ["plot", "pca", "a"],
        ["compare", "a", "b"],
        ["curvature", "a"],
        ["embed", "a", "--split", "test"],
        ["eval", "a"],
    ],
    ids=lambda command: command[0],
)
def test_a_run_whose_images_have_moved_finds_them_again_u16(dmlkit, home: Path, monkeypatch, command: list[str]):
    monkeypatch.chdir(home)
    dmlkit(*command).refused("before: no such folder", "--set dataset.root=PATH")
    dmlkit(*command, "--set", "dataset.root=after").ok()


def test_the_dataset_alone_may_be_another_u16(dmlkit, home: Path, monkeypatch):
    monkeypatch.chdir(home)
    dmlkit("plot", "pca", "a", "--set", "embedding_dim=8").refused(
        "--set embedding_dim=8: expected a key of the dataset"
    )
    dmlkit("embed", "a", "after", "--set", "dataset.root=after").refused("applies only to --split, not to after")
