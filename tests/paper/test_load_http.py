"""The load client against our own app over a scripted engine, and against servers that behave badly."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dayzero.acceptance.load.drive import run_level
from dayzero.acceptance.load.outcome import Outcome
from dayzero.acceptance.load.streamed import Body, HttpDriver, Reader
from dayzero.acceptance.load.target import check_loopback, look
from dayzero.acceptance.load.wire import Address, Pool
from dayzero.acceptance.load.workload import Level, LoadRequest
from dayzero.errors import UsageError
from tests.paper.server_support import SPECIALS, VOCAB, ScriptedEngine, World, make, serving

BODY = Body("completions", "tiny", token_ids=True)


def run(work: Awaitable[Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(limited())


def ask(url: str, requests: list[LoadRequest], body: Body = BODY, timeout: float = 10, level: int = 2) -> list[Outcome]:
    async def work() -> list[Outcome]:
        driver = HttpDriver(Pool(Address.parse(url)), body, timeout)
        try:
            return (await run_level(driver, Level(concurrency=level), requests)).outcomes
        finally:
            await driver.close()

    return run(work())  # type: ignore[no-any-return]


def asked(num_prompt: int = 5, num_output: int = 4, count: int = 1) -> list[LoadRequest]:
    return [LoadRequest(list(range(1, num_prompt + 1)), num_prompt, num_output) for _ in range(count)]


def world(**more: Any) -> World:
    return make(ScriptedEngine(reply=lambda request: [65 + n % 26 for n in range(2000)], **more))


# --- our own server


def test_times_and_counts_of_answers() -> None:
    served = world(delay=0.01)
    with serving(served) as url:
        found = ask(url, asked(7, 6, count=5))
    assert len(served.engine.seen) == 5
    for request in served.engine.seen:
        assert (len(request.prompt), request.params.max_tokens) == (7, 6)
        assert request.params.ignore_eos and request.params.temperature == 0
    for out in found:
        assert out.error is None
        assert (out.prompt_tokens, out.output_tokens, out.token_ids, out.cached_tokens) == (7, 6, 6, 3)
        assert len(out.times) == 6 and out.times == sorted(out.times)
        assert out.sent < out.times[0] and out.times[-1] <= out.ended
        assert out.ttft >= 0.01 and all(gap > 0.004 for gap in out.gaps)


def test_tokens_without_text_are_seen() -> None:
    """Half a character is no text; its chunk is a token all the same."""
    served = make(ScriptedEngine(reply=lambda request: [0xE2, 0x82, 0xAC] * 9))
    with serving(served) as url:
        (out,) = ask(url, asked(3, 6))
    assert out.error is None and len(out.times) == 6


def test_an_answer_of_other_length_is_an_error() -> None:
    served = make(ScriptedEngine(reply=lambda request: [65, 66]))  # ends by itself: two tokens and the stop token
    with serving(served) as url:
        (out,) = ask(url, asked(5, 9))
    assert out.error is not None and out.error[0] == "tokens"
    assert "3 answer tokens instead of 9" in out.error[1]


def test_a_prompt_of_other_length_is_an_error() -> None:
    with serving(world()) as url:
        (out,) = ask(url, [LoadRequest([1, 2, 3], 4, 2)])
    assert out.error is not None and "3 prompt tokens instead of 4" in out.error[1]


def test_chat_is_measured_too() -> None:
    with serving(world()) as url:
        (out,) = ask(url, [LoadRequest("hello", None, 5)], Body("chat", "tiny", token_ids=True))
    assert out.error is None and out.output_tokens == 5 and len(out.times) == 5


@pytest.mark.parametrize(
    ("engine", "kind", "said"),
    [
        ({"overloaded": True}, "http 429", "many requests"),
        ({"state": "dead"}, "http 503", ""),
        ({"dies_after": 2}, "stream", "ended"),
    ],
)
def test_errors_of_the_server_are_outcomes(engine: dict[str, Any], kind: str, said: str) -> None:
    with serving(world(**engine)) as url:
        (out,) = ask(url, asked())
    assert out.error is not None and out.error[0] == kind
    assert said in out.error[1]


def test_a_request_the_server_refuses() -> None:
    with serving(world()) as url:
        (out,) = ask(url, asked(VOCAB, 4))
    assert out.error is not None and out.error[0] == "refused" and "token id 263" in out.error[1]


def test_a_silent_server_is_a_timeout() -> None:
    with serving(world(delay=5.0)) as url:
        began = time.monotonic()
        (out,) = ask(url, asked(), timeout=0.3)
    assert out.error is not None and out.error[0] == "timeout" and time.monotonic() - began < 4


def test_what_a_server_says_of_itself() -> None:
    with serving(world()) as url:
        found = run(look(Pool(Address.parse(url))))
    assert (found.model, found.own) == ("tiny", True)
    assert found.vocab == VOCAB and len(found.special) == 3 and len(SPECIALS) == 7


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Answers take 0.3 s, requests come every 20 ms: a closed loop would need 3 s."""
    requests = [LoadRequest([1, 2], 2, 1, at=0.02 * n) for n in range(10)]
    with serving(world(delay=0.3)) as url:

        async def work() -> Any:
            driver = HttpDriver(Pool(Address.parse(url)), BODY, 10)
            done = await run_level(driver, Level(rate=50.0), requests)
            await driver.close()
            return done

        done = run(work())
    assert [out.error for out in done.outcomes] == [None] * 10
    assert done.seconds < 2
    begun = sorted(out.sent for out in done.outcomes)
    assert begun[-1] - begun[0] == pytest.approx(0.18, abs=1e-6)  # due times, not when the client got to it


