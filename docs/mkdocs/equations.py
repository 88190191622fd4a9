"""Conversion of equations to MathML, which browsers render without loading a script or a font."""

import html
import re

from griffe import Attribute, Class, Extension, Function, Module, Object
from latex2mathml.converter import convert

BLOCK = re.compile(r"^( *)\.\. math:: *(.*(?:\n\1 +\S.*)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
MARKED = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def as_markdown(docstring: str) -> str:
    r"""Replace Sphinx's marks by those of pymdownx.arithmatex.

    >>> as_markdown(r"The norm :math:`\|x\|`.")
    'The norm \\(\\|x\\|\\).'
    """
    text = EXAMPLE.sub(r"\1Examples:", docstring)  # what griffe calls a section of doctests
    text = BLOCK.sub(lambda found: f"\n{found[1]}\\[{' '.join(found[2].split())}\\]\n", text)
    return INLINE.sub(lambda found: f"\\({found[1]}\\)", text)


def as_mathml(latex: str, *, block: bool) -> str:
    r"""Convert one equation.

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
    """Replace the marked equations of a page of HTML."""
    return MARKED.sub(
        lambda found: (
            f'<{found[1]} class="equation">{as_mathml(html.unescape(found[2]), block=found[1] == "div")}</{found[1]}>'
        ),
        page,
    )


class SphinxEquations(Extension):
    """Extension of griffe that gives docstrings the equation marks of Markdown."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        """Rewrite the docstring of a module, class, function or property."""
        if isinstance(obj, Module | Class | Function | Attribute) and obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
