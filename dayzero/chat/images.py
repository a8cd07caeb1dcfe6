"""From the bytes of an image file to a ``Picture``: decoded, turned upright, laid on white, resized, padded. No torch.

Decisions where publishers say nothing or do several things: the orientation an EXIF tag gives is applied, so width and
height are those that a viewer shows; what is transparent is laid on white; of 16-bit greys the upper 8 bits count;
several frames are refused, not reduced to their first.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dayzero.arch.pixels import PixelRule
from dayzero.chat.media import Picture
from dayzero.errors import UsageError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64_000_000
# What decoders raise for damaged files; UnidentifiedImageError is an OSError.
DAMAGE = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error,
    zlib.error,
)  # fmt: skip


def read_picture(data: bytes, rule: PixelRule, max_pixels: int = MAX_PIXELS) -> Picture:
    """The picture in a file's bytes. max_pixels: width x height, checked before anything is decoded.

    UsageError, one sentence, for what is no still image of a known format, is damaged, too large, or has a shape that
    the model's processor refuses.
    """
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check(image, max_pixels)
            image.load()
            upright = ImageOps.exif_transpose(image)
            return make_picture(upright, rule)
    except UsageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow's own limit, met while the head is read: before our check, or where ours is wider.
        raise UsageError(f"an image has too many pixels; at most {max_pixels} are taken ({_said(error)}).") from error
    except DAMAGE as error:
        known = ", ".join(FORMATS)
        raise UsageError(f"an image cannot be read ({_said(error)}); send a whole file of {known}.") from error


def make_picture(image: Image.Image, rule: PixelRule) -> Picture:
    """A decoded, upright image as the model's processor makes it ready. UsageError for a shape that it refuses."""
    try:
        size = rule.size(*image.size)
    except ValueError as error:
        raise UsageError(f"an image cannot be used: {error}.") from error
    colours = _colours(image)
    if colours.size != (size.width, size.height):
        colours = colours.resize((size.width, size.height), Image.Resampling.BICUBIC)
    padded = (size.padded_width, size.padded_height)
    if padded != colours.size:
        canvas = Image.new("RGB", padded)  # black
        canvas.paste(colours)
        colours = canvas
    pixels = colours.tobytes()
    key = hashlib.sha256(struct.pack("<qq", *padded) + pixels).digest()
    whole = rule.patch * rule.merge
    grid = (size.padded_height // whole, size.padded_width // whole)
    return Picture(*image.size, size.tokens, grid, pixels, key)


def _check(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise UsageError(f"an image has {width}x{height} pixels; at most {max_pixels} are taken.")
    # Of a multi-picture file, as many cameras write them, the first is the photograph and the others are previews.
    if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
        raise UsageError("an image is animated; send one frame of it.")


def _colours(image: Image.Image) -> Image.Image:
    """RGB, whatever is transparent laid on white."""
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.clip(np.asarray(image).astype(np.float64), 0, 65535)
        return Image.fromarray((grey // 256).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _said(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not a known format"  # Pillow names the object that held the bytes
    return str(error).strip().rstrip(".")[:200] or type(error).__name__
