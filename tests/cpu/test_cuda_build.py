"""What a kernel is compiled with: its own defines, and for as long as it is asked, more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dayzero.ops.cuda import build


def test_more_options_hold_as_long_as_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(build, "_load", lambda source, name, defines, more, *rest: seen.append((defines, more)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def load() -> None:
        build.load("a.cu", "a", defines={"B": 2, "A": 1})

    def load_and_fail() -> None:
        with build.compiled_with("-DX=1"):
            load()
            with build.compiled_with("-DY=1", "-lineinfo"):
                load()
            load()
            raise KeyError

    load()
    with pytest.raises(KeyError):
        load_and_fail()
    load()
    own = (("A", "1"), ("B", "2"))
    mores = [(), ("-DX=1",), ("-DX=1", "-DY=1", "-lineinfo"), ("-DX=1",), ()]
    assert seen == [(own, more) for more in mores]
