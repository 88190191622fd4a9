"""`make audit`: which licences are permitted, and how it ends by what pip-audit finds."""

import importlib.util
import json
import subprocess

import pytest

from tests.conftest import ROOT

spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
assert spec is not None and spec.loader is not None
audit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(audit)


@pytest.mark.parametrize(
    ("licence", "is_permitted"),
    [
        ("MIT", True),
        ("Apache License, Version 2.0", True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception", True),
        ("GNU Lesser General Public License v3 (LGPLv3)", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("not stated", False),
    ],
)
def test_permissive_licences_and_copyleft_of_files_are_permitted(licence: str, is_permitted: bool):
    assert audit.is_permitted(licence) == is_permitted


def test_packages_are_those_that_dmlkit_needs_here():
    names = {package.name for package in audit.installed("dmlkit", ("timm",), set())}
    assert {"dmlkit", "torch", "numpy", "timm"} <= names and "pytest" not in names


def test_the_licences_of_all_that_is_installed_here_are_permitted(capsys: pytest.CaptureFixture[str]):
    assert audit.check_licences(), capsys.readouterr().err


FINE, FOUND = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "version": "2", "vulns": [{"id": "CVE-1"}]}
UNKNOWN = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "is_well", "message"),
    [
        ([FINE], True, "no vulnerability is known of 1 pinned packages"),
        ([FINE, FOUND], False, "b 2 is vulnerable: CVE-1"),
        ([FINE, UNKNOWN], True, "not looked up: Dependency not found on PyPI"),
        ([UNKNOWN], True, "vulnerabilities were not looked for: no database knows a package"),
        (None, True, "vulnerabilities were not looked for, since pip-audit reached no database: no route to host"),
    ],
)
def test_the_end_of_an_audit(packages, is_well: bool, message: str, monkeypatch: pytest.MonkeyPatch, capsys):
    text = "" if packages is None else json.dumps({"dependencies": packages})
    ended = subprocess.CompletedProcess((), 1, text, "no route to host\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    assert audit.check_vulnerabilities() is is_well
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
