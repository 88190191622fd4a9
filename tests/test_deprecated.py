"""An old name works, with a warning that gives the new one. Nothing was renamed yet, so the names here are made up."""

import pytest

from dmlkit import _deprecated
from dmlkit._deprecated import New
from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.overrides import shipped_recipes
from tests.conftest import Cli

RECIPE = "dataset: {name: glyphs}\nloss: {name: triple, margin: 0.2}\ntraining: {rate: 0.01}"


@pytest.fixture(autouse=True)
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_deprecated.KEYS, "loss.name=triple", New("triplet", "0.4.0"))
    monkeypatch.setitem(_deprecated.KEYS, "training.rate", New("optimizer.lr", "0.4.0"))
    monkeypatch.setitem(_deprecated.WORDS, "show", New("list", "0.4.0"))
    monkeypatch.setitem(_deprecated.WORDS, "list --folder", New("--root", "0.4.0"))


def test_old_keys_and_members_of_a_recipe(caplog: pytest.LogCaptureFixture) -> None:
    recipe = parse_recipe(RECIPE, "old.yaml", ["training.rate=0.02"])
    new = parse_recipe("dataset: {name: glyphs}\nloss: {name: triplet, margin: 0.2}\noptimizer: {lr: 0.02}", "new.yaml")
    assert recipe == new
    assert caplog.messages == [
        "old.yaml:2: loss.name: triple: is called triplet now; dmlkit 0.4.0 will refuse the old name",
        "old.yaml:3: training.rate: is called optimizer.lr now; dmlkit 0.4.0 will refuse the old name",
        "--set training.rate=0.02: training.rate: is called optimizer.lr now; dmlkit 0.4.0 will refuse the old name",
    ]


def test_a_new_name_on_the_command_line_overrides_an_old_one_in_the_file() -> None:
    assert parse_recipe(RECIPE, "old.yaml", ["optimizer.lr=0.05"]).optimizer.lr == 0.05
    assert parse_recipe(RECIPE, "old.yaml", ["loss.name=triplet"]).loss.name == "triplet"


def test_an_error_of_an_old_key_names_the_new_one_and_the_line() -> None:
    with pytest.raises(UserError, match=r"^old\.yaml:3: optimizer\.lr: got -0\.01, expected .*greater than 0"):
        parse_recipe(RECIPE.replace("0.01", "-0.01"), "old.yaml")


def test_old_commands_and_options(dmlkit: Cli) -> None:
    old = dmlkit("show", "recipes", f"--folder={shipped_recipes()}")
    assert old.out == dmlkit("list", "recipes", "--root", str(shipped_recipes())).out
    assert old.err == (
        "show: is called list now; dmlkit 0.4.0 will refuse the old name\n"
        "--folder: is called --root now; dmlkit 0.4.0 will refuse the old name\n"
    )
