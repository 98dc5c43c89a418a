"""Which attributes of a module its forward pass calls on one and the same variable, read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.Try, ast.With, ast.FunctionDef, ast.Lambda, ast.comprehension)


def called_on_one(forward: Callable[..., Any]) -> tuple[frozenset[str], ...]:
    """Sets of attributes that a method calls on one variable each, as in `self.q_proj(x)` and `self.k_proj(x)`.

    Each is called at one place, all in the same branch, and between these calls the variable is neither assigned nor
    changed by what shows in the source. () where the source is not to be had.
    """
    return _called_on_one(_function(forward))


def _function(forward: Any) -> Any:
    """The function of a bound method, below what accelerate and decorators wrap around it."""
    while True:
        inner = inspect.unwrap(forward)
        inner = getattr(inner, "__func__", inner)
        if inner is forward:
            return inner
        forward = inner


@lru_cache(maxsize=256)
def _called_on_one(function: Any) -> tuple[frozenset[str], ...]:
    try:
        (root,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ()
    if not isinstance(root, ast.FunctionDef) or not root.args.args:
        return ()
    places: dict[Any, dict[str, ast.Call]] = {}
    for attribute, found in _calls(root, root.args.args[0].arg).items():
        (place, call), *others = found
        if not others and place[0] is not None:
            places.setdefault(place, {})[attribute] = call
    return tuple(
        frozenset(found)
        for (name, _), found in places.items()
        if len(found) > 1 and not _changes(root, name, list(found.values()))
    )


def _calls(root: ast.FunctionDef, me: str) -> dict[str, list[tuple[Any, ast.Call]]]:
    """By attribute of `me`, its calls, each with (the variable that is its only argument or None, the branch)."""
    calls: dict[str, list[tuple[Any, ast.Call]]] = {}

    def visit(node: ast.AST, branch: tuple[Any, ...]) -> None:
        attribute = _attribute(node.func, me) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and attribute is not None:
            argument = node.args[0] if len(node.args) == 1 and not node.keywords else None
            name = argument.id if isinstance(argument, ast.Name) else None
            calls.setdefault(attribute, []).append(((name, branch), node))
        for field, value in ast.iter_fields(node):
            inner = (*branch, id(node), field) if isinstance(node, BRANCHES) and node is not root else branch
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, inner)

    visit(root, ())
    return calls


def _changes(root: ast.AST, name: str, calls: Sequence[ast.Call]) -> bool:
    """Whether the variable may be another or changed somewhere from the first line of `calls` to the last."""
    first, last = min(call.lineno for call in calls), max(call.end_lineno or call.lineno for call in calls)
    return any(_writes(node, name) for node in ast.walk(root) if first <= getattr(node, "lineno", 0) <= last)


def _writes(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call):
        method = _attribute(node.func, name)
        return method is not None and method.endswith("_")  # in place, as torch names it
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id == name and not isinstance(node.ctx, ast.Load)
    return False


def _attribute(node: ast.AST, name: str) -> str | None:
    """`attribute` of `name.attribute`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
        return node.attr
    return None
