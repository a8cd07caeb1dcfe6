"""preprocessor_config.json: the publisher's numbers for images, over the defaults of the family. Paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dayzero.arch.pixels import FitAndPad, PixelRule, RoundToGrid
from dayzero.arch.raw import Raw
from dayzero.arch.vision import PatchTower
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.source import Source
from dayzero.errors import ConfigError

FILE = "preprocessor_config.json"
NESTED = "media_proc_cfg"  # where remote-code processors keep their own numbers
# Names of classes, and steps that a rule always takes.
WORDS = frozenset({
    "auto_map", "image_processor_type", "processor_class", "do_resize", "do_rescale", "do_normalize", "do_convert_rgb",
    "rescale_factor", "resample", "temporal_patch_size", "timestamp_mode", "video_placeholder", "disable_grouping",
})  # fmt: skip


def read_pixel_rule(source: Source, tower: PatchTower) -> tuple[PixelRule, str]:
    """(how images become pixels, where that comes from and which keys were not used). ConfigError for numbers that do
    not fit the tower."""
    if not source.exists(FILE):
        return tower.pixels, "the family's own numbers; the checkpoint has no " + FILE
    config, _ = read_object(source, FILE)
    outer = Raw(config, file=FILE)
    raw = outer.sub(NESTED) if outer.has(NESTED) else outer
    family = tower.pixels
    rule: PixelRule = _fit(raw, family) if isinstance(family, FitAndPad) else _round(raw, family)
    for key, size in (("patch_size", tower.patch), ("merge_kernel_size", tower.merge), ("merge_size", tower.merge)):
        if raw.has(key) and raw.int(key) != size:
            raise ConfigError(f"{FILE}: {key} is {raw.int(key)}, but the tower of config.json has {size}.")
    values: dict[str, Any] = {}
    for key, name in (("image_mean", "mean"), ("image_std", "std")):
        if raw.has(key):
            values[name] = _three(raw, key)
    unused = sorted(key for key in outer.unread() if key.rpartition(".")[2] not in WORDS)
    return replace(rule, **values), FILE + (f"; not used: {', '.join(unused)}" if unused else "")


def _fit(raw: Raw, rule: FitAndPad) -> FitAndPad:
    if raw.has("fixed_output_tokens"):
        raise ConfigError(f"{FILE}: fixed_output_tokens is set; images of a fixed number of tokens are not known here.")
    raw.ignore("fixed_output_tokens", why="null: as many as the image has")
    return replace(
        rule,
        max_patches=raw.int("in_patch_limit", default=rule.max_patches, least=1),
        max_side_patches=raw.int("patch_limit_on_one_side", default=rule.max_side_patches, least=1),
    )


def _round(raw: Raw, rule: RoundToGrid) -> RoundToGrid:
    size = raw.sub_or_none("size") if raw.has("size") else None
    for part, keys in ((size, ("shortest_edge", "longest_edge")), (raw, ("min_pixels", "max_pixels"))):
        if part is not None and all(part.has(key) for key in keys):
            low, high = (part.int(key, least=1) for key in keys)
            if low > high:
                raise ConfigError(f"{FILE}: {part.full(keys[0])} is {low}, above {keys[1]}, which is {high}.")
            rule = replace(rule, min_pixels=low, max_pixels=high)
    return rule


def _three(raw: Raw, key: str) -> tuple[float, float, float]:
    given = raw.list(key)
    if len(given) != 3 or not all(isinstance(n, int | float) for n in given):
        raise ConfigError(f"{FILE}: {key} must be three numbers, one a colour, but is {given!r}.")
    red, green, blue = (float(n) for n in given)
    return red, green, blue
