"""Messages as bytes between the HTTP process and the engine process: length-prefixed MessagePack frames.

A frame is four bytes, the little-endian length of what follows, and one message. Paper.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 1 << 30  # more can only be damage: prompt log-probabilities of a million tokens are half of it
READ_BYTES = 1 << 18
HEADER_BYTES = 4

Message = TypeVar("Message")


class WireError(Exception):
    """What came is no message, or the other side ended in the middle of one. The connection is of no use any more."""


class Closed(Exception):
    """The other side has ended, between two messages."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """One frame. ``message``: a tagged struct, a LaunchSpec or what msgspec encodes."""
    body = _encoder.encode(message)
    assert len(body) <= MAX_FRAME_BYTES, f"a message of {len(body)} bytes does not fit a frame"
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class Frames(Generic[Message]):
    """Bytes in, messages out, whatever the pieces they come in. ``kind``: type or union of types of the messages."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Every message that is now complete, in order. Errors: WireError, naming what is wrong."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER_BYTES:
                length = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "little")
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame claims {length} bytes; at most {MAX_FRAME_BYTES} are possible")
                end = start + HEADER_BYTES + length
                if len(self._buffer) < end:
                    break
                body = bytes(memoryview(self._buffer)[start + HEADER_BYTES : end])
                start = end
                yield self._decode(body)
        finally:
            del self._buffer[:start]

    def end(self) -> None:
        """The other side has closed. WireError when it did so within a frame."""
        if self._buffer:
            raise WireError(f"the connection ended {len(self._buffer)} bytes into a frame")

    def _decode(self, body: bytes) -> Message:
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise WireError(f"a frame of {len(body)} bytes is no message: {error}") from None


class Channel(Generic[Message]):
    """The blocking end of the connection, as the engine process holds it. ``kind``: what is received."""

    def __init__(self, connection: socket.socket, kind: Any) -> None:
        self._connection = connection
        self._frames: Frames[Message] = Frames(kind)
        self._poll = select.poll()  # not select(), which knows the first 1024 file numbers only
        self._poll.register(connection, select.POLLIN)

    def watch(self, file_number: int) -> None:
        """``wait`` ends for this one too."""
        self._poll.register(file_number, select.POLLIN)

    def send(self, message: Any) -> None:
        """Waits while the other side does not read. Errors: Closed when it has ended."""
        try:
            self._connection.sendall(encode(message))
        except (BrokenPipeError, ConnectionResetError):
            raise Closed from None

    def wait(self, timeout: float | None) -> bool:
        """Block until something can be read, for ``timeout`` seconds at most. Returns whether it is something here."""
        ready = self._poll.poll(None if timeout is None else timeout * 1000)
        return any(number == self._connection.fileno() for number, _ in ready)

    def receive(self) -> list[Message]:
        """Every message that has arrived, without waiting. Errors: Closed, WireError."""
        messages: list[Message] = []
        while self.wait(0):
            data = self._read()
            if not data:
                self._frames.end()
                if messages:
                    return messages  # the end is met again at the next call
                raise Closed
            messages += self._frames.feed(data)
        return messages

    def _read(self) -> bytes:
        try:
            return self._connection.recv(READ_BYTES)
        except ConnectionResetError:
            return b""
