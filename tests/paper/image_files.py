"""Image files for tests, made on the spot."""

from __future__ import annotations

import base64
import struct
import zlib
from io import BytesIO
from typing import Any

from PIL import Image


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Colours that differ from pixel to pixel, the same for the same seed."""
    places = ((x, y, c) for y in range(height) for x in range(width) for c in range(3))
    values = bytes((x * 31 + y * 57 + c * 83 + seed * 101) % 256 for x, y, c in places)
    return Image.frombytes("RGB", (width, height), values)


def file_of(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    out = BytesIO()
    image.save(out, format=kind, **more)
    return out.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_uri(width: int, height: int, seed: int = 0) -> str:
    return data_uri(file_of(picture(width, height, seed)))


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header speaks of so many pixels, all of them there and black: a bomb."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header, rows = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0), zlib.compress(b"\0" * 64)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def animation() -> bytes:
    frames = [picture(9, 7, seed) for seed in range(3)]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
