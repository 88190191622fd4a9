"""What a release consists of: one version, and files for other tools whose names and options exist."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.main import get_command

import dmlkit
from dmlkit.cli.app import app
from tests.conftest import ONE_EPOCH, ROOT, Cli
from tests.packaging.conftest import needed

WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def test_all_files_have_one_version():
    assert read(ROOT / "CITATION.cff")["version"] == PROJECT["version"]
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[1] == PROJECT["version"]
    skill = re.search(r'version: "(\S+)"', (ROOT / "skills/dmlkit/SKILL.md").read_text("utf-8"))
    assert dmlkit.__version__ == PROJECT["version"] == skill[1]


def test_workflows_call_targets_of_the_makefile_and_have_no_secrets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    called = set[str]()
    for path in WORKFLOWS:
        text = path.read_text("utf-8")
        assert "secrets." not in text
        steps = [step for job in read(path)["jobs"].values() for step in job["steps"]]
        called |= {name for step in steps for name in re.findall(r"make ([a-z -]+)", step.get("run", ""))}
    assert called == {"lint", "test", "test-heavy", "test-oldest", "docs", "wheel"} and called <= targets


def test_only_the_job_that_publishes_may_ask_for_a_token_of_the_index():
    jobs = {(path.name, name): job for path in WORKFLOWS for name, job in read(path)["jobs"].items()}
    assert {name: job["permissions"] for name, job in jobs.items() if job.get("permissions")} == {
        ("release.yml", "publish"): {"id-token": "write"},
        ("release.yml", "announce"): {"contents": "write"},
    }
    assert {str(read(path)["permissions"]) for path in WORKFLOWS} == {"{'contents': 'read'}"}


def test_the_container_installs_extras_that_exist_and_copies_only_what_the_build_needs():
    text = (ROOT / "Dockerfile").read_text("utf-8")
    assert set(re.findall(r"'\.\[(.+)\]'", text)[0].split(",")) <= set(PROJECT["optional-dependencies"])
    copied = [name for line in re.findall(r"^COPY (?!--from)(.+)", text, re.MULTILINE) for name in line.split()[:-1]]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(kept) and all((ROOT / name).exists() for name in copied)
    assert text.index("\nUSER 1000") < text.index("\nENTRYPOINT")


def test_compose_and_the_hook_name_commands_and_their_options(monkeypatch: pytest.MonkeyPatch, dmlkit: Cli):
    service = read(ROOT / "compose.yaml")["services"]["dmlkit"]
    assert service["read_only"] and all(port.startswith("127.0.0.1:") for port in service["ports"])
    monkeypatch.setenv("DMLKIT_TOKEN", "secret")
    assert "galleries/birds: no such" in dmlkit(*service["command"]).err  # the options are those of the command
    (hook,) = read(ROOT / ".pre-commit-hooks.yaml")
    assert re.search(hook["files"], "mine.dmlkit.yaml") and not re.search(hook["files"], "compose.yaml")
    assert dmlkit(*hook["entry"].split()[1:], "glyphs/mpa", "glyphs/triplet").out.count("\nloss:") == 2


def test_the_schema_for_editors_is_made_from_the_wheel_and_attached_to_the_release(dmlkit: Cli):
    wheel, release = (
        (ROOT / ".ci/wheel").read_text("utf-8"),
        (ROOT / ".github/workflows/release.yml").read_text("utf-8"),
    )
    page = (ROOT / "docs/commands/schema.md").read_text("utf-8")
    (hook,) = read(ROOT / ".pre-commit-hooks.yaml")
    address, pattern = re.findall(r'^"yaml.schemas": \{"(.+)": "(.+)"\}$', page, re.MULTILINE)[0]
    name = address.rpartition("/")[2]
    assert f'schema >"$root/build/{name}"' in wheel and f"path: build/{name}" in release
    assert f'gh release create "$GITHUB_REF_NAME" {name}' in release
    assert re.search(hook["files"], pattern.replace("*", "mine"))
    assert "additionalProperties" in dmlkit("schema").out


@pytest.mark.slow
def test_a_recipe_that_editors_know_gives_its_run_the_plain_name(tmp_path, monkeypatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    Path("mine.dmlkit.yaml").write_text(ONE_EPOCH)
    assert dmlkit("train", "mine.dmlkit.yaml").code == 0 and Path("runs/mine/summary.json").exists()


LOCK = (ROOT / "requirements.lock").read_text("utf-8")


def required() -> list[str]:
    """The requirements of dmlkit and of the extras that `make lock` and `make setup` take."""
    extras = re.findall(r"^EXTRAS := (.+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[0].split(",")
    return [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]


def locked() -> dict[str, Version]:
    """The version of each package in requirements.lock."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", LOCK, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in found}


def test_the_lock_has_each_requirement_in_an_allowed_version_with_hashes_and_without_addresses():
    wanted, versions = [Requirement(line) for line in required()], locked()
    assert [str(one) for one in wanted if versions[canonicalize_name(one.name)] not in one.specifier] == []
    entries = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert [entry for entry in entries if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry)] == []
    assert len(entries) == len(versions) and "://" not in LOCK and "@" not in LOCK
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").split() if "==" in line]
    pinned = {canonicalize_name(name): Version(version) for name, version in pins}
    assert {name: version for name, version in versions.items() if pinned.get(name, version) != version} == {}


def test_the_lock_has_nothing_that_no_requirement_brings():
    if version("torch").partition("+")[0] != str(locked()["torch"]):
        pytest.skip("other versions than those of constraints.txt bring other packages")
    try:
        brought = {canonicalize_name(name) for name in needed(required())}
    except PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    everywhere = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==\S+ \\$", LOCK, re.MULTILINE)}
    assert {"torch", "numpy"} <= everywhere <= brought


def test_the_list_of_licenses_has_every_requirement_and_nothing_else():
    wanted = {canonicalize_name(Requirement(line).name) for line in required()}
    rows = re.findall(r"^\| .+ \| (.+) \|$", (ROOT / "docs/licenses.md").read_text("utf-8"), re.MULTILINE)[1:]
    listed = {canonicalize_name(name) for row in rows for name in row.split(", ")}
    assert wanted <= listed and listed - {"dmlkit"} <= locked().keys()


def test_every_command_and_name_is_stable_or_provisional():
    rows = re.findall(
        r"^\| (stable|provisional) \| (.+?) \|", (ROOT / "docs/stable.md").read_text("utf-8"), re.MULTILINE
    )
    lists = {kind: text.partition(":")[0].partition(", and files")[0] for kind, text in rows if "the commands" in text}
    named = {kind: re.findall(r"`([a-z-]+)`", text) for kind, text in lists.items()}
    assert sorted(named["stable"] + named["provisional"]) == sorted(get_command(app).commands)


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_issue_forms_have_fields_with_labels(path: Path):
    form = read(path)
    assert form["name"] and form["description"]
    assert all(part["attributes"]["label"] for part in form["body"])
    assert len({part["id"] for part in form["body"]}) == len(form["body"])
