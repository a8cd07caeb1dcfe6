"""Images of a request: fetched, decoded and made ready, or refused with the field they stand in."""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import replace

from dayzero.chat.conversation import Conversation, ImagePart, Message
from dayzero.chat.images import read_picture
from dayzero.chat.media import Picture
from dayzero.engine.media import ImageInfo
from dayzero.errors import UsageError
from dayzero.server.config import ServerConfig
from dayzero.server.endpoint import Call
from dayzero.server.errors import bad
from dayzero.server.fetch import FetchRules, fetch

NO_IMAGES = "this model takes no images."
# What a client may say of the resolution; here the model's own processor decides it.
DETAIL = {
    "/v1/chat/completions": "messages[].content[].image_url.detail", "/v1/responses": "input[].content[].detail",
}  # fmt: skip
MAX_PIXEL_BYTES = 512 << 20  # of all images of a request as the engine is sent them


def pictures_of(conversation: Conversation) -> list[Picture]:
    """Those that were read, in the order of the prompt."""
    found = [part.image for message in conversation.messages for part in message.images]
    return [picture for picture in found if picture is not None]


async def with_pictures(call: Call, conversation: Conversation) -> Conversation:
    """The conversation with every image read; itself when there is none.

    ApiError 400 with the field at fault: too many or too large images, an address that is not allowed, what is no
    still image, a model without a tower. Files are fetched and decoded on threads, one after another.
    """
    count = sum(len(message.images) for message in conversation.messages)
    if not count:
        return conversation
    config, turns = call.state.config, call.route.turns
    if count > config.max_images:
        raise bad(f"the request has {count} images; at most {config.max_images} are taken.", turns)
    messages, room = [], MAX_PIXEL_BYTES
    for number, message in enumerate(conversation.messages):
        field = f"{turns}[{number}].content" if turns == "messages" and call.route.style == "openai" else turns
        if message.images:
            message, room = await _read(call, message, field, room)
        messages.append(message)
    call.record["images"] = count
    if any(image.detail != "auto" for message in conversation.messages for image in message.images):
        call.ignore(DETAIL.get(call.route.path, "detail"))
    return replace(conversation, messages=messages)


async def _read(call: Call, message: Message, field: str, room: int) -> tuple[Message, int]:
    """The message with its images, and how many bytes of pixels the request may still have."""
    parts = []
    for part in message.parts:
        if isinstance(part, ImagePart):
            _check_size(part, call.state.config, field)
            info = call.state.known().images
            if info is None:
                raise bad(NO_IMAGES, field)
            try:
                picture = await asyncio.to_thread(_picture, part, info, call.state.config)
            except UsageError as error:
                raise bad(str(error), field) from error
            room -= len(picture.pixels)
            if room < 0:
                raise bad(f"the images of the request have more than {MAX_PIXEL_BYTES} bytes of pixels.", field)
            part = replace(part, image=picture, source="")  # what was sent is not needed any more
        parts.append(part)
    return replace(message, parts=tuple(parts)), room


def _check_size(part: ImagePart, config: ServerConfig, field: str) -> None:
    """Before anything is decoded: a data: URI has four letters for three bytes."""
    if part.source[:5].lower() == "data:" and len(part.source) * 3 // 4 > config.max_image_bytes:
        raise bad(f"an image is larger than {config.max_image_bytes} bytes.", field)


def _picture(part: ImagePart, info: ImageInfo, config: ServerConfig) -> Picture:
    return read_picture(_bytes(part.source, config), info.rule, config.max_image_pixels)


def _bytes(source: str, config: ServerConfig) -> bytes:
    """UsageError for what is no data: URI in base64 and not allowed to be fetched."""
    scheme, _, rest = source.partition(":")
    if scheme.lower() != "data":
        if not config.image_hosts and scheme.lower() in ("http", "https"):
            raise UsageError("images are not fetched here; send the image as a data: URI.")
        return fetch(source, FetchRules(config.image_hosts, config.max_image_bytes))
    head, comma, body = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UsageError("an image's data: URI must be data:image/…;base64, and the file in base64.")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError("an image's data: URI holds no valid base64.") from error
