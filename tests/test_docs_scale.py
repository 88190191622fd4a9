"""docs/scale.md: its commands are commands, and what it says of losses is so."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.distributed.launch import OWN_STORE
from dmlkit.losses.base import LossConfig
from dmlkit.recipe.file import parse_recipe
from tests.conftest import TINY_RECIPE

TEXT = (Path(__file__).parent.parent / "docs" / "scale.md").read_text(encoding="utf-8")


def test_its_commands_are_understood():
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) == 5 and any(line.startswith(f"{OWN_STORE}=1 torchrun") for line in lines)
    for line in lines:
        _, _, command = line.partition(" -m dmlkit ")
        name, *rest = shlex.split(command)
        get_command(app).commands[name].make_context(name, rest)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("loss", sorted(LossConfig.variants))
def test_the_losses_it_names_share_proxies_out_and_sample(loss: str):
    named = f"`{loss}`" in TEXT.partition("Both go with")[2].partition("need the proxies")[0]
    sets = ["training.shard_proxies=true"]
    if not named:
        with pytest.raises(Exception, match="cannot share out its proxies"):
            parse_recipe(TINY_RECIPE.replace("proxy_anchor", loss), "tiny.yaml", sets)
        return
    for key in re.findall(r"`((?:loss|training)\.\w+=[^`]+)`", TEXT):
        parse_recipe(TINY_RECIPE.replace("proxy_anchor", loss), "tiny.yaml", [*sets, key] if "fp" not in key else [key])
