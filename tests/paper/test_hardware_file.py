"""A device record from a TOML file: every field checked, in one sentence that names file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayzero.errors import UsageError
from dayzero.hardware import MAX_DEVICES, parse_hardware

SOUND = {"memory_bytes": "8e10", "bandwidth": "1e12", "link": "1e11", "flops": "{bf16 = 1e15}"}
WRONG = [
    ("memory_bytes", "inf"), ("memory_bytes", "nan"), ("memory_bytes", "1e400"), ("memory_bytes", "-1"),
    ("memory_bytes", "true"), ("bandwidth", "inf"), ("bandwidth", "'fast'"), ("link", "nan"), ("link", "0"),
    ("flops", "{}"), ("flops", "3"), ("flops", "{bf16 = 0}"), ("flops", "{bf16 = -1e15}"), ("flops", "{bf16 = 'a'}"),
    ("flops", "{bf16 = 1e15, e4m3 = 'a'}"), ("flops", "{bf16 = 1e15, e4m3 = inf}"), ("node", "'x'"), ("node", "0"),
    ("node", "1.5"), ("reserved_bytes", "'a'"), ("reserved_bytes", "-1"), ("name", "5"), ("target", "[]"),
    ("features", "3"), ("features", "'fp8'"), ("features", "[1]"), ("colour", "'red'"),
]  # fmt: skip


def write(folder: Path, **fields: str) -> Path:
    path = folder / "device.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in {**SOUND, **fields}.items()))
    return path


def test_a_sound_record(tmp_path: Path) -> None:
    path = write(tmp_path, node="4", features="['fp8']", reserved_bytes="0", name="'mine'")
    made, count = parse_hardware(f"{path}x2")
    assert (made.name, made.memory_bytes, made.node, made.features, count) == (
        "mine",
        80_000_000_000,
        4,
        frozenset({"fp8"}),
        2,
    )


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_wrong_field_is_named(key: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=key) as caught:
        parse_hardware(str(write(tmp_path, **{key: value})))
    assert "device.toml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 5000, "a = " + "[" * 20_000, "memory_bytes = " + "9" * 6000, "\0"])
def test_what_is_no_toml(text: str, tmp_path: Path) -> None:
    (tmp_path / "device.toml").write_text(text)
    with pytest.raises(UsageError, match=r"device\.toml"):
        parse_hardware(str(tmp_path / "device.toml"))


@pytest.mark.parametrize("count", ["0", str(MAX_DEVICES + 1), "1000000000", "9" * 5000])
def test_absurd_numbers_of_devices(count: str) -> None:
    with pytest.raises(UsageError):
        parse_hardware(f"h100x{count}")
    assert parse_hardware(f"h100x{MAX_DEVICES}")[1] == MAX_DEVICES
