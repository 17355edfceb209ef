"""What of a template's tree is rewritten, so that work which Jinja writes as bare Python passes the budget.

Each becomes a filter of `chat_sandbox`: `a ~ b` (joined_text), `a + b + c` (added), slices (sliced), literals of lists
and dicts (held), what a loop runs over (bounded_loop), what is compared or becomes a key (measured). It knows no
budget.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's part for training; here its body alone counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Rewrites(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - the visitor's naming, here and below
        parts = [self.visit(part) for part in node.nodes]
        return _filter("joined_text", nodes.List(parts, lineno=node.lineno))

    def visit_Add(self, node: nodes.Add) -> nodes.Filter:  # noqa: N802
        """A chain as one: what it makes on the way is dropped at once."""
        parts: list[nodes.Expr] = []
        first: nodes.Expr = node
        while isinstance(first, nodes.Add):
            parts.append(self.visit(first.right))
            first = first.left
        parts.append(self.visit(first))
        return _filter("added", nodes.List(parts[::-1], lineno=node.lineno))

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filter("bounded_loop", node.iter)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return _filter("sliced", node.node, *(none if end is None else end for end in ends))

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter("held", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter("held", node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _filter("measured", pair.key)
        return _filter("held", node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """To compare with a constant is cheap whatever the other side is; two values may both be nested."""
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        both = sum(not _plain(side) for side in sides) > 1
        new = [side if _plain(side) else self.visit(side) for side in sides]
        new = [_filter("measured", side) if both and not _plain(side) else side for side in new]
        node.expr = new[0]
        for operand, side in zip(node.ops, new[1:], strict=True):
            operand.expr = side
        return node


def _plain(node: nodes.Expr) -> bool:
    """Whether it is a constant, or a list of such."""
    if isinstance(node, (nodes.List, nodes.Tuple)):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _filter(name: str, node: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
