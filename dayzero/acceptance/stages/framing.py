"""Streams as they stand on the wire: framing, ids, roles, ends, usage, and that they come piece by piece."""

from __future__ import annotations

from typing import Any

from dayzero.acceptance.accept.http import Answer, events_of
from dayzero.acceptance.stages.answers import PATHS, Api, Refused, at, streamed
from dayzero.acceptance.stages.asking import Ask, Check, Checks

OBJECTS = {"chat": "chat.completion.chunk", "completions": "text_completion"}
DRAWN = ("id", "created")  # differ from run to run
NUM_TOKENS, NUM_STREAMED = 12, 64
CHUNK = "Build each chunk from the request's id, model and time; say the role first, and the end once."
# A stream that was held back comes in one instant; one that is not takes about as long as its tokens take.
HELD_SHARE = 0.1
LEAST_SECONDS = 0.05
LEAST_STREAMED = 4  # tokens of an answer that there is something to send of
# Of a stream, since a busy machine brings pieces together too; those that must have told something to fail it.
TRIES, LEAST_TOLD = 3, 2


def checks() -> tuple[Check, ...]:
    return tuple(
        Check(f"stream.{api}", f"streams of {api} are well formed", _of(api), apis=(api,)) for api in PATHS
    ) + (Check("stream.flushed", "a stream comes as it is made", _flushed),)  # fmt: skip


def _of(api: Api) -> Any:
    def run(ask: Ask, out: Checks) -> None:
        fields = {"temperature": 0, "max_tokens": NUM_TOKENS, "stream": True}
        answer = ask.post(api, "Count to ten.", **fields, stream_options={"include_usage": True})
        if not answer.ok:
            raise Refused(answer)
        _framing(out, api, answer)
        _chunks(out, api, answer.chunks)
        _usage(ask, out, api, answer.chunks, ask.post(api, "Count to ten.", **fields))

    return run


def _framing(out: Checks, api: str, answer: Answer) -> None:
    kind = answer.headers.get("content-type", "")
    out.judge(f"stream.type-{api}", f"a stream says that it is one ({api})", kind.startswith("text/event-stream"),
              kind, "text/event-stream", remedy="Set the Content-Type.")  # fmt: skip
    faults = []
    if answer.body.startswith(b"\xef\xbb\xbf"):
        faults.append("it begins with a byte order mark")
    if not answer.body.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
        faults.append("the last event is not ended by an empty line")
    for line in answer.body.replace(b"\r\n", b"\n").split(b"\n"):
        if line and not line.startswith((b"data:", b"event:", b"id:", b"retry:", b":")):
            faults.append(f"a line that is no field: {line[:40]!r}")
            break
    bad = [event.data[:40] for event in answer.events if not event.done and not isinstance(event.json, dict)]
    faults += [f"an event that is no JSON object in UTF-8: {bad[0]!r}"] if bad else []
    out.judge(
        f"stream.framing-{api}", f"server-sent events are framed as they must be ({api})", not faults, faults,
        "data: lines of JSON, empty lines between", remedy="Frame each event as data: JSON and an empty line.",
    )  # fmt: skip
    done = [number for number, event in enumerate(answer.events) if event.done]
    last = len(answer.events) - 1
    out.judge(
        f"stream.done-{api}", f"a stream ends with [DONE], once ({api})", done == [last],
        f"[DONE] at {done} of {last + 1} events", "once, last", remedy="Send data: [DONE] behind everything.",
    )  # fmt: skip


