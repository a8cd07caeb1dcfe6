"""What a request asks for, as it crosses from the HTTP process to the engine's. Paper: no torch.

These are msgspec structs because they are sent as bytes; nothing is done to them after they are made.
"""

from __future__ import annotations

from typing import Literal

import msgspec

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the output must look like. text: the schema as JSON, the regex, the choices as a JSON list, or Lark text.

    after: the grammar begins only behind this token id (the end of a reasoning part); None: at the first token.
    """

    kind: GrammarKind
    text: str = ""
    after: int | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one answer is sampled. Every value has been checked by ``check`` before it comes to the engine.

    temperature: 0 is greedy. top_k: 0 is off. top_p, min_p: shares of probability. Penalties as OpenAI's (presence,
    frequency: over generated tokens) and CTRL's (repetition: prompt and generated). logit_bias: token id -> addend.
    seed: None draws one. stop: texts that end the answer and are not part of it. min_tokens: no stop token among so
    many first tokens, and no stop text that one of them completes. max_tokens: None is up to the
    context. logprobs, prompt_logprobs: number of alternatives to report (0: the chosen token's own only); None: none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image in a prompt, over ``rows`` x ``columns`` placeholders from token ``first`` on. pixels: uint8 RGB, row by
    row, as the tower sees them. key: hash of the pixels and their shape; equal keys mean equal images."""

    key: bytes
    first: int
    rows: int
    columns: int
    pixels: bytes

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class NewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to be continued (an ``n`` of several is sent as several of these).

    prompt: token ids, at least one. priority: lower goes first. arrival: seconds since the epoch. salt: sequences with
    different salts never share cache. leader: id of a request with the same prompt whose prompt should be computed
    first, so that this one finds it in the cache. media: the prompt's images, in order.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    arrival: float = 0.0
    salt: str | None = None
    leader: str | None = None
    media: list[Image] = []


FinishReason = Literal["stop", "length", "abort", "error"]
