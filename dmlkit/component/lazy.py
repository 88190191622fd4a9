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
            similar = get_close_matches(name, known, n=1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"available: {', '.join(sorted(known))}"
            raise AttributeError(f"module {module!r} has no attribute {name!r}; {hint}")
        nodes = ast.walk(ast.parse(getsource(sys.modules[module])))
        imports = (node for node in nodes if isinstance(node, ast.ImportFrom))
        aliases = ((node.module or "", alias) for node in imports for alias in node.names)
        source, alias = next((source, alias) for source, alias in aliases if name == (alias.asname or alias.name))
        return namespace.setdefault(name, getattr(import_module(source), alias.name))

    namespace |= {"__getattr__": find, "__dir__": lambda: sorted({*namespace, *known})}
