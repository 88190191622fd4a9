"""The licences of dmlkit and all that it installs, and known vulnerabilities of the pinned versions.

Ends with 1 for a licence that is not permitted or a vulnerability that is known, else with 0: also where no database
of vulnerabilities can be reached, which it says.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PERMITTED = re.compile(
    r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Zlib|CC0|BSL-1\.0|Boost|HPND|CNRI|Unlicense|Public Domain"
    r"|MPL|Mozilla|LGPL|Lesser General Public",  # copyleft that stays with the files, or with the library
    re.IGNORECASE,
)
PAGE = """\
# Licenses of dependencies

The license of dmlkit is MIT. `python .ci/audit.py docs/licenses.md` writes this table of what it installs on Linux with
the extras of `requirements.lock`, from the metadata of the packages; the NVIDIA packages come with PyTorch for GPUs.
`make audit` prints the versions too, and fails for a license that is neither permissive nor MPL or LGPL.

| license | packages |
|---|---|
"""
VENDORS = re.compile("nvidia-|cuda-")  # CUDA's libraries under NVIDIA's terms, which torch's wheels for GPUs bring


def installed(name: str, extras: tuple[str, ...], seen: set[tuple[str, str]]) -> Iterator[Distribution]:
    """Yield a package and its requirements here, with these extras, each once."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    if (name, "") not in seen:
        yield found
    wanted = [extra for extra in ("", *extras) if (name, extra) not in seen]
    seen.update((name, extra) for extra in wanted)
    for line in found.requires or ():
        needed = Requirement(line)
        if any(needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in wanted):
            yield from installed(canonicalize_name(needed.name), tuple(needed.extras), seen)


def licence_of(package: Distribution) -> str:
    """Return the license of a package: an expression, its classifiers, its name, or the first line of its file."""
    metadata = package.metadata
    classifiers = [text.split(" :: ")[-1] for text in metadata.get_all("Classifier", []) if text.startswith("License")]
    named = " AND ".join(name for name in classifiers if not name.lower().endswith(" approved"))
    own = metadata.get("License", "").removeprefix("UNKNOWN")
    file = package.read_text("licenses/LICENSE") or package.read_text("LICENSE") or ""
    found = metadata.get("License-Expression") or named or own or file or "not stated"
    return found.strip().splitlines()[0][:80].strip()


def is_permitted(licence: str) -> bool:
    """Whether one of the alternatives of a licence is permitted in all its parts."""
    alternatives = (choice.split(" AND ") for choice in licence.split(" OR "))
    return any(all(PERMITTED.search(part) for part in parts) for parts in alternatives)


def packages_of(unwanted: tuple[str, ...] = ()) -> list[Distribution]:
    """Return dmlkit and what it and its extras bring here, by name."""
    extras = distribution("dmlkit").metadata.get_all("Provides-Extra", [])
    packages = installed("dmlkit", tuple(extra for extra in extras if extra not in unwanted), set())
    return sorted({package.name: package for package in packages}.values(), key=lambda package: package.name.lower())


def check_licences() -> bool:
    """Print the licence of each package; whether all are permitted."""
    refused: list[str] = []
    for package in packages_of():
        licence = licence_of(package)
        print(f"{package.name} {package.version}: {licence}")
        if not VENDORS.match(package.name) and not is_permitted(licence):
            refused.append(f"{package.name} ({licence})")
    for text in refused:
        print(f"audit: not permitted: {text}; permitted are permissive licences, MPL and LGPL", file=sys.stderr)
    return not refused


def page_of_licences() -> str:
    """Return docs/licenses.md: which packages have which license, without those for development alone."""
    packages: dict[str, list[str]] = {}
    for package in packages_of(("dev", "docs", "mlflow", "wandb")):
        packages.setdefault(licence_of(package), []).append(package.name)
    rows = sorted(packages.items(), key=lambda row: (-len(row[1]), row[0]))
    return PAGE + "".join(f"| {licence} | {', '.join(names)} |\n" for licence, names in rows)


def check_vulnerabilities() -> bool:
    """Whether none is known of the versions in constraints.txt, as far as a database can be reached."""
    options = ("--requirement", "constraints.txt", "--no-deps", "--disable-pip", "--progress-spinner", "off")
    command = (sys.executable, "-m", "pip_audit", *options, "--format", "json", "--timeout", "30")
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip_audit" in run.stderr:
        print("audit: pip-audit is missing; run make setup", file=sys.stderr)
        return False
    try:
        report = json.loads(run.stdout)
    except ValueError:
        reason = (run.stderr.strip().splitlines() or [f"it ended with {run.returncode}"])[-1][:200]
        print(f"audit: vulnerabilities were not looked for, since pip-audit reached no database: {reason}")
        return True
    known = [package for package in report["dependencies"] if "vulns" in package]
    skipped = [package["skip_reason"] for package in report["dependencies"] if "skip_reason" in package]
    if skipped and not known:
        print(f"audit: vulnerabilities were not looked for: no database knows a package; the first: {skipped[0][:200]}")
        return True
    for reason in skipped:
        print(f"audit: not looked up: {reason[:200]}")
    found = [package for package in known if package["vulns"]]
    for package in found:
        names = ", ".join(fault["id"] for fault in package["vulns"])
        print(f"audit: {package['name']} {package['version']} is vulnerable: {names}", file=sys.stderr)
    if not found:
        print(f"audit: no vulnerability is known of {len(known)} pinned packages")
    return not found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(Path(sys.argv[1]).write_text(page_of_licences(), encoding="utf-8") == 0)
    results = [check_licences(), check_vulnerabilities()]
    sys.exit(0 if all(results) else 1)
