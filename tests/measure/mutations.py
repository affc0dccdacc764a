"""Wrong versions of right functions, for tests that must see a scorer say no."""

from __future__ import annotations

import ast


class _ReturnNothing(ast.NodeTransformer):
    def visit_Return(self, node: ast.Return) -> ast.Return:
        return ast.Return(ast.Constant(None))

    def visit_Yield(self, node: ast.Yield) -> ast.Yield:
        return ast.Yield(ast.Constant(None))


class _FlipFirst(ast.NodeTransformer):
    """Turns the first comparison around, or else adds one to the first whole number, or else swaps + and -."""

    def __init__(self, kind: str) -> None:
        self.kind, self.done = kind, False

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if self.kind == "compare" and not self.done:
            self.done = True
            return ast.UnaryOp(ast.Not(), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if self.kind == "constant" and not self.done and type(node.value) is int:
            self.done = True
            return ast.Constant(node.value + 1)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        swap = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}
        if self.kind == "operator" and not self.done and type(node.op) in swap:
            self.done = True
            return ast.BinOp(node.left, swap[type(node.op)](), node.right)
        return node


def returns_nothing(source: str) -> str:
    """Every return and yield gives None."""
    return ast.unparse(ast.fix_missing_locations(_ReturnNothing().visit(ast.parse(source))))


def slightly_wrong(source: str) -> list[str]:
    """Up to three versions with one small mistake each."""
    out = []
    for kind in ("compare", "constant", "operator"):
        transformer = _FlipFirst(kind)
        tree = transformer.visit(ast.parse(source))
        if transformer.done:
            out.append(ast.unparse(ast.fix_missing_locations(tree)))
    return out
