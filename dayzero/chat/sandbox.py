"""Where a chat template runs: Jinja's sandbox, with an end to what it may compute.

A template comes from a download. The sandbox keeps it from Python's internals; it does not keep it from running for
ever or from filling the memory, so loops, calls and growing texts are counted here and refused beyond any real prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dayzero.errors import UsageError

MAX_STEPS = 200_000  # turns of loops and calls; the longest real conversations need a few thousand
MAX_LENGTH = 16_000_000  # characters of a text or items of a list that a template builds
MAX_EXPONENT = 64


class Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks, for training, what an assistant said: here just its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Renderings, one at a time: ``start()``, then ``template(text).render(...)``. UsageError when the template asks
    for more than any prompt."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation])
        self.filters["_counted"], self.filters["_bounded"] = self._counted, self._bounded
        self.globals.pop("lipsum", None)  # makes text without end, and no prompt has any of it
        self._steps = 0

    def start(self) -> None:
        """Begin a rendering: what was counted before is forgotten."""
        self._steps = 0

    def template(self, text: str) -> Template:
        """The template, compiled so that each loop and each joined text is counted."""
        tree = _Counting().visit(self.parse(text))
        return self.from_string(tree)

    def call(self, context: Context, callable: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._step()
        return super().call(context, callable, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= MAX_EXPONENT):
            raise UsageError(f"the chat template asks for the power {str(right)[:40]}, which no prompt needs.")
        if operator == "*":
            times = [v for v in (left, right) if isinstance(v, int)]
            texts = [v for v in (left, right) if isinstance(v, Sized)]
            _refuse_length(len(texts[0]) * times[0] if texts and times else 0)
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _refuse_length(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise UsageError(f"the chat template does not end within {MAX_STEPS} steps; take the publisher's own.")

    def _counted(self, items: Iterable[Any]) -> Iterable[Any]:
        # Texts, lists and mappings keep their length, which a template may ask its loop for.
        return _Counted(items, self) if isinstance(items, Sized) else self._count(items)

    def _count(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _bounded(self, value: Any) -> Any:
        _refuse_length(len(value) if isinstance(value, Sized) else 0)
        return value


class _Counted:
    """An iterable of known length whose items are counted as they are taken."""

    def __init__(self, items: Iterable[Any], sandbox: BoundedSandbox) -> None:
        self._items, self._sandbox = items, sandbox

    def __len__(self) -> int:
        return len(self._items) if isinstance(self._items, Sized) else 0

    def __iter__(self) -> Iterator[Any]:
        return self._sandbox._count(self._items)


class _Counting(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_bounded")


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _refuse_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise UsageError(f"the chat template builds a text of {length} characters, which no prompt has.")
