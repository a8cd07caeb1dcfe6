"""Process that runs a plain forward given by path and writes its trace. Imports nothing of the package around it.

The file defines ``forward(reader, config, tokens, emit) -> logits``: reader is ``decode.open_checkpoint``'s, config the
parsed config.json, tokens a list of ids, emit(site, value) takes one output. Everything runs in float32. Tensors that
these tokens do not reach, such as experts nobody chose, the forward names with ``reader.spare(*names)``. Where images
are given it is called with a fifth argument: a list of uint8 [height, width, 3], in the order of their placeholders.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import decode  # type: ignore[import-not-found]  # beside this file, run by path
import torch
import wire  # type: ignore[import-not-found]
from pieces import logical_names  # type: ignore[import-not-found]
from torch import Tensor


class Watched(decode.Reader):  # type: ignore[misc]
    """The decoder, remembering which tensors were taken or spared: what a forward has no use for is told."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.taken: set[str] = set()

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        self.taken.add(name)
        return super().tensor(name, dtype)

    def spare(self, *names: str) -> None:
        self.taken.update(names)

    def raw(self, name: str) -> Tensor:
        self.taken.add(name)
        return super().raw(name)


def load(path: str) -> ModuleType:
    """The file as a module. Its folder is not put on the path: it stands alone."""
    made = importlib.util.spec_from_file_location("plain_forward", path)
    if made is None or made.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    if not callable(getattr(module, "forward", None)):
        raise ValueError(f"{path} defines no forward(reader, config, tokens, emit)")
    return module


def read_images(folder: str | None) -> list[Tensor]:
    if folder is None:
        return []
    pixels = decode.open_checkpoint(folder)
    return [pixels.raw(f"images.{number}") for number in range(len(pixels.names()))]


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--file", "--model", "--tokens", "--out"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--num-layers", type=int, required=True)
    parser.add_argument("--images", default=None, help="folder of a safetensors file with images.0, images.1, …")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--end-with-stdin", action="store_true")
    given = parser.parse_args()
    if given.end_with_stdin:
        wire.end_with_stdin()
    wire.quiet_environment()
    if given.threads:
        torch.set_num_threads(given.threads)
    config: dict[str, Any] = json.loads((Path(given.model) / "config.json").read_text())
    tokens = wire.read_tokens(given.tokens)
    module = load(given.file)
    reader = Watched(Path(given.model))
    held, images = logical_names(reader), read_images(given.images)
    with torch.no_grad(), wire.TraceWriter(Path(given.out), wire.header_room(given.num_layers, len(tokens))) as writer:

        def emit(site: str, value: Tensor) -> None:
            writer.put(site, value)
            parts = site.split(".")
            if len(parts) == 2 and parts[0] == "layers":
                wire.report(int(parts[1]) + 1, given.num_layers, site)

        for number, image in enumerate(images):
            writer.put(f"images.{number}", image)
        more = (images,) if images else ()
        writer.put("logits", module.forward(reader, config, tokens, emit, *more))
        unused = [p for name, parts in held.items() if not {name, *parts} & reader.taken for p in parts]
        oracle = {
            "kind": "plain",
            "name": getattr(module, "NAME", Path(given.file).name),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        writer.close(wire.base_meta(tokens, oracle, unused))


if __name__ == "__main__":
    main()
