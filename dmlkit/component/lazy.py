"""Names of a package that are imported when they are first asked for: torch takes seconds, a family has many files."""

import sys
from importlib import import_module


def import_on_demand(module: str) -> None:
    """Let ``dmlkit.losses.ProxyAnchor`` import its file, which the module names under ``if TYPE_CHECKING``.

    A name that is not in ``__all__`` raises an error that suggests one. The functions are set here because a
    ``__getattr__`` in the source would let every name pass the type checker.
    """
    namespace = vars(sys.modules[module])
    known: list[str] = namespace["__all__"]

    def find(name: str) -> object:
        import ast
        from difflib import get_close_matches
        from inspect import getsource

        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"available: {', '.join(sorted(known))}"
            raise AttributeError(f"module {module!r} has no attribute {name!r}; {hint}")
        nodes = ast.walk(ast.parse(getsource(sys.modules[module])))
        imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
        parts = ((node.module or "", part) for node in imports for part in node.names)
        place, part = next((place, part) for place, part in parts if name == (part.asname or part.name))
        return namespace.setdefault(name, getattr(import_module(place), part.name))

    namespace |= {"__getattr__": find, "__dir__": lambda: sorted({*namespace, *known})}