# --- servers that behave badly


def event(text: str = "x", **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}], **more}).encode() + b"\n\n"


USAGE = event(usage={"prompt_tokens": 5, "completion_tokens": 4}) + b"data: [DONE]\n\n"
EVENTS = event() * 3 + USAGE
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def whole(body: bytes, head: bytes = HEAD) -> bytes:
    return head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return (
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts)
        + b"0\r\n\r\n"
    )


@asynccontextmanager
async def answering(
    answer: Callable[[int, int, asyncio.StreamWriter], Awaitable[bool]],
) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that reads requests and calls answer(connection number, request number on it, writer), which says
    whether the connection stays open. Yields its address and the number of requests of each connection."""
    seen: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = len(seen)
        seen.append(0)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")
                )
                await reader.readexactly(length)
                seen[mine] += 1
                if not await answer(mine, seen[mine], writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


def bad(
    answer: Callable[[int, int, asyncio.StreamWriter], Awaitable[bool]], count: int = 1, level: int = 1
) -> tuple[list[Outcome], list[int]]:
    async def work() -> tuple[list[Outcome], list[int]]:
        async with answering(answer) as (url, seen):
            driver = HttpDriver(Pool(Address.parse(url)), Body("completions", "m", token_ids=False), 5)
            done = await run_level(driver, Level(concurrency=level), asked(count=count))
            await driver.close()
            return done.outcomes, seen

    return run(work())  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_events_cut_anywhere_are_whole(size: int) -> None:
    async def answer(number: int, nth: int, writer: asyncio.StreamWriter) -> bool:
        data = chunked(EVENTS, size)
        for i in range(0, len(data), 100):
            writer.write(data[i : i + 100])
            await writer.drain()
        return True

    found, seen = bad(answer, count=3)
    assert [out.error for out in found] == [None] * 3
    assert [len(out.times) for out in found] == [4] * 3
    assert seen == [3]  # one connection, kept


def test_line_ends_of_other_servers_and_comments() -> None:
    body = b": ping\r\n\r\n" + EVENTS.replace(b"\n", b"\r\n").replace(b"data: ", b"data:")

    async def answer(number: int, nth: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(whole(body))
        return True

    (out,), _ = bad(answer)
    assert out.error is None and len(out.times) == 4


def test_a_body_that_ends_with_its_connection() -> None:
    async def answer(number: int, nth: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(HEAD + b"\r\n" + EVENTS)
        return False

    found, seen = bad(answer, count=2)
    assert [out.error for out in found] == [None, None] and seen == [1, 1]


def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    """It says keep-alive and closes behind each second request without answering it."""

    async def answer(number: int, nth: int, writer: asyncio.StreamWriter) -> bool:
        if nth == 2:
            return False
        writer.write(whole(EVENTS))
        return True

    found, seen = bad(answer, count=6, level=2)
    assert [out.error for out in found] == [None] * 6
    assert max(seen) == 2 and len(seen) >= 4


def test_connection_close_is_heeded() -> None:
    async def answer(number: int, nth: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(whole(EVENTS, HEAD + b"Connection: close\r\n"))
        return False

    found, seen = bad(answer, count=3)
    assert [out.error for out in found] == [None] * 3 and seen == [1, 1, 1]


def test_a_new_connection_that_gives_nothing_is_not_tried_for_ever() -> None:
    async def answer(number: int, nth: int, writer: asyncio.StreamWriter) -> bool:
        return False

    (out,), seen = bad(answer)
    assert out.error is not None and out.error[0] == "connection" and seen == [1]


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (chunked(EVENTS, 50)[:-40], "connection", "closed the connection"),
        (whole(event() * 4), "stream", "without [DONE]"),
        (whole(b"data: {nothing}\n\n"), "stream", "no JSON"),
        (whole(event() * 4 + b"data: [DONE]\n\n"), "tokens", "no count of answer tokens"),
        (whole(USAGE.replace(b'"x"', b'""')), "tokens", "no chunk that carried"),
        (whole(event(error={"message": "boom"}) + USAGE), "stream", "boom"),
        (b"SSH-2.0-no http\r\n\r\n", "connection", "no HTTP"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noops", "http 500", "oops"),
        (b"HTTP/1.1 404 No\r\nContent-Length: 24\r\n\r\n" + b'{"error": {"message":"m"', "refused", "error"),
    ],
)
def test_what_goes_wrong_is_said(data: bytes, kind: str, said: str) -> None:
    async def answer(number: int, nth: int, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        return False

    (out,), _ = bad(answer)
    assert out.error is not None and out.error[0] == kind, out.error
    assert said in out.error[1]


def test_a_chunk_costs_little() -> None:
    """The client shares the machine with the server. CPU time of the best of five runs, so that a busy machine does
    not fail it; 20 us a chunk are 0.4 % of a core at 200 tokens a second."""
    count = 2000
    data = b"data: " + json.dumps(
        {"id": "cmpl-0123456789abcdef", "created": 1, "model": "m" * 20, "object": "text_completion",
         "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "token_ids": [1234]}],
         "usage": None}
    ).encode() + b"\n\n"  # fmt: skip
    best = min(_cpu(data, count) for _ in range(5))
    assert best / count < 20e-6


def _cpu(data: bytes, count: int) -> float:
    out = Outcome(asked()[0], 0.0)
    reader = Reader(out)
    began = time.process_time()
    for _ in range(count):
        reader.feed(200, data, 0.0)
    spent = time.process_time() - began
    assert len(out.times) == count and out.token_ids == count
    return spent


# --- addresses


def test_addresses() -> None:
    assert Address.parse("http://localhost:8000/v1/") == Address("localhost", 8000, False, "")
    assert Address.parse("https://host/a/v1").text == "https://host:443/a"
    assert Address.parse("http://[::1]:80").text == "http://[::1]:80"
    for url in ("http://", "ftp://x", "http://x:99999", "http://x?y=1"):
        with pytest.raises(UsageError):
            Address.parse(url)


def test_only_this_machine_unless_told() -> None:
    for url in ("http://127.0.0.1:8000", "http://127.9.9.9", "http://localhost:1", "http://[::1]:2"):
        check_loopback(Address.parse(url))
    for url in ("http://10.0.0.1", "http://0.0.0.0:8000", "http://192.168.1.9:1"):
        with pytest.raises(UsageError, match="--allow-remote"):
            check_loopback(Address.parse(url))
