"""/tokenize, /detokenize and /tokenizer_info: ids exactly as the model reads them."""

from __future__ import annotations

from msgspec import UNSET
from starlette.responses import Response

from dayzero.server.conversations import from_chat
from dayzero.server.endpoint import Call, json_response
from dayzero.server.errors import bad
from dayzero.server.jobs import need_tokenizer, off_loop, render
from dayzero.server.protocol.tokenize import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)


async def tokenize(call: Call) -> Response:
    body: TokenizeRequest = call.body
    call.state.check_model(body.model)
    max_model_len = call.state.known().max_model_len
    if (body.prompt is None) == (body.messages is None):
        raise bad("give either prompt or messages.", "prompt")
    tokenizer = need_tokenizer(call.state, "prompt")
    shown: str | None = None
    if body.prompt is not None:
        text, begin = body.prompt, body.add_special_tokens is not False
        ids = await off_loop(call, lambda: tokenizer.encode(text, special=True, begin=begin))
    else:
        if body.add_special_tokens:
            call.ignore("add_special_tokens")
        prompt = await render(call, from_chat(call, body))
        ids, shown = prompt.ids, prompt.text
    return json_response(
        TokenizeAnswer(
            count=len(ids),
            max_model_len=max_model_len,
            tokens=ids,
            token_strs=[tokenizer.text_of(token) for token in ids] if body.return_token_strs else None,
            prompt=UNSET if shown is None else shown,
        )
    )


async def detokenize(call: Call) -> Response:
    body: DetokenizeRequest = call.body
    call.state.check_model(body.model)
    tokenizer = need_tokenizer(call.state, "tokens")
    vocab = max(tokenizer.vocab_size, call.state.known().vocab)
    outside = next((token for token in body.tokens if token >= vocab), None)
    if outside is not None:
        raise bad(f"tokens holds the id {outside}; this model's ids go from 0 to {vocab - 1}.", "tokens")
    skip = body.skip_special_tokens is True
    text = await off_loop(call, lambda: tokenizer.decode(body.tokens, skip_special=skip))
    return json_response(DetokenizeAnswer(prompt=text))


async def tokenizer_info(call: Call) -> Response:
    tokenizer = need_tokenizer(call.state, "model")
    chat = call.state.chat
    return json_response(
        TokenizerInfo(
            vocab_size=tokenizer.vocab_size,
            max_model_len=call.state.known().max_model_len,
            special_tokens={str(token): tokenizer.text_of(token) for token in sorted(tokenizer.special_ids)},
            encoding=chat.encoding.name if chat is not None and chat.encoding is not None else None,
        )
    )
