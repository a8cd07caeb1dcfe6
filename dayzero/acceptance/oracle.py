"""Which independent forward is compared to, and running it in a process of its own.

The child imports nothing of this package; the scripts lie under ``dayzero/oracles`` and are run by path. It answers
with a trace file; its progress comes on stdout, everything else it says goes to a log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from dayzero.acceptance.trace import Trace
from dayzero.arch.channels import MoE
from dayzero.arch.mixers import MLA
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.open import LoadedModel
from dayzero.console import ProgressFactory
from dayzero.errors import CheckpointError, MachineError, ModelError, UsageError, UserError
from dayzero.models.recipe import Oracle, Recipe

SCRIPTS = Path(__file__).resolve().parent.parent / "oracles"
LIBRARY, REMOTE = "transformers", "remote"

Kind = Literal["library", "remote", "plain"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """kind: how the forward is run. what: class name, file path, or ``""`` for the checkpoint's own code."""

    kind: Kind
    what: str
    modules: Oracle

    @property
    def takes_images(self) -> bool:
        """Whether it is the plain forward that the recipe names, and the recipe says that it takes images."""
        named = self.modules
        return named.images and named.file is not None and self.what == str(SCRIPTS / named.file)

    @property
    def name(self) -> str:
        return f"{LIBRARY} {self.what}" if self.kind == "library" else self.what or "the checkpoint's own code"


def choose(
    recipe: Recipe, asked: str | None, allow_remote_code: bool, config: Mapping[str, Any], files: Container[str] = ()
) -> Chosen:
    """The oracle for this family.

    asked: None (what the recipe names), ``transformers``, the class or file that it names, ``remote``, or a .py file.
    files: those of the checkpoint. UsageError, saying what may be given, when that is none that is accepted here,
    exists and is allowed.
    """
    named = recipe.oracle
    if asked is not None and asked.endswith(".py"):
        if not Path(asked).is_file():
            raise UsageError(f"--oracle {asked} is no file; give a plain forward, a .py that defines forward(...).")
        return Chosen("plain", asked, named or Oracle())
    known = "" if named is None else named.file or named.class_for(_architectures(config))
    absent = _absent_code(config, files)
    if asked == REMOTE or (asked is None and not known and allow_remote_code and absent is None):
        if not allow_remote_code:
            raise UsageError("--oracle remote runs Python code from the checkpoint; allow it with --allow-remote-code.")
        if absent is not None:
            raise UsageError(f"--oracle remote: the checkpoint ships no code of its own: {absent}.")
        return Chosen("remote", "", named or Oracle())
    if named is not None and known and asked in (None, known, None if named.file else LIBRARY):
        return Chosen("plain", str(SCRIPTS / known), named) if named.file else Chosen("library", known, named)
    ways = _ways(known, absent is None)
    if asked is not None:
        raise UsageError(
            f"--oracle {asked} is not accepted for {recipe.name}: a look-alike would compare the wrong model; "
            f"give {ways}."
        )
    raise UsageError(f"the recipe {recipe.name} names no oracle for this model; give {ways}.")


def _absent_code(config: Mapping[str, Any], files: Container[str]) -> str | None:
    """Why the checkpoint has no code of its own to run, or None when it has."""
    named = config.get("auto_map")
    if not isinstance(named, Mapping) or not named:
        return "config.json has no auto_map"
    modules = [str(one).partition(".")[0] for name in named.values() for one in _several(name) if "--" not in str(one)]
    lost = next((f"{module}.py" for module in modules if f"{module}.py" not in files), None)
    return None if lost is None else f"its auto_map names {lost}, which is not there"


def _several(name: object) -> Iterable[object]:
    """An entry of auto_map is one class, or a slow and a fast one of which either may be null."""
    return [one for one in name if one] if isinstance(name, list | tuple) else [name]


def _ways(known: str, ships_code: bool) -> str:
    """What may be given. known: the class or file that the recipe names, or ``""``."""
    ways = [f"--oracle {known}"] if known else []
    ways += ["--oracle FILE.py (a plain forward)", "--trace FILE (recorded elsewhere)"]
    if ships_code:
        ways.append("--allow-remote-code (the checkpoint ships code of its own)")
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


def _architectures(config: Mapping[str, Any]) -> list[str]:
    """Names in the config, the outer ones first: a wrapper's text part may be what the library has a class for."""
    inner = config.get("text_config")
    parts = [config, inner] if isinstance(inner, Mapping) else [config]
    return [name for part in parts for name in part.get("architectures") or () if isinstance(name, str)]


def places(modules: Oracle, spec: ModelSpec) -> dict[str, Any]:
    """Module paths of every site: what ``transformers_forward.py`` takes as ``--map``."""
    layers = []
    for i, layer in enumerate(spec.layers):
        mixer = modules.mixer_of_kind.get(layer.mixer.kind, modules.mixer)
        index = layer.mixer.index if isinstance(layer.mixer, MLA) else None
        owns_index = index is not None and not index.shared
        paths = {
            "layer": modules.layer,
            "mixer": mixer,
            "channel": modules.channel,
            "router": modules.router if isinstance(layer.channel, MoE) else None,
            "index": modules.index if owns_index else None,
        }
        layers.append({k: p if p is None else p.replace("{i}", str(i)) for k, p in paths.items()})
    return {"embed": modules.embed, "layers": layers, "final_norm": modules.final_norm, "head": modules.head}


