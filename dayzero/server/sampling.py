"""Request fields to SamplingParams: the request's value, else the publisher's default, else the API's.

What is used is shown: in the header ``x-dayzero-sampling``, in the log line, and the defaults in /v1/models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dayzero.chat.encoding import GrammarKind
from dayzero.engine.api import EngineInfo
from dayzero.engine.check import ParamError, check
from dayzero.engine.request import Grammar, SamplingParams
from dayzero.server.errors import ApiError, bad
from dayzero.server.protocol.shared import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, SamplingFields

# Defaults a checkpoint may state that are ours too, under the same name.
TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
SHOWN = (*TAKEN, "seed", "max_tokens", "min_tokens", "ignore_eos")
# Names of SamplingParams -> names of the request, where they differ.
FIELDS = {"include_stop": "include_stop_str_in_output", "grammar": "response_format"}


@dataclass(frozen=True)
class Defaults:
    """What a request that says nothing is sampled with. max_tokens: None is up to the context. unused: what
    generation_config.json says besides, and why it has no effect."""

    params: SamplingParams
    max_tokens: int | None
    unused: dict[str, str]

    def shown(self) -> dict[str, Any]:
        """For /v1/models."""
        values: dict[str, Any] = {name: getattr(self.params, name) for name in TAKEN}
        values["max_tokens"] = self.max_tokens
        if self.unused:
            values["unused"] = self.unused
        return values


def read_defaults(info: EngineInfo) -> Defaults:
    """The publisher's sampling defaults, each checked for itself: a bad one is shown as unused, not blamed on
    clients."""
    params, unused = SamplingParams(), {}
    max_tokens: int | None = None
    for name, value in info.defaults.items():
        if name in TAKEN:
            try:
                params = check(msgspec.structs.replace(params, **{name: value}), 1, info.max_model_len + 1, info.vocab)
            except ParamError as error:
                unused[name] = str(error)
        elif name in ("max_tokens", "max_new_tokens") and type(value) is int and value > 0:
            max_tokens = value
        elif name == "do_sample":
            if value is False and "temperature" not in info.defaults:
                params = msgspec.structs.replace(params, temperature=0.0)
        else:
            unused[name] = "this engine has no such option"
    return Defaults(msgspec.structs.replace(params, max_tokens=None), max_tokens, unused)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What stands under another name at each endpoint. max_tokens: None is up to the context."""

    model: str | None = None
    max_tokens: int | None = None
    n: int = 1
    stop: str | Sequence[str] | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None


def sampling_params(fields: SamplingFields, asked: Asked, defaults: Defaults) -> SamplingParams:
    """Not yet checked against a prompt; see ``checked``."""
    given = {name: getattr(fields, name) for name in TAKEN if getattr(fields, name) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    bias = {int(token): value for token, value in (fields.logit_bias or {}).items()}
    if len(bias) < len(fields.logit_bias or {}):
        raise bad("logit_bias names one token id in two ways, as 5 and 05; give each once.", "logit_bias")
    return msgspec.structs.replace(
        defaults.params,
        **given,
        seed=fields.seed,
        n=asked.n,
        max_tokens=asked.max_tokens,
        min_tokens=fields.min_tokens or 0,
        stop=stop,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        logit_bias=bias,
        logprobs=asked.logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        grammar=asked.grammar,
    )


def checked(
    params: SamplingParams, prompt: Sequence[int], info: EngineInfo, defaults: Defaults, field: str = "prompt"
) -> SamplingParams:
    """``params`` fit for a NewRequest with this prompt, which came in ``field``. ApiError 400 names the fault."""
    outside = next((token for token in prompt if not 0 <= token < info.vocab), None)
    if outside is not None:
        raise bad(f"the prompt holds the token id {outside}; this model's ids go from 0 to {info.vocab - 1}.", field)
    if params.max_tokens is None and defaults.max_tokens is not None:
        room = info.max_model_len - len(prompt)
        if room > 0:
            params = msgspec.structs.replace(params, max_tokens=max(min(defaults.max_tokens, room), params.min_tokens))
    try:
        return check(params, len(prompt), info.max_model_len, info.vocab)
    except ParamError as error:
        raise param_error(error, field) from None


def param_error(error: ParamError, prompt: str = "prompt") -> ApiError:
    """prompt: the field that the prompt came in."""
    too_long = error.field in ("prompt", "max_tokens") and "takes at most" in str(error)
    sentence = f"{str(error).removesuffix('.')}."
    names = FIELDS | {"prompt": prompt}
    return bad(sentence, names.get(error.field, error.field), "context_length_exceeded" if too_long else None)


def of_choice(params: SamplingParams, number: int) -> SamplingParams:
    """Of the n answers to one prompt, the params of ``number``: each has a seed of its own."""
    if params.seed is None or number == 0:
        return params
    seed = params.seed + number
    return msgspec.structs.replace(params, seed=seed if seed < 2**63 else seed - 2**64)


def shown(params: SamplingParams) -> dict[str, Any]:
    """The effective values, for header and log."""
    out = {name: value for name in SHOWN if (value := getattr(params, name)) is not None}
    if params.grammar is not None:
        out["grammar"] = params.grammar.kind
    return out


def header(params: SamplingParams) -> str:
    return " ".join(f"{name}={value}" for name, value in shown(params).items())


# --- grammars -----------------------------------------------------------------------------------------------------

Asks = tuple[GrammarKind, str, str]  # kind, text, the field it was asked in


def grammar_asked(fields: SamplingFields, response_format: ResponseFormat | None) -> Asks | None:
    """The one grammar a request asks for; ApiError 400 when it asks for several."""
    asked: list[Asks] = []
    if isinstance(response_format, JsonObjectFormat):
        asked.append(("json_object", "", "response_format"))
    elif isinstance(response_format, JsonSchemaFormat):
        asked.append(("json_schema", _json(response_format.json_schema.schema), "response_format"))
    guided = {
        "json": fields.guided_json, "regex": fields.guided_regex, "choice": fields.guided_choice,
        "grammar": fields.guided_grammar,
    }  # fmt: skip
    asked += [_guided(kind, value, f"guided_{kind}") for kind, value in guided.items() if value is not None]
    structured = fields.structured_outputs
    if structured is not None:
        values = {kind: getattr(structured, kind) for kind in guided}
        given = [(k, v) for k, v in values.items() if v is not None]
        asked += [_guided(kind, value, f"structured_outputs.{kind}") for kind, value in given]
        if structured.json_object:
            asked.append(("json_object", "", "structured_outputs.json_object"))
        if not given and structured.json_object is None:
            raise bad("structured_outputs names no json, regex, choice, grammar or json_object.", "structured_outputs")
    if len(asked) > 1:
        names = " and ".join(where for _, _, where in asked)
        raise bad(f"{names} both say what the answer must look like; give one of them.", asked[1][2])
    return asked[0] if asked else None


def _guided(kind: str, value: Any, where: str) -> Asks:
    if kind == "json":
        return "json_schema", _schema_text(value, where) if isinstance(value, str) else _json(value), where
    if not value or (kind == "choice" and not all(value)):
        raise bad(f"{where} is empty, or holds an empty text; say what the answer must look like.", where)
    if kind == "choice":
        return "choice", _json(value), where
    return "regex" if kind == "regex" else "lark", value, where


def _schema_text(text: str, where: str) -> str:
    """A schema that came as JSON within a text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad(f"{where} is not valid JSON: {str(error)[:200]}.", where) from None
    if not isinstance(value, dict | bool):
        raise bad(f"{where} is no JSON schema: it must be an object, true or false.", where)
    return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
