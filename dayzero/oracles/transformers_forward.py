"""Process that runs a family's code in transformers over a checkpoint of any size and writes its trace.

The model is built empty. Each layer is filled by the independent decoder when its turn comes, run in float32 with the
library's plain code paths, and emptied, so peak memory stays near one layer. Imports nothing of the package around it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wire  # type: ignore[import-not-found]  # beside this file, run by path

wire.quiet_environment()
# A kernel package that is importable replaces the library's plain code, on a machine without its accelerator too.
for _package in ("fla", "causal_conv1d", "mamba_ssm", "kernels", "flash_attn"):
    sys.modules[_package] = None  # type: ignore[assignment]

import torch  # noqa: E402
import transformers  # noqa: E402
from decode import open_checkpoint  # type: ignore[import-not-found]  # noqa: E402
from fill import Filler, Resident  # type: ignore[import-not-found]  # noqa: E402
from pieces import gather_rows, rows  # type: ignore[import-not-found]  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import dynamic_module_utils  # noqa: E402

_HEAD_ROWS = 8192


def build(folder: str, class_name: str | None, remote: bool) -> nn.Module:
    """The model on the meta device, plain implementations chosen. class_name None: the checkpoint's own code."""
    cls: Any = None
    if class_name is None:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote)
    else:
        cls = getattr(transformers, class_name, None)
        if cls is None:
            raise ValueError(f"transformers {transformers.__version__} has no {class_name}")
        config = cls.config_class.from_pretrained(folder)
    for part in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if hasattr(part, key):
                delattr(part, key)
    with torch.device("meta"), _recorded():
        if class_name is None:
            model = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=remote, dtype=torch.float32, attn_implementation="eager"
            )
        else:
            model = cls._from_config(config, dtype=torch.float32, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


_arguments: dict[int, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """Remember the arguments each module is made with: its tables can then be made again off the meta device."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made: Any = object.__new__(cls)
        _arguments[id(made)] = (made, args, kwargs)
        return made

    nn.Module.__new__ = new  # type: ignore[assignment, method-assign]
    yield


def restore_tables(model: nn.Module) -> None:
    """Values of buffers that no checkpoint stores (rope frequencies): by the library's own initialiser, else remade.

    ValueError naming a buffer that neither gives.
    """
    for path, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
        if not names:
            continue
        for name in names:
            like = module._buffers[name]
            assert like is not None
            fill = float("nan") if like.is_floating_point() else 0
            module._buffers[name] = torch.full(like.shape, fill, dtype=like.dtype, device="cpu")
        model._init_weights(module)  # type: ignore[operator]
        if any(_empty(module._buffers[n]) for n in names):
            _, args, kwargs = _arguments[id(module)]
            fresh = type(module)(*args, **kwargs)
            for name in names:
                module._buffers[name] = fresh._buffers[name]
        left = [f"{path}.{n}" for n in names if _empty(module._buffers[n])]
        if left:
            raise ValueError(f"buffers without a value: {', '.join(left)}")


def _empty(value: Tensor | None) -> bool:
    return value is None or value.is_meta or (value.is_floating_point() and bool(value.isnan().any()))


class Walk:
    """One forward with hooks: fills before, taps and empties after. places: module paths by site, see ``--map``."""

    def __init__(self, model: nn.Module, filler: Filler, places: dict[str, Any], writer: Any) -> None:
        self.model, self.filler, self.places, self.writer = model, filler, places, writer
        self.num_tokens = 0

    def run(self, tokens: list[int]) -> None:
        """The forward; every site of the map is written once, or ValueError names those that were not."""
        self.num_tokens = len(tokens)
        expected = self._attach()
        with torch.no_grad():
            out = self.model(input_ids=torch.tensor([tokens]), use_cache=False)
        self.writer.put("logits", out.logits.reshape(self.num_tokens, -1))
        silent = [f"{site} ({path})" for site, path in expected if site not in self.writer.names()]
        if silent:
            raise ValueError(f"modules of the map that the forward never called: {', '.join(silent)}")

    def _attach(self) -> list[tuple[str, str]]:
        places, expected = self.places, []
        self._embed(places["embed"])
        streamed = {places["embed"]}
        for i, layer in enumerate(places["layers"]):
            self._stream(layer["layer"], i)
            streamed.add(layer["layer"])
            sites = {"mixer": layer["mixer"], "channel": layer["channel"], "": layer["layer"]}
            chosen = {"experts": layer.get("router"), "index": layer.get("index")}
            for part, path in {**sites, **chosen}.items():
                if path:
                    site = f"layers.{i}.{part}".rstrip(".")
                    self._tap(site, path, ids=part in chosen)
                    expected.append((site, path))
        for site in ("embed", "final_norm"):
            self._tap(site, places[site])
            expected.append((site, places[site]))
        streamed |= self._head(places["head"])
        self._rest(streamed)
        return expected

    def _tap(self, site: str, path: str, ids: bool = False) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parts = output if isinstance(output, tuple | list) else (output,)
            found = [p for p in parts if isinstance(p, Tensor) and p.is_floating_point() != ids]
            found = [p for p in found if p.dtype != torch.bool]
            if not found:
                raise ValueError(f"{path} returns no {'ids' if ids else 'values'} for {site}")
            self.writer.put(site, found[0].reshape(self.num_tokens, -1))

        # Taps come before the emptying hooks: the layer's own output is written while it is whole.
        self.model.get_submodule(path).register_forward_hook(hook, prepend=True)

    def _stream(self, path: str, number: int) -> None:
        module, resident = self.model.get_submodule(path), Resident(self.filler, path)

        def before(module: nn.Module, args: Any) -> None:
            resident.fill()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            resident.drop()
            wire.report(number + 1, len(self.places["layers"]), path)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _embed(self, path: str) -> None:
        """Only the rows that the text needs: a vocabulary's matrix may be larger than a layer."""
        module, resident = self.model.get_submodule(path), Resident(self.filler, path)
        name = self.filler.plain_source(f"{path}.weight") if isinstance(module, nn.Embedding) else None
        empty = module._parameters.get("weight")

        def before(module: nn.Module, args: Any) -> Any:
            if name is None or len(args) != 1:
                resident.fill()
                return None
            wanted, at = torch.unique(args[0], return_inverse=True)
            module.padding_idx = None  # type: ignore[assignment]  # it indexes the whole matrix; no gradient needs it
            module._parameters["weight"] = nn.Parameter(gather_rows(self.filler.reader, name, wanted), False)
            return (at.reshape(args[0].shape),)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            resident.drop()
            module._parameters["weight"] = empty

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _head(self, path: str) -> set[str]:
        """A plain linear head runs some thousand rows at a time; anything else is filled whole."""
        module = self.model.get_submodule(path)
        name = self.filler.plain_source(f"{path}.weight")
        if type(module) is not nn.Linear or module.bias is not None or name is None:
            return set()
        num_rows = module.out_features

        def forward(x_BTD: Tensor) -> Tensor:
            def part(at: int) -> Tensor:
                return x_BTD @ rows(self.filler.reader, name, at, min(at + _HEAD_ROWS, num_rows)).T

            return torch.cat([part(at) for at in range(0, num_rows, _HEAD_ROWS)], -1)

        module.forward = forward  # type: ignore[method-assign]
        return {path}

    def _rest(self, streamed: set[str]) -> None:
        """What lies outside of layers, embedding and head (final norm, closing mixes) is small and stays."""
        roots = tuple(f"{path}." for path in streamed)
        for target in self.filler.wanted:
            if not target.startswith(roots):
                Resident(self.filler, target).fill()


def remote_code(model: nn.Module) -> dict[str, str]:
    """File -> digest of the checkpoint's own code, as far as the model's classes come from it; else empty."""
    files = set()
    for part in (model, *model.modules(), model.config):
        module = sys.modules[type(part).__module__]
        if module.__name__.startswith("transformers_modules."):
            files.add(Path(str(module.__file__)))
    return {f.name: "sha256:" + hashlib.sha256(f.read_bytes()).hexdigest()[:16] for f in sorted(files)}


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--model", "--tokens", "--out", "--map"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--class", dest="class_name", default=None)
    parser.add_argument("--dtype", default="float32", choices=("float32",))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--allow-remote-code", action="store_true")
    parser.add_argument("--modules", default=None, help="folder for the copy of a checkpoint's code that is run")
    parser.add_argument("--end-with-stdin", action="store_true")
    given = parser.parse_args()
    if given.end_with_stdin:
        wire.end_with_stdin()
    if given.class_name is None and not given.allow_remote_code:
        raise ValueError("without --class the checkpoint's own code would run, and --allow-remote-code was not given")
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.modules is not None:
        # The library copies remote code below the user's own cache and leaves it there; this run's copy goes with it.
        dynamic_module_utils.HF_MODULES_CACHE = given.modules
    tokens = wire.read_tokens(given.tokens)
    places = json.loads(Path(given.map).read_text())
    model = build(given.model, given.class_name, given.allow_remote_code)
    restore_tables(model)
    filler = Filler(model, open_checkpoint(given.model))
    room = wire.header_room(len(places["layers"]), len(tokens))
    with wire.TraceWriter(Path(given.out), room) as writer:
        Walk(model, filler, places, writer).run(tokens)
        packages = {name: importlib.metadata.version(name) for name in ("transformers", "torch")}
        oracle = {
            "kind": "remote code" if given.class_name is None else "transformers",
            "name": type(model).__name__,
            "versions": {**packages, "python": platform.python_version(), **remote_code(model)},
        }
        writer.close(wire.base_meta(tokens, oracle, filler.unused))


if __name__ == "__main__":
    main()
