"""What a release consists of: one version, and files for other tools whose names and options exist."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, Result

Cli = Callable[..., Result]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_all_files_have_one_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert read(ROOT / "CITATION.cff")["version"] == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[1] == version  # pyright: ignore


def test_workflows_call_targets_of_the_makefile_and_have_no_secrets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    called = set[str]()
    for path in WORKFLOWS:
        text = path.read_text("utf-8")
        assert "secrets." not in text
        steps = [step for job in read(path)["jobs"].values() for step in job["steps"]]
        called |= {name for step in steps for name in re.findall(r"make ([a-z -]+)", step.get("run", ""))}
    assert called == {"lint", "test", "test-heavy", "docs", "wheel"} and called <= targets


def test_only_the_job_that_publishes_may_ask_for_a_token_of_the_index():
    jobs = {(path.name, name): job for path in WORKFLOWS for name, job in read(path)["jobs"].items()}
    assert [name for name, job in jobs.items() if job.get("permissions")] == [("release.yml", "publish")]
    assert {str(read(path)["permissions"]) for path in WORKFLOWS} == {"{'contents': 'read'}"}


def test_the_container_installs_extras_that_exist_and_copies_only_what_the_build_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "Dockerfile").read_text("utf-8")
    extras = re.findall(r"'\.\[(.+)\]'", text)[0].split(",")
    assert set(extras) <= set(project["optional-dependencies"])
    copied = [name for line in re.findall(r"^COPY (?!--from)(.+)", text, re.MULTILINE) for name in line.split()[:-1]]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(kept) and all((ROOT / name).exists() for name in copied)
    assert text.index("\nUSER dmlkit") < text.index("\nENTRYPOINT")


def test_compose_and_the_hook_name_commands_and_their_options(monkeypatch: pytest.MonkeyPatch, dmlkit: Cli):
    service = read(ROOT / "compose.yaml")["services"]["dmlkit"]
    assert service["read_only"] and all(port.startswith("127.0.0.1:") for port in service["ports"])
    monkeypatch.setenv("DMLKIT_TOKEN", "secret")
    assert "galleries/birds: no such" in dmlkit(*service["command"]).err  # the options are those of the command
    (hook,) = read(ROOT / ".pre-commit-hooks.yaml")
    assert re.search(hook["files"], "mine.dmlkit.yaml") and not re.search(hook["files"], "compose.yaml")
    assert dmlkit(*hook["entry"].split()[1:], "glyphs/mpa", "glyphs/triplet").out.count("\nloss:") == 2


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_issue_forms_have_fields_with_labels(path: Path):
    form = read(path)
    assert form["name"] and form["description"]
    assert all(part["attributes"]["label"] for part in form["body"])
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
