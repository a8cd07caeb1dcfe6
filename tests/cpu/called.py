"""Operators that note that they were called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dayzero.blocks.site import Bind, reference


def noting(called: list[str], unbound: str = "") -> Bind:
    """Binds references that note their contract in ``called``; the body of ``unbound`` itself, which notes nothing."""

    def bound(contract: str, site: str) -> Callable[..., Any]:
        body = reference(contract, site)

        def call(*args: Any, **options: Any) -> Any:
            called.append(contract)
            return body(*args, **options)

        return body if contract == unbound else call

    return bound
