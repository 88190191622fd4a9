"""docs/llms.txt lists the pages of the site: the navigation of mkdocs.yml, the commands, and the benchmarks."""

import re

import yaml

from tests.conftest import ROOT

OUTSIDE = {
    "readme.md": "../README.md",
    "changes.md": "../CHANGELOG.md",
    "contributing.md": "../CONTRIBUTING.md",
    "agents.md": "../AGENTS.md",
    "security.md": "../SECURITY.md",
}
TEXT = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")


def listed() -> dict[str, list[tuple[str, str]]]:
    """Return the titles and paths of each section."""
    return {
        section.partition("\n")[0]: re.findall(r"^- \[(.+?)\]\((.+?)\): \S", section, re.MULTILINE)
        for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    }


def navigation() -> dict[str, list[tuple[str, str]]]:
    """Return what docs/llms.txt has to list, from the files of the project."""
    expected: dict[str, list[tuple[str, str]]] = {}
    nav: list[dict[str, list[str | dict[str, str]]]] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    for section in nav:
        for title, pages in section.items():
            titled = [{"Home": page} if isinstance(page, str) else page for page in pages]
            expected[title] = [(name, OUTSIDE.get(path, path)) for page in titled for name, path in page.items()]
    commands = sorted((ROOT / "docs" / "commands").glob("*.md"))
    expected["Commands"] += [(path.stem, f"commands/{path.name}") for path in commands]
    benchmarks = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    assert expected.pop("Benchmarks") == []  # docs/mkdocs/pages.py lists them
    expected["Optional"] = [(path.stem, f"../benchmarks/results/{path.name}") for path in benchmarks]
    return expected


def test_it_lists_every_page_of_the_navigation():
    assert listed() == navigation()


def test_it_begins_as_llmstxt_org_asks():
    title, _, summary = TEXT.splitlines()[:3]
    assert title == "# dmlkit" and summary.startswith("> ")
