"""``dmlkit list``, ``copy``, ``check`` and ``schema``: recipes and their components."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dmlkit.cli.console import Output, cells, print_table, say, show_table
from dmlkit.cli.options import Set, Writes, command
from dmlkit.errors import UserError
from dmlkit.files.escape import command_word, printable
from dmlkit.files.outputs import check_file, write_output

if TYPE_CHECKING:
    from dmlkit.recipe.catalogue import MemberReference, Reference
    from dmlkit.recipe.overrides import RecipeHeader

LEAST_ROOM = 20  # characters of a description, also where the terminal is narrower


@command("dmlkit list losses", "dmlkit list losses proxy_anchor", "dmlkit list recipes start", name="list")
def list_members(
    family: Annotated[str | None, "FAMILY", "Family of components, e.g. losses; or the word recipes."] = None,
    name: Annotated[
        str | None, "NAME", "Member of the family, e.g. proxy_anchor; or group of recipes, e.g. start."
    ] = None,
    /,
    root: Annotated[
        Path | None, "FOLDER", "List the recipes in this folder. Default: those installed with dmlkit."
    ] = None,
    output: Annotated[
        Path | None, "FILE", "Write all keys of all families as Markdown (.md).", Writes(check_file, (".md",))
    ] = None,
) -> None:
    """List the families of components, the members of one family with their keys, or the recipes."""
    if root is not None and family != "recipes":
        way = f"use dmlkit list recipes --root {command_word(root)}"
        raise UserError(f"list: --root {root} applies only to recipes; {way}")
    if output is not None:
        if family is not None:
            raise UserError(f"list: --output {output}: has all families; remove {family}")
        from dmlkit.recipe.reference import as_markdown

        write_output(output, as_markdown(find_reference()))
        say(f"wrote {output}")
    elif family == "recipes":
        print_recipes(root, name)
    elif family is None:
        families = find_reference().families
        rows = [[name, ", ".join(member.name for member in members)] for name, members in families.items()]
        print_table([["family", "members"], *rows])
        say("dmlkit list FAMILY shows the members of a family, with their keys and defaults")
        say("dmlkit list recipes shows the recipes")
    else:
        print_members(members_of(family, name))


def find_reference() -> "Reference":
    """Return the reference of recipes, stored or, with a spinner, made from the classes."""
    from dmlkit.recipe.catalogue import stored_reference

    plugins = sys.modules.get("dmlkit.recipe.plugin")  # loaded for --plugin, or because a recipe was read
    if not (plugins and plugins.plugin_files()) and (stored := stored_reference()):
        return stored
    from dmlkit.recipe.reference import new_reference

    with Console(stderr=True).status("Reading the components; without plug-ins the result is kept for the next time"):
        return new_reference()


def members_of(family: str, name: str | None) -> "tuple[MemberReference, ...]":
    """Return the members of a family, or the one with a name."""
    from dmlkit.recipe.faults import suggest

    families = find_reference().families
    if family not in families:
        raise UserError(f"list: unknown family {family!r}; {suggest(family, ['recipes', *families])}")
    known = tuple(member for member in families[family] if name in (None, member.name))
    if not known:
        raise UserError(
            f"list: {family} has no {name!r}; {suggest(str(name), [member.name for member in families[family]])}"
        )
    return known


def print_members(members: "Iterable[MemberReference]") -> None:
    """Print each member, with the default and the meaning of each key; those of a heading below it."""
    ordered = sorted(members, key=lambda member: member.heading, reverse=True)  # proxies, pairs, around other losses
    heading = ordered[0].heading if len({member.heading for member in ordered}) == 1 else None
    for member in ordered:
        if member.heading != heading:
            heading = member.heading
            say(heading.upper(), style="bold")
            Output.console.print()
        say(f"{member.name} ({member.plugin})" if member.plugin else member.name, style="bold")
        say_indented(member.meaning, 2)
        for key in member.keys:
            say_indented(f"{key.key}: {key.default}  {key.meaning}", 4)
        Output.console.print()


def say_indented(text: str, indent: int) -> None:
    """Print text at an indent, wrapped at the terminal's width."""
    Output.console.print(Padding(Text(printable(text)), (0, 0, 0, indent)))


