"""preprocessor_config.json over a family's own numbers; and what an engine tells of images, across the wire."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dayzero.arch.pixels import FitAndPad, RoundToGrid
from dayzero.arch.raw import Raw
from dayzero.arch.vision import PatchTower
from dayzero.checkpoint.source import open_source
from dayzero.engine.events import Submit, ToEngine
from dayzero.engine.media import ImageInfo, image_info, why_not
from dayzero.engine.request import Image, NewRequest, SamplingParams
from dayzero.engine.wire import Frames, encode
from dayzero.errors import ConfigError
from dayzero.models.recipe import read_spec
from dayzero.models.registry import find
from dayzero.planner.image_processor import read_pixel_rule
from tests.paper.model_configs import config_of


def tower(name: str) -> PatchTower:
    config = config_of(name)
    recipe = find(config).recipe
    assert recipe is not None
    found = read_spec(recipe, Raw(config)).vision
    assert found is not None
    return found


def rule_of(folder: Path, name: str, given: dict[str, Any] | None) -> tuple[Any, str]:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    if given is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(given), encoding="utf-8")
    return read_pixel_rule(open_source(str(folder)), tower(name))


def test_without_the_file_the_family_decides(tmp_path: Path) -> None:
    rule, why = rule_of(tmp_path, "kimi_k3", None)
    assert rule == FitAndPad(14, 2, 65536, 512) and "family's own" in why
    rule, _ = rule_of(tmp_path, "qwen3_5_35b_a3b", None)
    assert rule == RoundToGrid(16, 2, 65536, 16777216)


def test_the_nested_numbers_of_a_remote_code_processor(tmp_path: Path) -> None:
    numbers = {
        "in_patch_limit": 16384, "patch_limit_on_one_side": 256, "patch_size": 14, "merge_kernel_size": 2,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 1], "fixed_output_tokens": None, "odd": 1,
    }  # fmt: skip
    rule, why = rule_of(tmp_path, "kimi_k3", {"auto_map": {}, "media_proc_cfg": numbers})
    assert rule == FitAndPad(14, 2, 16384, 256, std=(0.25, 0.5, 1.0))
    assert why.endswith("not used: media_proc_cfg.odd")


def test_areas_under_either_name(tmp_path: Path) -> None:
    size = {"shortest_edge": 1024, "longest_edge": 4096}
    given = {"size": size, "patch_size": 16, "merge_size": 2, "resample": 3, "do_resize": True}
    rule, why = rule_of(tmp_path, "qwen3_5_35b_a3b", given)
    assert (rule.min_pixels, rule.max_pixels) == (1024, 4096) and "not used" not in why
    rule, _ = rule_of(tmp_path, "qwen3_5_35b_a3b", {"min_pixels": 5, "max_pixels": 6})
    assert (rule.min_pixels, rule.max_pixels) == (5, 6)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("kimi_k3", {"media_proc_cfg": {"patch_size": 16}}, "patch_size is 16, but the tower of config.json has 14"),
        ("kimi_k3", {"media_proc_cfg": {"fixed_output_tokens": 64}}, "fixed_output_tokens is set"),
        ("kimi_k3", {"media_proc_cfg": {"image_mean": [0.5]}}, "image_mean must be three numbers"),
        ("kimi_k3", {"media_proc_cfg": {"in_patch_limit": 0}}, "in_patch_limit"),
        ("qwen3_5_35b_a3b", {"merge_size": 3}, "merge_size is 3"),
        ("qwen3_5_35b_a3b", {"min_pixels": 7, "max_pixels": 6}, "min_pixels is 7, above max_pixels"),
    ],
)
def test_numbers_that_do_not_fit_are_named_with_their_file(
    tmp_path: Path, name: str, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        rule_of(tmp_path, name, given)
    assert "preprocessor_config.json" in str(caught.value)


def request(**more: Any) -> NewRequest:
    image = Image(key=b"\x00\xff" * 16, first=1, rows=1, columns=2, pixels=bytes(3 * 28 * 56))
    given = {"id": "a", "prompt": [5, 9, 9, 6], "params": SamplingParams(), "media": [image]} | more
    return NewRequest(**given)


@pytest.mark.parametrize("name", ["kimi_k3", "qwen3_5_35b_a3b"])
def test_what_is_told_and_sent_crosses_the_wire(name: str) -> None:
    info = image_info(tower(name))
    again = msgspec.convert(msgspec.to_builtins(info), ImageInfo)
    assert again == info and again.rule == tower(name).pixels
    frames: Frames[Any] = Frames(ToEngine)
    (message,) = frames.feed(encode(Submit([request()])))
    assert message.requests == [request()]


def test_images_that_do_not_fit_their_prompt_are_told() -> None:
    info = ImageInfo(pad_id=9, fit=FitAndPad(14, 2, 65536, 512))
    (image,) = request().media
    assert why_not(request(), info) is None and why_not(request(media=[]), None) is None
    moved = msgspec.structs.replace(image, first=2)
    wrong = [
        ([moved], [5, 9, 9, 6]), ([image, image], [5, 9, 9, 6]), ([image], [5, 9, 8, 6]), ([image], [5, 9]),
        ([msgspec.structs.replace(image, rows=0)], [5, 9, 9]), ([msgspec.structs.replace(image, columns=1)], [5, 9, 9]),
    ]  # fmt: skip
    for media, prompt in wrong:
        assert why_not(request(media=media, prompt=prompt), info), (media[0].first, prompt)
    assert why_not(request(), None) == "this engine takes no images"
    assert why_not(request(), replace_patch(info)), "pixels of another patch size"


def replace_patch(info: ImageInfo) -> ImageInfo:
    assert info.fit is not None
    return msgspec.structs.replace(info, fit=replace(info.fit, patch=16))
