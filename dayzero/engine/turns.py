"""What callers of ``LLM.chat`` hand over as messages, with their images read. Paper."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from PIL import Image, ImageOps

from dayzero.chat.conversation import ImagePart, Message, Part, Role, TextPart
from dayzero.chat.images import make_picture, read_picture
from dayzero.chat.media import Picture
from dayzero.engine.media import ImageInfo
from dayzero.errors import UsageError

ImageInput = str | Path | bytes | Image.Image  # a path or a data: URI, a file's bytes, an image that Pillow holds
Turn = Message | Mapping[str, Any]

_SHAPE = (
    "messages[{}] must have role and content: a text, or a list of texts and mappings with text or image; for more use "
    "chat's Message"
)


def turn_of(number: int, given: Turn, info: ImageInfo | None) -> Message:
    """A message, its images read. info: what the model takes. UsageError for another shape, for an image that cannot be
    used, and for any where the model takes none."""
    if isinstance(given, Message):
        return replace(given, parts=tuple(_whole(number, part, info) for part in given.parts))
    role, content = given.get("role"), given.get("content")
    if set(given) != {"role", "content"} or not isinstance(role, str):
        raise UsageError(_SHAPE.format(number))
    if isinstance(content, str):
        return Message.of(cast(Role, role), content)
    if not isinstance(content, Sequence):
        raise UsageError(_SHAPE.format(number))
    return Message(cast(Role, role), tuple(_part(number, item, info) for item in content))


def _whole(number: int, part: Part, info: ImageInfo | None) -> Part:
    if isinstance(part, ImagePart) and part.image is None:
        return _read(number, part.source, info)
    return part


def _part(number: int, item: Any, info: ImageInfo | None) -> Part:
    if isinstance(item, str):
        return TextPart(item)
    if isinstance(item, Mapping):
        inside = {key: value for key, value in item.items() if key != "type"}
        if set(inside) == {"text"} and isinstance(inside["text"], str):
            return TextPart(inside["text"])
        if set(inside) == {"image"}:
            return _read(number, inside["image"], info)
        url = inside.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        if set(inside) == {"image_url"} and isinstance(url, str):
            return _read(number, url, info)
    raise UsageError(_SHAPE.format(number))


def _read(number: int, given: Any, info: ImageInfo | None) -> ImagePart:
    if info is None:
        raise UsageError(f"messages[{number}] holds an image, but this model takes none")
    return ImagePart("", image=_picture(number, given, info))


def _picture(number: int, given: Any, info: ImageInfo) -> Picture:
    if isinstance(given, Image.Image):
        return make_picture(ImageOps.exif_transpose(given), info.rule)
    if isinstance(given, bytes):
        return read_picture(given, info.rule)
    if isinstance(given, str) and given.startswith("data:"):
        try:
            return read_picture(base64.b64decode(given.partition(",")[2], validate=True), info.rule)
        except binascii.Error as error:
            raise UsageError(f"messages[{number}]: an image's data: URI holds no valid base64") from error
    if isinstance(given, str | Path):
        try:
            return read_picture(Path(given).read_bytes(), info.rule)
        except OSError as error:
            raise UsageError(f"messages[{number}]: the image {given} cannot be read: {error.strerror}") from error
    raise UsageError(f"messages[{number}]: an image is a path, bytes or a Pillow image, not {type(given).__name__}")
