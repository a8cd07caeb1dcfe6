"""Options of every command that runs an engine: serve, chat, bench. And how they become a LaunchSpec."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.frame import (
    BindOption,
    CacheOption,
    ExpertInputsOption,
    LinearInputsOption,
    RecipeOption,
    SourceArgument,
)
from dayzero.errors import UsageError

if TYPE_CHECKING:
    from dayzero.chat.service import ChatService
    from dayzero.engine.launch import LaunchSpec

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?i?B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class EngineArguments:
    source: SourceArgument
    recipe: RecipeOption = None
    dtype: Annotated[str, typer.Option(metavar="auto|float32|bfloat16", help="Of weights and activations.")] = "auto"
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where the model runs.")] = "auto"
    max_model_len: Annotated[
        int | None, typer.Option(min=2, metavar="N", show_default="trained", help="Longest prompt + answer in tokens.")
    ] = None
    max_running: Annotated[int, typer.Option(min=1, metavar="N", help="Requests computed at once.")] = 64
    max_step_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Token budget of one step.")] = 512
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Most tokens of one request in a step.")
    ] = None
    max_waiting: Annotated[int, typer.Option(min=0, metavar="N", help="Requests that may wait; more are 429.")] = 1024
    page_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a cache page.")] = 64
    pool_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", show_default="half of what is free", help="Cache pool, e.g. 4GiB.")
    ] = None
    snapshot_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Distance between state snapshots of hybrid models.")
    ] = None
    no_prefix_cache: Annotated[bool, typer.Option("--no-prefix-cache", help="Reuse nothing between requests.")] = False
    image_cache_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Encoded images kept for later requests.")] = (
        "1GiB"
    )
    bindings: BindOption = None
    expert_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", show_default="all", help="For routed experts; the others are read when chosen."),
    ] = None
    expert_inputs: ExpertInputsOption = "bf16"
    linear_inputs: LinearInputsOption = "bf16"
    cache: CacheOption = "bf16"
    graphs: Annotated[
        str, typer.Option(metavar="auto|off", help="On a GPU: record steps of one token a row as CUDA graphs.")
    ] = "auto"
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE.jinja", help="Chat template in the place of the checkpoint's.")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, metavar="N", help="CPU threads of the operators.")] = None
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of requests that bring none.")] = 0
    upstream: Annotated[
        bool, typer.Option("--upstream", help="Run the publisher's code in transformers: no recipe, no paging.")
    ] = False
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="With --upstream: run Python code that the checkpoint ships.")
    ] = False
    check_engine: Annotated[
        bool, typer.Option("--check-engine", help="Check the engine's invariants at every step (slow).")
    ] = False


def chat_of(arguments: EngineArguments) -> ChatService:
    """Tokenizer and chat format of the source. Errors: those of opening a checkpoint, and of its chat files."""
    from dayzero.engine.build import chat_service

    recipe = None if arguments.recipe is None else str(arguments.recipe)
    template = None if arguments.chat_template is None else _text_of("--chat-template", arguments.chat_template)
    return chat_service(arguments.source, recipe, upstream=arguments.upstream, template=template)


def _text_of(option: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path} cannot be read as text: {error}.") from error


def launch_of(arguments: EngineArguments, stop_ids: Iterable[int] = ()) -> LaunchSpec:
    """The LaunchSpec of these options. stop_ids: of the chat format. UsageError for wrong values."""
    from dayzero.engine.config import EngineConfig
    from dayzero.engine.launch import LaunchSpec
    from dayzero.ops.bindings import parse_bindings

    if arguments.dtype not in ("auto", "float32", "bfloat16"):
        raise UsageError(f"--dtype {arguments.dtype}: give auto, float32 or bfloat16.")
    if arguments.upstream and arguments.device == "cuda":
        raise UsageError("--upstream runs on the CPU only; leave --device or --upstream out.")
    if arguments.allow_remote_code and not arguments.upstream:
        raise UsageError("--allow-remote-code runs code only with --upstream; a recipe never needs it.")
    if arguments.upstream and (arguments.expert_memory is not None or arguments.expert_inputs != "bf16"):
        raise UsageError("--expert-memory and --expert-inputs need a recipe; leave them or --upstream out.")
    if arguments.upstream and arguments.linear_inputs != "bf16":
        raise UsageError("--linear-inputs needs a recipe; leave it or --upstream out.")
    if arguments.graphs not in ("auto", "off"):
        raise UsageError(f"--graphs {arguments.graphs}: give auto or off.")
    if arguments.upstream and arguments.cache != "bf16":
        raise UsageError("--cache needs a recipe; leave it or --upstream out.")
    config = EngineConfig(
        max_running=arguments.max_running,
        max_step_tokens=max(arguments.max_step_tokens, arguments.max_running),
        chunk_tokens=arguments.chunk_tokens,
        max_model_len=arguments.max_model_len,
        page_tokens=arguments.page_tokens,
        pool_bytes=None if arguments.pool_bytes is None else size_of("--pool-bytes", arguments.pool_bytes),
        snapshot_tokens=arguments.snapshot_tokens,
        prefix_cache=not arguments.no_prefix_cache,
        image_cache_bytes=size_of("--image-cache-bytes", arguments.image_cache_bytes),
        max_waiting=arguments.max_waiting,
        dtype=arguments.dtype,  # type: ignore[arg-type]
        bindings=tuple(parse_bindings(arguments.bindings or ()).items()),
        expert_bytes=None if arguments.expert_memory is None else size_of("--expert-memory", arguments.expert_memory),
        expert_inputs=arguments.expert_inputs,  # type: ignore[arg-type]
        linear_inputs=arguments.linear_inputs,  # type: ignore[arg-type]
        cache=arguments.cache,
        seed=arguments.seed,
        graphs=arguments.graphs,  # type: ignore[arg-type]
        debug=arguments.check_engine,
    )
    return LaunchSpec(
        source=arguments.source,
        recipe=None if arguments.recipe is None else str(arguments.recipe),
        config=config,
        executor="upstream" if arguments.upstream else "local",
        remote_code=arguments.allow_remote_code,
        threads=arguments.threads,
        stop_ids=tuple(stop_ids),
        device=arguments.device,
    )


def size_of(option: str, text: str) -> int:
    """``4GiB``, ``512M``, ``1000000`` -> bytes; units are powers of 1024. UsageError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option} {text}: give a size such as 512MiB or 4GiB.")
    size = int(float(found["number"]) * 1024 ** _POWERS[found["unit"].upper().rstrip("B").rstrip("I")])
    if size < 1:
        raise UsageError(f"{option} {text}: a size must be above zero.")
    return size
