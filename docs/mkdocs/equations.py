"""Equations of docstrings and pages as MathML, which browsers render without a script or a font to load."""

import html
import re

from griffe import Class, Extension, Function, Module, Object
from latex2mathml.converter import convert

BLOCK = re.compile(r"^( *)\.\. math:: *(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
MARKED = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def as_markdown(docstring: str) -> str:
    r"""Rewrite Sphinx's marks as those that pymdownx.arithmatex knows.

    >>> as_markdown(r"The norm :math:`\|x\|`.")
    'The norm \\(\\|x\\|\\).'
    """
    text = EXAMPLE.sub(r"\1Examples:", docstring)  # what griffe calls a section of doctests
    text = BLOCK.sub(lambda found: f"\n{found[1]}\\[{' '.join(found[2].split())}\\]\n", text)
    return INLINE.sub(lambda found: f"\\({found[1]}\\)", text)


def as_mathml(latex: str, *, block: bool) -> str:
    r"""One equation.

    Raises:
        ValueError: a command of LaTeX is unknown.
    """
    latex = latex.replace(r"\arg\max", r"\argmax").replace(r"\arg\min", r"\argmin")  # its names of the two
    if block and (r"\\" in latex or "&" in latex):
        latex = rf"\begin{{split}}{latex}\end{{split}}"
    math = convert(latex, display="block" if block else "inline")
    if unknown := re.search(r">(\\[A-Za-z]+|&)<", math):
        raise ValueError(f"no MathML for {unknown[1]} in {latex}")
    return math


def rendered(page: str) -> str:
    """A page of HTML with its marked equations replaced."""
    return MARKED.sub(
        lambda found: (
            f'<{found[1]} class="equation">{as_mathml(html.unescape(found[2]), block=found[1] == "div")}</{found[1]}>'
        ),
        page,
    )


class SphinxEquations(Extension):
    """Hand docstrings to mkdocstrings with marks that Markdown knows."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Rewrite the docstring of a module, class or function."""
        if isinstance(obj, Module | Class | Function) and obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