def run_oracle(
    model: LoadedModel,
    chosen: Chosen,
    tokens: list[int],
    out: Path,
    threads: int | None,
    progress: ProgressFactory,
    images: Sequence[Tensor] = (),
) -> Trace:
    """Run the oracle over ``tokens`` and return its trace, written to ``out`` (a temporary name until it is complete).

    images: uint8 [height, width, 3], in the order of their placeholders, for an oracle that takes them.
    UsageError when the checkpoint is not on this machine; MachineError when a package is missing here; ModelError with
    the child's last words, and where its log is, when it stops.
    """
    config = model.source.path("config.json")
    if config is None:
        raise UsageError(
            f"the oracle reads files of this machine, and {model.source.name} is remote; copy the checkpoint here, or "
            "record a trace where it is and give it with --trace."
        )
    partial = out.with_name(out.name + ".partial")
    with tempfile.TemporaryDirectory(prefix="dayzero-oracle-") as folder:
        ids = Path(folder) / "tokens.json"
        ids.write_text(json.dumps(tokens))
        command = [*_command(chosen, model.spec, Path(folder)), "--model", str(config.parent), "--tokens", str(ids)]
        if images:
            pixels = Path(folder) / "images"
            pixels.mkdir()
            save_file({f"images.{n}": image for n, image in enumerate(images)}, pixels / "images.safetensors")
            command += ["--images", str(pixels)]
        command += ["--out", str(partial)] + ([] if threads is None else ["--threads", str(threads)])
        try:
            _run(command, chosen, len(model.spec.layers), progress, Path(folder) / "log")
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)
    return Trace(out)


def _command(chosen: Chosen, spec: ModelSpec, folder: Path) -> list[str]:
    if chosen.kind == "plain":
        script, num_layers = SCRIPTS / "run_plain.py", str(len(spec.layers))
        return [sys.executable, str(script), "--file", chosen.what, "--num-layers", num_layers]
    paths = folder / "map.json"
    paths.write_text(json.dumps(places(chosen.modules, spec)))
    command = [sys.executable, str(SCRIPTS / "transformers_forward.py"), "--map", str(paths), "--dtype", "float32"]
    if chosen.kind == "remote":
        return [*command, "--allow-remote-code", "--modules", str(folder / "modules")]
    return [*command, "--class", chosen.what]


def _run(command: list[str], chosen: Chosen, num_layers: int, progress: ProgressFactory, log: Path) -> None:
    """Run the child to its end; its log is kept only if it failed.

    Whatever stops us ends it: an exception or a signal kills it here, and where this process is killed outright, the
    pipe that is its stdin closes, which it watches (``wire.end_with_stdin``).
    """
    with open(log, "wb") as said:
        child = subprocess.Popen(
            [*command, "--end-with-stdin"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            _follow(child.stdout, chosen.name, num_layers, progress)
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdin.close()
            child.stdout.close()
    if code != 0:
        raise _stopped(chosen, code, log)


def _stopped(chosen: Chosen, code: int, log: Path) -> UserError:
    """Why the child stopped, from its last words."""
    last = _last_line(log)
    if chosen.kind == "plain" and (last.startswith(("SyntaxError", "IndentationError")) or "no forward(" in last):
        return UsageError(f"--oracle {chosen.what} is no plain forward ({last}); it must define forward(...).")
    if last.startswith("ModuleNotFoundError"):
        how = "install it" if chosen.kind == "plain" else "pip install 'dayzero[oracle]'"
        return MachineError(f"the oracle ({chosen.name}) needs a package that is not here ({last}): {how}.")
    if last.startswith("FileNotFoundError"):
        file = Path(last.rsplit(": ", 1)[-1].strip("'")).name
        return CheckpointError(f"{file} disappeared while the oracle read it; wait until the download is complete.")
    if "a scale is NaN or infinite" in last:
        return CheckpointError(f"{last.removeprefix('ValueError: ')}; the file is damaged: download it again.")
    with tempfile.NamedTemporaryFile(prefix="dayzero-oracle-", suffix=".log", delete=False) as kept:
        kept.write(log.read_bytes())
    how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"stopped: {last.rstrip('.')}"
    return ModelError(f"the oracle ({chosen.name}) {how}. Its log is {kept.name}.")


def _follow(stdout: IO[str], name: str, num_layers: int, progress: ProgressFactory) -> None:
    """Show the child's progress until it closes its output. Lines that are none of ours are passed over."""
    done = 0
    with progress(f"oracle: {name}", num_layers, "layers") as bar:
        for line in stdout:
            try:
                said = json.loads(line)
                now, text = int(said["done"]), str(said["text"])
            except (ValueError, TypeError, KeyError):
                continue
            bar.advance(max(0, now - done))
            bar.note(text)
            done = max(done, now)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
