"""From an image file to pixels and placeholders: sizes worked out by hand, colours, orientation, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PIL import Image

from dayzero.arch.pixels import FitAndPad, RoundToGrid
from dayzero.chat.images import make_picture, read_picture
from dayzero.chat.media import Picture, image_tokens, placed, spread
from dayzero.errors import UsageError
from tests.paper.image_files import animation, file_of, picture, png_claiming

FIT = FitAndPad(14, 2, 65536, 512)
ROUND = RoundToGrid(16, 2, 65536, 16777216)
PAD = 9


@pytest.mark.parametrize(
    ("size", "want"),
    [
        ((896, 896), (896, 896, 896, 896, 1024)),  # 64 x 64 patches, the learned grid itself
        ((1, 1), (1, 1, 28, 28, 1)),
        ((28, 28), (28, 28, 28, 28, 1)),
        ((29, 28), (29, 28, 56, 28, 2)),
        ((161, 184), (161, 184, 168, 196, 42)),  # 6 x 7
        ((4096, 16), (4096, 16, 4116, 28, 147)),
        ((7168, 100), (7168, 100, 7168, 112, 1024)),  # 512 patches wide: the most that is not shrunk
        # 714 x 214 whole patches; sqrt(65536 / 152796) = 0.65491: 6549.1 x 1964.7, cut off; 234 x 71 tokens
        ((10000, 3000), (6549, 1964, 6552, 1988, 16614)),
        # 512 * 14 / 20000 = 0.3584: 7168 x 1.79, cut off; no whole patch high counts as one
        ((20000, 5), (7168, 1, 7168, 28, 256)),
        ((5, 20000), (1, 7168, 28, 7168, 256)),
    ],
)
def test_fitting_and_padding_by_hand(size: tuple[int, int], want: tuple[int, ...]) -> None:
    assert tuple(image_tokens(*size, FIT)) == want


@pytest.mark.parametrize(
    ("size", "want"),
    [
        ((1000, 600), (992, 608, 589)),  # 31.25 and 18.75 tokens: 31 x 19
        ((1040, 1072), (1024, 1088, 1088)),  # 32.5 and 33.5: halves go to the even number, 32 x 34
        ((100, 100), (256, 256, 64)),  # 96 x 96 is below 65536; times sqrt(65536 / 10000) = 2.56
        # 8000 x 6016 is too much; divided by sqrt(48e6 / 16777216) = 1.69146: 147.8 and 110.8, cut off
        ((8000, 6000), (4704, 3520, 16170)),
    ],
)
def test_rounding_to_the_grid_by_hand(size: tuple[int, int], want: tuple[int, int, int]) -> None:
    got = image_tokens(*size, ROUND)
    assert (got.width, got.height, got.tokens) == want
    assert (got.padded_width, got.padded_height) == (got.width, got.height)


@pytest.mark.parametrize("rule", [FIT, ROUND])
def test_every_size_comes_to_whole_tokens_and_no_more_than_promised(rule: FitAndPad | RoundToGrid) -> None:
    whole = rule.patch * rule.merge
    for width in (1, 13, 27, 28, 29, 447, 3583, 7167, 7169, 60000):
        for height in (1, 14, 31, 512, 7168, 30001):
            if isinstance(rule, RoundToGrid) and max(width, height) > 200 * min(width, height):
                with pytest.raises(ValueError, match="200 times"):
                    rule.size(width, height)
                continue
            got = rule.size(width, height)
            assert got.padded_width % whole == got.padded_height % whole == 0
            assert 1 <= got.width <= got.padded_width < got.width + whole
            assert 1 <= got.height <= got.padded_height < got.height + whole
            assert got.tokens * whole**2 == got.padded_width * got.padded_height
            assert got.tokens * rule.merge**2 <= rule.most_patches


def test_an_image_keeps_its_pixels_and_is_padded_with_black_at_the_right_and_the_bottom() -> None:
    image = picture(30, 41)
    got = read_picture(file_of(image), FIT)
    assert (got.width, got.height, got.tokens, got.grid) == (30, 41, 4, (2, 2))
    rows = Image.frombytes("RGB", (56, 56), got.pixels)
    assert rows.crop((0, 0, 30, 41)).tobytes() == image.tobytes()
    assert not any(rows.crop((30, 0, 56, 56)).tobytes()) and not any(rows.crop((0, 41, 56, 56)).tobytes())


def test_keys_tell_content_and_shape_and_nothing_else() -> None:
    one, again, other = (read_picture(file_of(picture(30, 41, seed)), FIT) for seed in (1, 1, 2))
    assert one.key == again.key != other.key
    white = [Image.new("RGB", size, "white") for size in ((56, 28), (28, 56))]
    wide, high = (make_picture(image, FIT) for image in white)
    assert wide.pixels == high.pixels and wide.key != high.key
    assert read_picture(file_of(picture(30, 41, 1), "BMP"), FIT).key == one.key, "the file's format is no content"


def test_a_large_image_is_shrunk_as_pillow_does_it_bicubically() -> None:
    rule = FitAndPad(4, 2, 64, 8)
    image = picture(100, 50)
    got = read_picture(file_of(image), rule)
    assert got.grid == (2, 4) and rule.size(100, 50)[:2] == (32, 16)
    assert got.pixels == image.resize((32, 16), Image.Resampling.BICUBIC).tobytes()


def test_the_orientation_of_a_photograph_is_applied() -> None:
    image = picture(40, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    got = read_picture(file_of(image, exif=exif), FIT)
    assert (got.width, got.height, got.grid) == (20, 40, (2, 1))
    seen = Image.frombytes("RGB", (28, 56), got.pixels).crop((0, 0, 20, 40))
    assert seen.tobytes() == image.transpose(Image.Transpose.ROTATE_270).tobytes()


def test_a_multi_picture_photograph_is_its_first() -> None:
    """Cameras put previews behind it; Pillow counts them as frames."""
    data = file_of(picture(40, 20, 1), "MPO", save_all=True, append_images=[picture(20, 10, 2)], quality=100)
    got = read_picture(data, FIT)
    assert (got.width, got.height) == (40, 20)
    assert got.key == read_picture(file_of(picture(40, 20, 1), "JPEG", quality=100), FIT).key


def _palette(image: Image.Image) -> bytes:
    small = Image.new("P", image.size, 1)
    small.putpalette([10, 20, 30, 200, 100, 50])
    small.putpixel((0, 0), 0)
    return file_of(small, transparency=1)


@pytest.mark.parametrize(
    ("data", "want"),
    [
        (file_of(Image.new("RGBA", (28, 28), (200, 0, 0, 0))), (255, 255, 255)),
        (file_of(Image.new("RGBA", (28, 28), (0, 0, 0, 51))), (204, 204, 204)),
        (file_of(Image.new("LA", (28, 28), (0, 255))), (0, 0, 0)),
        (_palette(picture(28, 28)), (255, 255, 255)),
        (file_of(Image.new("L", (28, 28), 77)), (77, 77, 77)),
        (file_of(Image.new("1", (28, 28), 1)), (255, 255, 255)),
        (file_of(Image.new("I;16", (28, 28), 0x8123)), (0x81, 0x81, 0x81)),
        (file_of(Image.new("CMYK", (28, 28), (0, 255, 255, 0)), "JPEG", quality=100), (254, 0, 0)),
    ],
)
def test_every_mode_becomes_colours_and_what_is_transparent_white(data: bytes, want: tuple[int, int, int]) -> None:
    got = Image.frombytes("RGB", (28, 28), read_picture(data, FIT).pixels).getpixel((20, 20))
    assert isinstance(got, tuple) and all(abs(a - b) <= 1 for a, b in zip(got, want, strict=True)), got


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a known format"),
        (b"GIF89a", "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not a known format"),
        (_cut(file_of(picture(90, 90))), "cannot be read"),
        (_cut(file_of(picture(90, 90), "JPEG")), "cannot be read"),
        (_cut(file_of(picture(90, 90), "WEBP")), "cannot be read"),
        (animation(), "animated"),
        (png_claiming(9000, 9000), "9000x9000 pixels; at most 64000000"),
        (png_claiming(30000, 30000), "900000000 pixels"),
        (png_claiming(2**31 - 1, 2**31 - 1), "pixels|cannot be read"),
        (png_claiming(40, 40), "cannot be read"),  # fewer rows than it says
    ],
)
def test_what_is_no_still_image_is_refused_in_one_sentence(data: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_picture(data, FIT)
    assert " at 0x" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_strip_that_the_processor_refuses_is_named() -> None:
    with pytest.raises(UsageError, match="200 times as long"):
        read_picture(file_of(picture(1005, 5)), ROUND)


def test_placeholders_are_found_image_by_image_and_counted() -> None:
    one, two = Picture(1, 1, 2), Picture(1, 1, 3)
    found = placed([1, PAD, PAD, 2, PAD, PAD, PAD, 3], PAD, (one, two))
    assert [(at.picture is picture, at.first) for at, picture in zip(found, (one, two))] == [(True, 1), (True, 4)]
    assert placed([1, 2, 3], PAD, ()) == ()
    assert [at.first for at in placed([PAD] * 5, PAD, (one, two))] == [0, 2], "nothing need stand between them"
    wrong: list[tuple[list[int], tuple[Picture, ...]]] = [
        ([1, PAD], (one,)), ([PAD] * 3, (one,)), ([1, 2], (one,)), ([PAD], ()), ([PAD, 1, PAD], (one,)),
    ]  # fmt: skip
    check: Callable[..., object] = placed
    for ids, pictures in wrong:
        with pytest.raises(UsageError):
            check(ids, PAD, pictures)


def test_a_single_placeholder_of_a_template_is_spread() -> None:
    pictures = (Picture(1, 1, 2), Picture(1, 1, 3))
    assert spread([1, PAD, 2, PAD, 3], PAD, pictures) == [1, PAD, PAD, 2, PAD, PAD, PAD, 3]
    whole = [1, PAD, PAD, 2, PAD, PAD, PAD, 3]
    assert spread(whole, PAD, pictures) == whole, "what an encoder has written stays"
    assert spread([1, PAD, 2], PAD, pictures) == [1, PAD, 2], "a wrong number is left for placed to refuse"