def print_recipes(root: Path | None, group: str | None) -> None:
    """Print the recipes of dmlkit, a line each; those of one group, or below ``root``, with their full headers."""
    from dmlkit.recipe.overrides import find_recipes, shipped_recipes

    known = find_recipes(root or shipped_recipes())
    groups = {path.name if root is None else str(path): headers for path, headers in known.items()}
    if group is not None and group not in groups:
        raise UserError(f"list: there is no group of recipes {group!r}; expected one of {', '.join(groups)}")
    shown = [group] if group else sorted(groups, key=lambda name: (name != "start", name != "glyphs", name))
    for name in shown:
        if group or root:
            print_headers(name, groups[name], is_shipped=root is None)
            continue
        say(name, style="bold")
        names = [f"{name}/{header.path.stem}" for header in groups[name]]
        width = max(map(len, names))
        room = max(Output.console.width - width - 4, LEAST_ROOM)
        for title, header in zip(names, groups[name], strict=True):
            summary = shorten(header.summary, room, placeholder=" ...", break_on_hyphens=False)
            say(f"  {title:{width}}  {summary}".rstrip())
        Output.console.print()
    if root is None:
        say("dmlkit train NAME trains a recipe; dmlkit copy NAME FILE copies it to change it")
    if root is None and group is None:
        say("dmlkit list recipes GROUP shows full descriptions and published results")


def print_headers(group: str, headers: "Iterable[RecipeHeader]", *, is_shipped: bool) -> None:
    """Print a table of the recipes of a group."""
    table = Table(title=Text(printable(group)), title_justify="left")
    table.add_column("recipe", no_wrap=is_shipped)  # names must be copyable
    table.add_column("description")
    table.add_column("published")
    for header in headers:
        name = f"{group}/{header.path.stem}" if is_shipped else header.path.name
        table.add_row(*cells([name, header.summary, header.published]))
    show_table(table)


@command("dmlkit copy glyphs/proxy_anchor mine.yaml")
def copy(
    name: Annotated[str, "NAME", "Name of a recipe, as listed by dmlkit list recipes."],
    file: Annotated[
        Path | None, "FILE", "YAML file to write. Default: the last part of NAME, in the current folder."
    ] = None,
    /,
) -> None:
    """Copy a recipe that is installed with dmlkit, so that you can change it."""
    from dmlkit.recipe.overrides import copy_recipe

    for path in copy_recipe(name, file or Path(f"{Path(name).name}.yaml")):
        say(f"written: {path}")


@command("dmlkit check glyphs/proxy_anchor --set loss.margin=0.2", "dmlkit check recipes/*.yaml")
def check(
    recipes: Annotated[list[Path], "RECIPE...", "YAML files, or names from dmlkit list recipes."],
    /,
    overrides: Set = None,
) -> None:
    """Check recipes, and print each with all defaults."""
    from dmlkit.recipe.overrides import read_tree

    texts, faults = list[str](), list[str]()
    for recipe in recipes:
        try:
            read_tree(recipe)

            from dmlkit.backbones.weights import license_words
            from dmlkit.recipe.file import dump_recipe, read_recipe

            checked = read_recipe(recipe, overrides or [])
            name = checked.backbone.license()
            texts.append(dump_recipe(checked) + (f"# pretrained weights: {license_words(name)}\n" if name else ""))
        except UserError as error:
            faults.append(str(error))
    if faults:
        raise UserError("\n".join(faults))
    typer.echo("---\n".join(texts), nl=False)


@command("dmlkit schema > recipe.schema.json")
def schema() -> None:
    """Print the JSON schema of recipes, with which editors check and complete them."""
    typer.echo(json.dumps(find_reference().schema, indent=2))
