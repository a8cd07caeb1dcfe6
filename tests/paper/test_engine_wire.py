"""Frames: whatever pieces they come in, and whatever is no frame, there is a message or one sentence, and no hang."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.engine.config import EngineConfig
from dayzero.engine.events import (
    Abort,
    Batch,
    Drain,
    Fatal,
    FromEngine,
    Logprobs,
    Output,
    Progress,
    Ready,
    Stop,
    Submit,
)  # fmt: skip
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.request import Grammar, NewRequest, SamplingParams
from dayzero.engine.wire import MAX_FRAME_BYTES, Channel, Closed, Frames, WireError, encode

TO_ENGINE: Any = LaunchSpec | Submit | Abort | Drain | Stop
SENT = [
    LaunchSpec(source="é/ü", config=EngineConfig(dtype="bfloat16", bindings=(("a@b", "c"),), pool_bytes=1 << 40)),
    Submit([NewRequest(id="a", prompt=[0, 2**31], params=SamplingParams(
        temperature=0.1, logit_bias={5: -100.0}, seed=-(2**63), stop=("x", "é"), grammar=Grammar(kind="regex", text="a")
    ), arrival=1.75e9, salt="s", leader="b")]),
    Abort([]), Abort(["a", "b"]), Drain(), Stop(),
]  # fmt: skip
HEARD = [
    Batch([Output(id="a", tokens=[1, 2], logprobs=[Logprobs(1, -0.5, 1, [(3, -1.0)])], finish="error",
                  error=("grammar", "why"), times={"arrival": 1.0})], Progress(state="ready", counters={"x": 1.0}), 7),
    Ready({"vocab": 5, "table": [["a", "b"]]}), Fatal(1, "no"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "messages"), [(TO_ENGINE, SENT), (FromEngine, HEARD)])
def test_messages_arrive_as_they_were_sent_in_pieces_of_any_size(kind: Any, messages: list[Any]) -> None:
    data = b"".join(map(encode, messages))
    for size in (1, 3, 4, 5, 7, 64, len(data)):
        frames: Frames[Any] = Frames(kind)
        found = [m for i in range(0, len(data), size) for m in frames.feed(data[i : i + size])]
        frames.end()
        assert found == messages


def test_an_end_within_a_frame_is_told() -> None:
    data = encode(SENT[1])
    for cut in (1, 3, 4, 5, len(data) - 1):
        frames: Frames[Any] = Frames(TO_ENGINE)
        assert list(frames.feed(data[:cut])) == []
        with pytest.raises(WireError, match=f"{cut} bytes into a frame"):
            frames.end()


def test_a_length_that_cannot_be_is_refused_before_anything_is_kept() -> None:
    frames: Frames[Any] = Frames(TO_ENGINE)
    with pytest.raises(WireError, match="claims"):
        list(frames.feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa4type\xa4Nope", b"\xff" * 99])
def test_a_body_that_is_no_message_is_refused(body: bytes) -> None:
    frames: Frames[Any] = Frames(TO_ENGINE)
    with pytest.raises(WireError, match="is no message") as said:
        list(frames.feed(len(body).to_bytes(4, "little") + body))
    assert "\n" not in str(said.value)


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(0, 2**32))
def test_random_bytes_give_messages_or_one_sentence(pieces: list[bytes], seed: int) -> None:
    rng = random.Random(seed)
    good = bytearray(b"".join(map(encode, SENT)))
    for _ in range(rng.randrange(4)):
        good[rng.randrange(len(good))] = rng.randrange(256)
    frames: Frames[Any] = Frames(TO_ENGINE)
    said = ""
    try:
        for piece in [bytes(good), *pieces]:
            for message in frames.feed(piece):
                assert isinstance(message, LaunchSpec | Submit | Abort | Drain | Stop)
        frames.end()
    except WireError as error:
        said = str(error) or "nothing"
    assert said != "nothing" and "\n" not in said


def test_a_channel_hears_everything_before_it_says_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel: Channel[Any] = Channel(ours, TO_ENGINE)
        assert channel.receive() == [] and not channel.wait(0)
        for message in SENT:
            theirs.sendall(encode(message))
        theirs.close()
        assert channel.receive() == SENT
        with pytest.raises(Closed):
            channel.receive()
        with pytest.raises(Closed):
            channel.send(Fatal(1, "x"))
