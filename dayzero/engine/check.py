"""Checks sampling parameters once, before a request enters the engine. Paper.

Nothing is ignored or clipped: a value that cannot hold is refused with one sentence that names the field.
"""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import msgspec

from dayzero.engine.request import Grammar, GrammarKind, SamplingParams
from dayzero.errors import FieldError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries
MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_GRAMMAR_CHARS = 1 << 20


class ParamError(FieldError):
    """A sampling parameter, or a prompt, that cannot be served. field: its name as in SamplingParams, or ``prompt``."""


def check(params: SamplingParams, prompt_len: int, max_model_len: int, vocab: int) -> SamplingParams:
    """``params`` with max_tokens filled in, fit for a NewRequest whose prompt has ``prompt_len`` tokens.

    max_model_len: longest prompt + answer in tokens. vocab: number of token ids. Raises ParamError.
    """
    _check_numbers(params)
    _check_logit_bias(params.logit_bias, vocab)
    _check_stops(params, vocab)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            _whole(name, value, 0, min(MAX_LOGPROBS, vocab))
    for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise ParamError(name, f"{name} is {getattr(params, name)!r}; it must be true or false")
    if params.grammar is not None:
        _check_grammar(params.grammar, vocab)
    max_tokens = _answer_tokens(params.max_tokens, prompt_len, max_model_len)
    _whole("min_tokens", params.min_tokens, 0)
    if params.min_tokens > max_tokens:
        given = "max_tokens" if params.max_tokens is not None else "what the context leaves for the answer"
        raise ParamError("min_tokens", f"min_tokens is {params.min_tokens}; that is more than {given} ({max_tokens})")
    top_k = 0 if params.top_k == -1 else params.top_k
    return msgspec.structs.replace(params, max_tokens=max_tokens, top_k=top_k)


def _answer_tokens(max_tokens: int | None, prompt_len: int, max_model_len: int) -> int:
    """Tokens the answer may have. Too long is an error that names both numbers."""
    if prompt_len < 1:
        raise ParamError("prompt", "the prompt is empty; it must have at least one token")
    if max_tokens is not None:
        _whole("max_tokens", max_tokens, 0)
    least = prompt_len + (1 if max_tokens is None else 0)  # an answer nobody limited must have room for one token
    if least > max_model_len:
        raise ParamError(
            "prompt",
            f"the prompt has {prompt_len} tokens; this model takes at most {max_model_len} tokens, prompt and answer "
            "together: shorten the prompt",
        )
    room = max_model_len - prompt_len
    if max_tokens is not None and max_tokens > room:
        raise ParamError(
            "max_tokens",
            f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens}, {prompt_len + max_tokens} together; "
            f"this model takes at most {max_model_len} tokens: shorten the prompt or ask for at most {room}",
        )
    return room if max_tokens is None else max_tokens


def _check_numbers(params: SamplingParams) -> None:
    _number("temperature", params.temperature, 0.0, 100.0)
    _number("top_p", params.top_p, 0.0, 1.0, above=True)
    _number("min_p", params.min_p, 0.0, 1.0)
    _number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _number("repetition_penalty", params.repetition_penalty, 0.0, 10.0, above=True)
    _whole("top_k", params.top_k, -1)
    _whole("n", params.n, 1, MAX_N)
    if params.seed is not None:
        _whole("seed", params.seed, -(2**63))


def _number(name: str, value: Any, low: float, high: float, above: bool = False, field: str = "") -> None:
    """A finite number in [low, high], or in (low, high] when ``above``. field: where it stands, if not ``name``."""
    if not _is_number(value) or not low <= value <= high or (above and value == low):
        lower = f"above {low:g} and at most" if above else f"from {low:g} to"
        raise ParamError(field or name, f"{name} is {_shown(value)}; it must be a number {lower} {high:g}")


def _is_number(value: Any) -> bool:
    """Whether it is a finite number; True and False are none, though Python counts with them."""
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _shown(value: Any) -> str:
    """``repr``, cut short; Python refuses to write out very long numbers at all."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"a number of {value.bit_length()} bits"
    return text if len(text := repr(value)) <= 80 else f"{text[:77]}..."


def _whole(name: str, value: Any, low: int, high: int = 2**63 - 1) -> None:
    if type(value) is not int or not low <= value <= high:
        limit = (
            f"from {low} to {high}" if high < 2**63 - 1 else f"of at least {low}" if low > -(2**63) else "of 64 bits"
        )
        raise ParamError(name, f"{name} is {_shown(value)}; it must be a whole number {limit}")


def _token_id(name: str, value: Any, vocab: int) -> None:
    if type(value) is not int or not 0 <= value < vocab:
        raise ParamError(name, f"{name} names the token id {_shown(value)}; this model's ids go from 0 to {vocab - 1}")


def _check_logit_bias(bias: Any, vocab: int) -> None:
    if not isinstance(bias, dict):
        raise ParamError("logit_bias", f"logit_bias is a {type(bias).__name__}; it must map token ids to numbers")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ParamError("logit_bias", f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are taken")
    for token, value in bias.items():
        _token_id("logit_bias", token, vocab)
        _number(f"logit_bias of token {token}", value, -100.0, 100.0, field="logit_bias")


def _check_stops(params: SamplingParams, vocab: int) -> None:
    stops: Any = params.stop
    if not isinstance(stops, tuple | list):
        raise ParamError("stop", f"stop is a {type(stops).__name__}; it must be a list of texts")
    if len(stops) > MAX_STOPS:
        raise ParamError("stop", f"stop has {len(stops)} texts; at most {MAX_STOPS} are taken")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ParamError("stop", f"stop holds {_shown(text)}; every stop must be a text of at least one character")
        if len(text) > MAX_STOP_CHARS:
            raise ParamError("stop", f"stop holds a text of {len(text)} characters; at most {MAX_STOP_CHARS} are taken")
    ids: Any = params.stop_token_ids
    if not isinstance(ids, tuple | list):
        raise ParamError("stop_token_ids", f"stop_token_ids is a {type(ids).__name__}; it must be a list of token ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ParamError("stop_token_ids", f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are taken")
    for token in ids:
        _token_id("stop_token_ids", token, vocab)


def _check_grammar(grammar: Grammar, vocab: int) -> None:
    """Kind and shape only; whether a schema or regex compiles is the grammar library's to say."""
    kind, text = grammar.kind, grammar.text
    if kind not in get_args(GrammarKind):
        raise ParamError(
            "grammar", f"grammar is of the kind {_shown(kind)}; the kinds are {', '.join(get_args(GrammarKind))}"
        )
    if not isinstance(text, str) or len(text) > MAX_GRAMMAR_CHARS:
        raise ParamError("grammar", f"grammar must be a text of at most {MAX_GRAMMAR_CHARS} characters")
    if kind != "json_object" and not text:
        raise ParamError("grammar", f"grammar of the kind {kind} is empty; say what the answer must look like")
    if kind in ("json_schema", "choice"):
        _check_json_grammar(kind, text)
    if grammar.after is not None:
        _token_id("grammar.after", grammar.after, vocab)


def _check_json_grammar(kind: str, text: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParamError("grammar", f"grammar of the kind {kind} is no JSON: {error}") from None
    if kind == "json_schema" and not isinstance(value, dict | bool):
        raise ParamError("grammar", f"grammar of the kind json_schema is a JSON {type(value).__name__}, no schema")
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise ParamError("grammar", "grammar of the kind choice must be a JSON list of non-empty texts")
