"""How much of a Python program's structure another one has: syntax trees and data flow (M73; PPOCoder, 2301.13816 sec. 3.2.2)."""

import ast
from collections import Counter
from collections.abc import Iterator

Edge = tuple[int, int]


def compare(program: str, reference: str) -> dict[str, float] | None:
    """``{"ast": …, "dfg": …}``: the share of the reference's subtrees, and of its flows between variables, that the program has
    too, each as often as both have it; 1 where the reference has none. None when the program cannot be parsed.

    Names do not count: variables are numbered as they appear.
    """
    wanted = ast.parse(reference)
    try:
        found = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of a program nested too deeply as well
        return None
    ids: dict[tuple, int] = {}
    return {
        "ast": _share(_subtrees(found, ids), _subtrees(wanted, ids)),
        "dfg": _share(Counter(flows(found)), Counter(flows(wanted))),
    }


def _share(found: Counter, wanted: Counter) -> float:
    return (found & wanted).total() / wanted.total() if wanted else 1.0


def _subtrees(tree: ast.AST, ids: dict[tuple, int]) -> Counter[int]:
    """How often each shape occurs among the nodes that have nodes below them. Equal shapes have equal ids."""
    shape: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for node in reversed(list(ast.walk(tree))):  # children before their parents
        below = tuple(shape[id(child)] for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context))
        if isinstance(node, ast.expr_context):
            continue
        key = (type(node).__name__, *below)
        shape[id(node)] = ids.setdefault(key, len(ids))
        if below:
            counts[shape[id(node)]] += 1
    return counts


def flows(tree: ast.AST) -> list[Edge]:
    """(variable, one that it was computed from), by number, in the order of the program. ``b = a; a += b``: (0, 1), (1, 1), (1, 0)."""
    numbers: dict[str, int] = {}
    out: list[Edge] = []
    for node in in_order(tree):
        targets, sources = _assigned(node)
        for target in targets:
            for source in sources:
                pair = [numbers.setdefault(name, len(numbers)) for name in (target, source)]
                out.append((pair[0], pair[1]))
    return out


def _assigned(node: ast.AST) -> tuple[list[str], list[str]]:
    """The variables that a node gives values to, and those that it takes them from."""
    if isinstance(node, ast.Assign):
        return [name for target in node.targets for name in _names(target)], _names(node.value)
    if isinstance(node, ast.AugAssign):
        return _names(node.target), _names(node.target) + _names(node.value)
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
        return _names(node.target), _names(node.value) if node.value is not None else []
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        return _names(node.target), _names(node.iter)
    return [], []


def _names(node: ast.AST) -> list[str]:
    return [each.id for each in in_order(node) if isinstance(each, ast.Name)]


def in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """A node, then what is below it, as it stands in the program."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left += reversed(list(ast.iter_child_nodes(node)))