def _chunks(out: Checks, api: str, chunks: list[dict[str, Any]]) -> None:
    for name in ("id", "created", "model", "object"):
        values = list(dict.fromkeys(str(chunk.get(name)) for chunk in chunks))
        right = len(values) == 1 and values[0] not in ("None", "")
        right &= name != "object" or values == [OBJECTS[api]]
        out.judge(
            f"stream.{name}-{api}", f"all chunks of a stream have the same {name} ({api})", right,
            f"{len(values)} value" if right and name in DRAWN else values[:3],
            OBJECTS[api] if name == "object" else "one value", remedy=CHUNK,
        )  # fmt: skip
    parts = [part for chunk in chunks for part in at(chunk, "choices", kind=list)]
    ends = [part.get("finish_reason") for part in parts]
    given = [number for number, end in enumerate(ends) if end]
    late = [part for part in parts[given[0] + 1 :] if _carries(part)] if given else []
    out.judge(
        f"stream.finish-{api}", f"finish_reason comes once, and nothing of the answer behind it ({api})",
        len(given) == 1 and not late, f"{[ends[number] for number in given]}, {len(late)} pieces behind it",
        "one, last", remedy=CHUNK,
    )  # fmt: skip
    if api == "chat":
        roles = [(part.get("delta") or {}).get("role") for part in parts]
        out.judge(
            "stream.role", "the first delta says the role", bool(roles) and roles[0] == "assistant",
            roles[:3], "assistant first", remedy=CHUNK,
        )  # fmt: skip


def _carries(part: dict[str, Any]) -> bool:
    delta = part.get("delta") or {}
    return bool(part.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")))


def _usage(ask: Ask, out: Checks, api: str, chunks: list[dict[str, Any]], without: Answer) -> None:
    told = [number for number, chunk in enumerate(chunks) if chunk.get("usage")]
    last = chunks[-1] if chunks else {}
    out.judge(
        f"stream.usage-{api}", f"include_usage gives one last chunk without choices ({api})",
        told == [len(chunks) - 1] and last.get("choices") == [], f"usage in chunks {told} of {len(chunks)}",
        "the last one alone, choices []", remedy="Send the usage once, behind the last choice, with choices [].",
    )  # fmt: skip
    unasked = [chunk for chunk in without.chunks if chunk.get("usage")]
    out.judge(
        f"stream.unasked-{api}", f"without include_usage no chunk tells any ({api})", not unasked,
        f"{len(unasked)} chunks", 0, bad="fail" if ask.ours else "note",
        remedy="Leave usage out unless it is asked for.",
    )  # fmt: skip


def _flushed(ask: Ask, out: Checks) -> None:
    """A proxy, or a middleware, that collects a stream makes every answer late, and nothing else shows it. What counts
    is when the text came: a server may well send its first chunk, which says the role, at once. It is held against the
    time that the tokens behind the first take: all of it less that of an answer of one token, which is mostly the
    prompt's."""
    ignore = {"ignore_eos": True} if ask.ignores_stops else {}
    fields = {"temperature": 0, **ignore}
    api, claim = ask.api or "chat", "a stream comes as it is made, not at its end"
    stream = {"max_tokens": NUM_STREAMED, "stream": True, "stream_options": {"include_usage": True}}
    good, told, said = False, 0, ""
    for _ in range(TRIES):
        answer = ask.post(api, "Count to a hundred.", **fields, **stream)
        first = ask.post(api, "Count to a hundred.", **fields, max_tokens=1)
        if not answer.ok or not first.ok:
            raise Refused(answer if not answer.ok else first)
        usage, times = streamed(answer, api).usage, times_of(answer)
        made = len(times) if usage is None else usage.completion
        spread, whole = times[-1] - times[0] if times else 0.0, answer.seconds - first.seconds
        said = f"{made} tokens in {len(times)} pieces over {spread:.3f} s of {whole:.3f} s behind the first token"
        tells = whole >= LEAST_SECONDS and made >= LEAST_STREAMED
        told += tells
        good = tells and len(times) > 1 and spread > HELD_SHARE * whole
        if good:
            break
    if not good and told < LEAST_TOLD:
        out.skip("stream.flushed", claim, f"too quick to tell: {said}")
        return
    out.judge(
        "stream.flushed", claim, good, said,
        f"two pieces or more, over more than {HELD_SHARE:.0%} of that time, at one of {TRIES} tries",
        remedy="Send each chunk at once: no buffering on the way.",
    )  # fmt: skip


def times_of(answer: Answer) -> list[float]:
    """When each event that carries something of the answer had come, in seconds."""
    times: list[float] = []
    for size, seconds in answer.arrivals:
        chunks = [event.json for event in events_of(answer.body[:size]) if isinstance(event.json, dict)]
        come = sum(any(_carries(part) for part in chunk.get("choices") or []) for chunk in chunks)
        times += [seconds] * (come - len(times))
    return times
