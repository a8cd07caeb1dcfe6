"""From a LaunchSpec to an engine loop, in whichever process it is to run. Paper, until an executor is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.chat.service import ChatService
from dayzero.chat.tiktoken_form import Vocabulary, is_known, read_vocabulary
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.seeded_source import SEEDED, SeededSource
from dayzero.checkpoint.source import Source, open_source
from dayzero.engine.grammar import Grammars
from dayzero.engine.launch import LaunchSpec, LoadedExecutor, LoadProgress
from dayzero.engine.loop import EngineLoop
from dayzero.engine.scheduler import Scheduler
from dayzero.models.recipe import RECIPE_ERRORS
from dayzero.models.registry import find
from dayzero.rehearse.stand_in import VOCABULARIES, stand_in_texts

Build = Callable[[LaunchSpec, LoadProgress], LoadedExecutor]

TOKENIZER, CONFIG = "tokenizer.json", "config.json"


def executor_of(launch: LaunchSpec, progress: LoadProgress) -> LoadedExecutor:
    """The executor that ``launch`` names, not loaded yet."""
    if launch.executor == "upstream":
        from dayzero.engine.upstream import UpstreamRunner

        return UpstreamRunner(launch, progress)
    if launch.source.startswith(SEEDED):
        from dayzero.engine.seeded_runner import SeededRunner

        return SeededRunner(launch, progress)
    from dayzero.engine.runner import LocalRunner

    return LocalRunner(launch, progress)


def engine_loop(launch: LaunchSpec, executor: LoadedExecutor, wake: Callable[[], None] = lambda: None) -> EngineLoop:
    """The loop over a loaded executor. wake: called from another thread when a grammar is compiled."""
    info, config = executor.info, launch.config
    if launch.executor == "upstream":  # each request has the library's own cache there; nothing is shared
        config = replace(config, prefix_cache=False)
    chosen = sorted(info.facts.get("bindings", {}).items())
    inputs = info.facts.get("expert_inputs"), info.facts.get("linear_inputs")
    decides = (info.source, info.family, info.dtype, chosen, inputs)
    scheduler = Scheduler(
        executor.layout,
        executor.num_slabs,
        config,
        info.stop_ids,
        info.max_model_len,
        fingerprint=repr(decides).encode(),
    )
    grammars = Grammars(tokenizer_json(launch.source, launch.recipe), info.vocab, info.stop_ids, wake)
    return EngineLoop(executor, scheduler, grammars, run_ahead=config.run_ahead, images=info.images)


def tokenizer_json(where: str, recipe: str | None = None) -> str | Vocabulary | None:
    """Text of the tokenizer.json of the checkpoint at ``where``, or what stands in its other form; None when it has
    neither."""
    source = _opened(where, recipe)
    if source.exists(TOKENIZER):
        return source.text(TOKENIZER)
    return read_vocabulary(source) if is_known(source) else None


def chat_service(
    where: str, recipe: str | None = None, *, upstream: bool = False, template: str | None = None
) -> ChatService:
    """The chat side of the checkpoint at ``where``. template: Jinja text in place of the checkpoint's. Errors: those of
    opening a checkpoint, and of its chat files.

    Its stop ids belong into the LaunchSpec: a chat format may end answers with more than the files state.
    """
    source = _opened(where, recipe)
    spec = None if upstream else _spec(source, recipe)
    return ChatService(source, family=None if spec is None else spec.family, template=template)


def _opened(where: str, recipe: str | None) -> Source:
    """The source; where weights are made and nothing lies beside the config, with a stand-in for its tokenizer."""
    source = open_source(where)
    if isinstance(source, SeededSource) and not any(source.exists(file) for file in VOCABULARIES):
        spec = _spec(source, recipe)
        if spec is not None:
            source.add(stand_in_texts(spec.family, spec.vocab, spec.stop_ids))
    return source


def _spec(source: Source, recipe: str | None) -> ModelSpec | None:
    """What the recipe makes of the model; None when there is none, or when it refuses the config: opening the model
    says that in full."""
    if not source.exists(CONFIG):
        return None
    config, _ = read_object(source, CONFIG)
    match = find(config, recipe)
    if match.recipe is None:
        return None
    try:
        return match.recipe.make_spec(Raw(config))
    except RECIPE_ERRORS:
        return None
