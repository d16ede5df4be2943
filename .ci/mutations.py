"""Which small changes a module can suffer: one by one, as (line, function, before, after, the changed source)."""

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
NAMES = {
    "minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "any": "all", "all": "any", "zeros": "ones",
    "ones": "zeros", "zeros_like": "ones_like", "psum": "pmax", "float32": "float16", "union": "intersection",
    "logical_not": "asarray", "isfinite": "isnan", "isnan": "isfinite", "sqrt": "square", "iscomplexobj": "isrealobj",
}  # fmt: skip


class Mutant(NamedTuple):
    line: int
    function: str
    before: str
    after: str
    source: str


def mutants_of(source: str) -> Iterator[Mutant]:
    tree = ast.parse(source)
    for path, node, function in _sites(tree, (), "module", ()):
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            parent = _at(mutated, path[:-1])
            new = change(copy.deepcopy(node))
            _replace(parent, path[-1], new)
            text = ast.unparse(ast.fix_missing_locations(mutated))
            yield Mutant(node.lineno, function, _one_line(node), _one_line(new), text)


Path = tuple[tuple[str, int | None], ...]


def _sites(node: ast.AST, path: Path, function: str, outer: tuple[str, ...]) -> Iterator[tuple[Path, ast.AST, str]]:
    """Every expression and statement that may be changed: no annotations, docstrings, imports or words of an error."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        outer = (*outer, node.name)
        function = ".".join(outer)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "exc", "cause", "type", "bases"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST) or isinstance(child, ast.Import | ast.ImportFrom | ast.JoinedStr):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":  # of zip: an assertion, which never fails
                continue
            here = (*path, (name, index))
            if hasattr(child, "lineno"):
                yield here, child, function
            yield from _sites(child, here, function, outer)


def _changes(node: ast.AST) -> list[Callable[[ast.AST], ast.AST]]:
    """What can be done to one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return [_with(ops=[COMPARISONS[type(node.ops[0])]()])]
    if isinstance(node, ast.Compare):
        return [
            _with(ops=[*node.ops[:at], COMPARISONS[type(op)](), *node.ops[at + 1 :]]) for at, op in enumerate(node.ops)
        ]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return [_with(op=OPERATORS[type(node.op)]())]
    if isinstance(node, ast.BoolOp):
        return [_with(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return [lambda old: old.operand]
    if isinstance(node, ast.If | ast.IfExp) and not isinstance(
        node.test, ast.Compare | ast.UnaryOp
    ):  # those change themselves
        return [lambda old: _set(old, test=ast.UnaryOp(ast.Not(), old.test))]
    if isinstance(node, ast.Raise):
        return [lambda old: ast.Pass(lineno=old.lineno, col_offset=old.col_offset)]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return [lambda old: ast.Pass(lineno=old.lineno, col_offset=old.col_offset)]
    if isinstance(node, ast.Call) and _is_where(node):
        return [lambda old: _set(old, args=[old.args[0], old.args[2], old.args[1]])]
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        return [_with(attr=NAMES[node.attr])]
    if isinstance(node, ast.Name) and node.id in NAMES:
        return [_with(id=NAMES[node.id])]
    return _of_constant(node)


def _of_constant(node: ast.AST) -> list[Callable[[ast.AST], ast.AST]]:
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    if isinstance(value, bool):
        return [_with(value=not value)]
    if isinstance(value, int | float):
        return [_with(value=value + 1)]
    return []


def _is_where(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr == "where" and len(node.args) == 3


def _with(**fields: object) -> Callable[[ast.AST], ast.AST]:
    return lambda old: _set(old, **fields)


def _set(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _at(node: ast.AST, path: Path) -> ast.AST:
    for name, index in path:
        value = getattr(node, name)
        node = value if index is None else value[index]
    return node


def _replace(parent: ast.AST, place: tuple[str, int | None], new: ast.AST) -> None:
    name, index = place
    if index is None:
        setattr(parent, name, new)
    else:
        getattr(parent, name)[index] = new


def _one_line(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(node)).split("\n")[0].split())
    return text if len(text) <= 90 else text[:87] + "..."
