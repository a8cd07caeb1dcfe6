"""One streamed greedy answer on this machine's CPU: what the demo ends with."""

from __future__ import annotations

from collections.abc import Iterator

from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.source import Source
from dayzero.errors import ConfigError, UsageError
from dayzero.ops.catalog import CATALOG, Catalog, lacking

FAST_ON_CPU = "torch_cpu"


def fast_bindings(spec: ModelSpec, catalog: Catalog = CATALOG) -> dict[str, str]:
    """``contract@site`` -> variant: plain library kernels at every site that they fit, the reference elsewhere.

    Reference bodies are exact and slow; for an answer a person waits for, the library's do.
    """
    fast = {line.contract: line for line in catalog.lines.values() if line.variant == FAST_ON_CPU}
    return {
        f"{use.contract}@{use.site}": FAST_ON_CPU
        for use in spec.contracts()
        if use.contract in fast and not lacking(fast[use.contract], dict(use.traits))
    }


def stream_answer(
    where: str, prompt: str, *, num_tokens: int, recipe: str | None = None, catalog: Catalog = CATALOG
) -> Iterator[str]:
    """Pieces of text as they are decoded. Greedy, until a stop id or ``num_tokens``.

    catalog: the operators there are, those of installed packages included. UsageError when the folder has no
    tokenizer.json. The template renders the prompt as one user message; without a
    template the prompt is continued as it is.
    """
    import torch
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    from dayzero.blocks.generate import greedy
    from dayzero.blocks.local_cache import LocalCache
    from dayzero.blocks.open import open_model
    from dayzero.blocks.site import binder
    from dayzero.blocks.stack import Stack
    from dayzero.chat.template import read_template, render, special_tokens

    model = open_model(where, recipe=recipe, dtype=torch.float32)
    if not model.source.exists("tokenizer.json"):
        raise UsageError(f"{where} has no tokenizer.json, so no text can be answered; align works with token ids.")
    tokenizer = Tokenizer.from_str(model.source.text("tokenizer.json"))
    template = read_template(model.source)
    text = prompt
    if template is not None:
        message = {"role": "user", "content": prompt}
        text = render(template, [message], special_tokens(model.source))
    ids = tokenizer.encode(text, add_special_tokens=template is None).ids
    stack = Stack(model.spec, model.loader.load, bind=binder(fast_bindings(model.spec, catalog), catalog))
    decoder = DecodeStream(skip_special_tokens=True)
    stops = set(model.spec.stop_ids) | set(_generation_stops(model.source))
    for token in greedy(stack, LocalCache(model.spec, torch.float32), ids, num_tokens, stops):
        piece = decoder.step(tokenizer, token)
        if piece:
            yield piece


def _generation_stops(source: Source) -> list[int]:
    """eos_token_id of generation_config.json, one or several. ConfigError when it is neither."""
    file = "generation_config.json"
    if not source.exists(file):
        return []
    found = read_object(source, file, sizes=False)[0].get("eos_token_id")
    stops = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(i) is int and i >= 0 for i in stops):
        raise ConfigError(f"{file} of {source.name}: eos_token_id must be one or several ids, but is {found!r}.")
    return stops
