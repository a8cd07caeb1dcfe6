"""The protocol of an acceptance: what was judged, with which software, on which machine. One JSON object.

    {"package": {"name", "version", "commit", "changed": files differ from the commit, "code_sha256"},
     "versions": {"python", "torch", ...}, "extensions": {package: version},
     "machine": {"cpu", "cpus", "system", "python", "memory_bytes", "accelerator", "num_accelerators", "features"},
     "subject": {"source", "url", "model", "recipe", "serve", "files", "bytes", and where there is a source
                 "config_sha256", "headers_sha256", "tokenizer_sha256", "template_sha256", "recipe_sha256",
                 "serve_files_sha256" of files that options name; where there is a url "server": what
                 /v1/models says of the model},
     "profile", "seed", "stages": [names], "left_out": [names], "baseline": its digest or null,
     "service": what a server that was started said when it was ready: bindings, layout, dtype}

How each stage measured is in its facts.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import filter as matching
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import dayzero
from dayzero.acceptance.accept.cards import card_of
from dayzero.acceptance.accept.digest import sha256_of
from dayzero.acceptance.accept.http import Client
from dayzero.acceptance.accept.registry import left_out
from dayzero.acceptance.accept.stage import Subject
from dayzero.acceptance.load.report import machine
from dayzero.chat.template import ENCODER_FILES
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.index import read_index
from dayzero.checkpoint.source import Source, open_source
from dayzero.checkpoint.verify import sha256
from dayzero.errors import CheckpointError
from dayzero.extensions import HARDWARE, MODELS, OPERATORS, points_of
from dayzero.planner.tokenizer_files import TEMPLATES, TOKENIZERS

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "tiktoken", "numpy", "triton", "llguidance", "jinja2")
SETTINGS = "tokenizer_config.json"
TOKENIZER_SIDE = (SETTINGS, "special_tokens_map.json", "added_tokens.json", "merges.txt")
ASK_SECONDS = 30.0


def protocol_of(
    subject: Subject, stages: Sequence[str], profile: str, seed: int, baseline: Mapping[str, Any] | None
) -> dict[str, Any]:
    """All of it but ``service``, which is known once a server runs. Errors: those of opening the source; UsageError
    when ``baseline`` is no record."""
    return {
        "package": package_facts(),
        "versions": {"python": platform.python_version(), **versions_of(PACKAGES)},
        "extensions": _extensions(),
        "machine": machine() | _hardware(),
        "subject": subject_facts(subject),
        "profile": profile,
        "seed": seed,
        "stages": list(stages),
        "left_out": left_out(stages),
        "baseline": None if baseline is None else baseline["digest"],
    }


def package_facts(root: Path | None = None) -> dict[str, Any]:
    """Version, commit where the package lies in a git checkout, and a hash over its files. root: the package."""
    folder = Path(dayzero.__file__).parent if root is None else root
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(data)}\n".encode() + data)
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--", str(folder)) if commit else None
    return {
        "name": dayzero.__name__,
        "version": dayzero.__version__,
        "commit": commit,
        "changed": None if changed is None else bool(changed),
        "code_sha256": digest.hexdigest(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says in the checkout that the package stands at the top of; None elsewhere, and without git."""
    if not (folder.parent / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(folder.parent), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _extensions() -> dict[str, str]:
    points = [point for group in (MODELS, OPERATORS, HARDWARE) for point in points_of(group)]
    return {point.dist.name: point.dist.version for point in points if point.dist is not None}


def _hardware() -> dict[str, Any]:
    from dayzero.planner.detect import detect  # asks torch, which takes a second

    found, count = detect()
    accelerated = found.target != "cpu"
    return {
        "memory_bytes": found.memory_bytes,
        "accelerator": found.name if accelerated else None,
        "num_accelerators": count if accelerated else 0,
        "features": sorted(found.features),
    }


# --- the subject -----------------------------------------------------------------------------------------------------


def subject_facts(subject: Subject) -> dict[str, Any]:
    """What is judged, by name and by hashes. Errors: those of opening a source; MachineError when no server answers."""
    facts: dict[str, Any] = {
        "source": subject.source,
        "url": subject.url,
        "model": subject.model,
        "recipe": subject.recipe,
        "serve": list(subject.serve),
    }
    if subject.source is not None:
        facts |= source_facts(open_source(subject.source))
        facts["recipe_sha256"] = None if subject.recipe is None else _hash_of_file(Path(subject.recipe))
        facts["serve_files_sha256"] = {name: _hash_of_file(path) for name, path in _files_among(subject.serve)}
    if subject.url is not None:
        facts["server"] = _card(subject)
    return facts


def source_facts(source: Source) -> dict[str, Any]:
    """Hashes of what decides how a checkpoint is read: config, headers, tokenizer, template. Range reads alone."""
    index = read_index(source)
    entries = sorted(index.entries.values(), key=lambda entry: entry.name)
    layout = [[e.name, e.dtype, list(e.shape)] for e in entries]  # however it is cut into shards
    files = source.files()
    names = [file for pattern, _ in TOKENIZERS for file in matching(files, pattern)]
    names += [file for file in TOKENIZER_SIDE if file in files]
    return {
        "files": len(files),
        "bytes": sum(files.values()),
        "config_sha256": _hash_of(source, ["config.json"]),
        "headers_sha256": sha256_of(layout) if layout else None,
        "tokenizer_sha256": _hash_of(source, names),
        "template_sha256": _template_hash(source),
    }


def _template_hash(source: Source) -> str | None:
    """Over every chat template and encoder that the source holds, and the one inside tokenizer_config.json."""
    shown = [file for pattern in (*TEMPLATES, *ENCODER_FILES) for file in matching(source.files(), pattern)]
    try:
        has_settings = source.exists(SETTINGS)
        inside = read_object(source, SETTINGS, sizes=False)[0].get("chat_template") if has_settings else None
    except CheckpointError:
        inside = None
    beside = _hash_of(source, shown)
    return None if inside is None and beside is None else sha256_of([inside, beside])


def stamps_of(source: Source) -> str:
    """SHA-256 over name, size and stamp of every file: another one when any file was written to."""
    return sha256_of([[file, size, source.stamp(file)] for file, size in sorted(source.files().items())])


def _hash_of(source: Source, files: Sequence[str]) -> str | None:
    """SHA-256 over names and contents; None when there is none of them, or one cannot be read: a finding says so."""
    try:
        parts = [[file, sha256(source, file)] for file in sorted(set(files)) if source.exists(file)]
    except CheckpointError:
        return None
    return sha256_of(parts) if parts else None


def _files_among(options: Sequence[str]) -> list[tuple[str, Path]]:
    """Files that options for servers name, such as a chat template."""
    values = [option.rpartition("=")[2] for option in options]
    return [(value, Path(value)) for value in sorted(set(values)) if value and Path(value).is_file()]


def _hash_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _card(subject: Subject) -> dict[str, Any] | None:
    """What a running server's list of models says of the one that is judged, the time it was made apart; None when it
    does not say: the stages that ask it tell."""
    assert subject.url is not None
    headers = {"Authorization": f"Bearer {subject.api_key}"} if subject.api_key else {}
    listed = Client(subject.url, headers, ASK_SECONDS).get("/v1/models").json
    card = card_of(listed, subject.model)
    return {key: value for key, value in card.items() if key not in ("created", "permission")} or None
