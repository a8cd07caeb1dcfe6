"""dayzero: from a freshly published checkpoint to an accepted inference service."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dayzero.engine.llm import LLM as LLM
    from dayzero.engine.request import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The offline API, loaded when it is first named: the command line must not wait for it."""
    if name == "LLM":
        from dayzero.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from dayzero.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
