import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dmlkit.cli.recipes import find_reference
from dmlkit.losses import LossConfig
from dmlkit.optimizers import OptimizerConfig
from dmlkit.recipe import catalogue as cache
from dmlkit.recipe.catalogue import Reference
from dmlkit.recipe.reference import as_markdown, describe
from tests.cli.test_early import without_torch
from tests.processes import Forked, start


@pytest.fixture
def warm(catalogue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", catalogue)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the catalogue in a cache folder that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    return cache.catalogue_file()


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[Reference]:
    """Descriptions that were made; each differs. Members and plug-ins of other tests are left out."""
    made: list[Reference] = []

    def describe() -> Reference:
        made.append(Reference((), {}, {}, {"number": len(made)}))
        return made[-1]

    monkeypatch.setattr("dmlkit.recipe.reference.describe", describe)
    monkeypatch.setattr("dmlkit.recipe.schema.FAMILIES", {})
    monkeypatch.setattr("dmlkit.recipe.plugin.plugin_files", lambda: ())
    return made


@pytest.mark.usefixtures("warm")
def test_the_catalogue_is_what_the_classes_say():
    code = "from dmlkit.recipe import catalogue, reference\nprint(catalogue.stored_reference() == reference.describe())"
    assert Forked(exec, code).communicate()[0] == "True\n"  # other tests have defined members in this process


@pytest.mark.parametrize(
    ("family", "name", "part"),
    [
        ("losses", "arcface", "dynamic"),
        ("losses", "mpa", "transport"),
        ("losses", "proxy_nca", "informative"),
        ("optimizers", "adam", "lr_multipliers"),
    ],
)
def test_keys_of_a_part_of_a_member_are_listed_below_it(family: str, name: str, part: str):
    """The keys of a part that is no member were nowhere; the oracle is what such a part holds when it is built."""
    fields = {"losses": LossConfig, "optimizers": OptimizerConfig}[family].variants[name].model_validate({part: {}})
    held = {f"{part}.{key}": json.dumps(value) for key, value in getattr(fields, part).model_dump().items()}
    (member,) = (member for member in describe().families[family] if member.name == name)
    listed = {key.key: key.default for key in member.keys if key.key.startswith(f"{part}.")}
    assert listed.keys() == held.keys()
    assert all(listed[key] == held[key] for key in held if key != "transport.solver")
    assert "`lr_multipliers`, `layer_decay`" in as_markdown(describe())  # those of a shared key are not repeated


HEAVY = ("torch", "numpy", "geoopt")


@pytest.mark.usefixtures("warm")
def test_what_only_lists_imports_no_torch(tmp_path: Path):
    listing = ["--help", "list", "list losses", "list -o keys.md", "list recipes", "schema"]
    commands = [*listing, "copy glyphs/proxy_anchor mine.yaml"]
    results = dict(zip(commands, without_torch(tmp_path, commands, *HEAVY), strict=True))
    assert {words: result.code for words, result in results.items()} == dict.fromkeys(commands, 0), results
    assert all(results[words].out for words in listing)


def test_completion_imports_no_torch(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"_DMLKIT_COMPLETE": "complete_bash", "COMP_WORDS": "dmlkit sch", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import io, sys; from contextlib import redirect_stdout; sys.argv, out = ['dmlkit'], io.StringIO()\n"
        "from dmlkit.cli.app import main\n"
        "with redirect_stdout(out):\n    try: main()\n    except SystemExit: pass\n"
        f"print(out.getvalue().split(), [name for name in {HEAVY} if name in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout == "['schema'] []\n"


def test_it_is_made_once_and_again_after_a_change(cold, described, monkeypatch):
    assert find_reference() == find_reference() == described[0]
    assert len(described) == 1 and list(cold.parent.iterdir()) == [cold]
    monkeypatch.setattr(cache, "fingerprint", lambda: "another")
    assert find_reference() == find_reference() == described[1]
    assert len(described) == 2 and list(cold.parent.iterdir()) == [cold]


def test_a_module_that_changes_comes_or_goes_changes_the_fingerprint(tmp_path: Path):
    (tmp_path / "losses").mkdir()
    module, other = tmp_path / "losses" / "a.py", tmp_path / "losses" / "b.py"
    module.write_text("margin = 0.1\n")
    found = [cache.fingerprint(tmp_path)]
    assert cache.fingerprint(tmp_path) == found[0]
    os.utime(module, ns=(1, 1))
    found.append(cache.fingerprint(tmp_path))
    module.write_text("margin = 0.25\n")
    os.utime(module, ns=(1, 1))
    found.append(cache.fingerprint(tmp_path))
    module.rename(other)
    found.append(cache.fingerprint(tmp_path))
    other.unlink()
    found.append(cache.fingerprint(tmp_path))
    assert len(set(found)) == 5


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000,
        b'{"fingerprint": "F"}',
        b'{"fingerprint": "F", "reference": 1}',
        b'{"fingerprint": "F", "reference": {"families": [], "recipe": [], "training": [], "schema": {}}}',
        b'{"fingerprint": "F", "reference": {"families": {}, "recipe": [[1]], "training": [], "schema": {}}}',
    ],
    ids=lambda content: content[:20].decode("latin-1"),
)  # fmt: skip
def test_a_damaged_catalogue_is_replaced(content: bytes, cold: Path, described: list[Reference], monkeypatch):
    monkeypatch.setattr(cache, "fingerprint", lambda: "F")
    cold.parent.mkdir(parents=True)
    cold.write_bytes(content)
    assert find_reference() == find_reference() == described[0]
    assert len(described) == 1


def test_without_a_cache_folder_it_is_made_each_time(described: list[Reference], tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [find_reference(), find_reference()] == described and len(described) == 2

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert [find_reference(), find_reference()] == described[2:] and len(described) == 4


def test_members_of_this_process_are_not_stored(cold: Path, described: list[Reference], monkeypatch):
    family = SimpleNamespace(variants={"mine": SimpleNamespace(__module__="elsewhere")})
    monkeypatch.setattr("dmlkit.recipe.schema.FAMILIES", {"losses": family})
    assert [find_reference(), find_reference()] == described and len(described) == 2
    assert not cold.exists()


@pytest.mark.usefixtures("warm")
def test_plugins_are_described_from_their_classes(dmlkit, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from typing import Literal\nfrom dmlkit.schedules import ScheduleConfig\n"
        'class Mine(ScheduleConfig, frozen=True):\n    """Mine alone."""\n\n    name: Literal["mine"] = "mine"\n'
        "    def after_warmup(self, epoch, epochs): return 1.0\n"
    )
    assert "Mine" in json.loads(start("schema", "--plugin", tmp_path / "mine.py").communicate()[0])["$defs"]
    assert "Mine" not in dmlkit("schema").json()["$defs"]
