"""Tokenizer, chat encoding, stop ids and sampling defaults, from the files beside the weights.

Stop ids stand in up to six places that need not agree; a server must end on every one of them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dayzero.chat.encoding import OWN_ENCODERS
from dayzero.chat.families import recognise
from dayzero.chat.stops import SAMPLING, stop_sources
from dayzero.chat.template import ENCODER_FILES, ChatTemplate
from dayzero.chat.tiktoken_form import FILE, Vocabulary, is_known, read_vocabulary
from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.source import Source
from dayzero.errors import CheckpointError, UsageError
from dayzero.finding import Finding
from dayzero.units import MIB

TOKENIZERS = (
    ("tokenizer.json", "tokenizer.json"), ("tiktoken.model", "tiktoken"), ("*.tiktoken", "tiktoken"),
    ("tokenizer.model", "sentencepiece"), ("spiece.model", "sentencepiece"), ("vocab.json", "vocab.json + merges.txt"),
    ("tekken.json", "tekken"),
)  # fmt: skip
TEMPLATES = ("chat_template.jinja", "chat_template.json", "chat_templates/*.jinja", "additional_chat_templates/*.jinja")
MAX_TOKENIZER_BYTES = 256 * MIB


class _Added(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_Added] = []
    model: dict[str, Any] = {}


@dataclass(slots=True)
class TokenizerFiles:
    """tokenizer, chat: what to print in JSON. stop: id -> where it is said. sampling: generation defaults.

    largest_id: highest id of the vocabulary, None when it cannot be told. odd_ids: where a stop id is said -> a value
    there that is no id.
    """

    tokenizer: dict[str, Any] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)
    stop: dict[int, list[str]] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    largest_id: int | None = None
    odd_ids: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def read_tokenizer_files(source: Source, config: Mapping[str, Any], family: str | None = None) -> TokenizerFiles:
    """All of it; what cannot be read becomes a finding. Nothing here runs code from the folder.

    family: what the recipe calls the model; some families' chat formats are encoded here, whatever the folder holds.
    """
    out = TokenizerFiles()
    side = _Side(source, out)
    settings = side.json("tokenizer_config.json")
    generation = side.json("generation_config.json")
    tokens = _read_vocabulary(source, settings, out)
    templates = _read_chat(source, settings, out)
    if out.chat["kind"] == "none" and family in OWN_ENCODERS:
        out.chat["kind"] = "own"
    out.sampling = {key: generation[key] for key in SAMPLING if generation.get(key) is not None}
    shown = [(template, recognise(template, None, tokens)[0]) for template in templates]
    for where, value in stop_sources(config, generation, settings, tokens, shown):
        for token in _ids(value):
            said = out.stop.setdefault(token, [])
            if where not in said:
                said.append(where)
        if value is not None and _ids(value) != (value if isinstance(value, list) else [value]):
            out.odd_ids[where] = value
    _report(source, out)
    return out


def no_id_findings(odd: Mapping[str, Any]) -> list[Finding]:
    """Stop ids that are no ids: dropped, they would leave a model that never stops."""
    if not odd:
        return []
    return [
        Finding(
            "stop_ids.no_id", "config", "fail", "a stop id is no token id", measured=list(odd.values()),
            evidence=tuple(f"{file}: eos_token_id = {str(value)[:80]}" for file, value in odd.items()),
            remedy="give one whole number >= 0, or a list of them",
        )
    ]  # fmt: skip


@dataclass(slots=True)
class _Side:
    source: Source
    out: TokenizerFiles

    def json(self, file: str) -> dict[str, Any]:
        """The object in a file beside the weights; empty, with a finding, when it is damaged."""
        if not self.source.exists(file):
            return {}
        try:
            return read_object(self.source, file, sizes=False)[0]
        except CheckpointError as error:
            self.out.findings.append(
                Finding(
                    "tokenizer.file",
                    "tokenizer+template",
                    "fail",
                    str(error),
                    evidence=(file,),
                    remedy="download the file again",
                )
            )
            return {}


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _read_vocabulary(source: Source, settings: Mapping[str, Any], out: TokenizerFiles) -> dict[str, int]:
    """Added tokens, text -> id. Fills ``out.tokenizer`` and ``out.largest_id``."""
    found = [(file, kind) for pattern, kind in TOKENIZERS for file in fnmatch.filter(source.files(), pattern)]
    tokens: dict[str, int] = {}
    decoder = settings.get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and _is_id(number):
            tokens[token["content"]] = int(number)
    size = None
    if any(file == "tokenizer.json" for file, _ in found):
        parsed = _parse_tokenizer(source, out)
        tokens |= {t.content: t.id for t in parsed.added_tokens}
        vocab = parsed.model.get("vocab")
        ids: list[int] = [t.id for t in parsed.added_tokens]
        if isinstance(vocab, dict):
            ids += [v for v in vocab.values() if type(v) is int]
        elif isinstance(vocab, list):
            ids.append(len(vocab) - 1)
        size, out.largest_id = (len(set(ids)), max(ids)) if ids else (None, None)
        found = [
            (file, f"{kind} ({parsed.model.get('type', 'unknown')})" if file == "tokenizer.json" else kind)
            for file, kind in found
        ]
    elif is_known(source):
        ranks = _read_ranks(source, out)
        if ranks is not None:
            tokens = dict(ranks.added)
            size, out.largest_id = len(ranks.ranks) + len(tokens), max(tokens.values())
    out.tokenizer = {
        "kind": found[0][1] if found else None,
        "files": sorted({file for file, _ in found}),
        "class": settings.get("tokenizer_class"),
        "size": size,
        "num_added": len(tokens),
        "code": sorted(fnmatch.filter(source.files(), "tokenization_*.py")),
    }
    return tokens


def _read_ranks(source: Source, out: TokenizerFiles) -> Vocabulary | None:
    try:
        return read_vocabulary(source)
    except CheckpointError as error:
        out.findings.append(
            Finding(
                "tokenizer.file", "tokenizer+template", "fail", str(error), evidence=(FILE,),
                remedy="download the file again",
            )
        )  # fmt: skip
        return None


def _parse_tokenizer(source: Source, out: TokenizerFiles) -> _TokenizerFile:
    file = "tokenizer.json"
    try:
        size = source.size(file)
        if size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(f"{file} of {source.name} has {size} bytes, too many for a tokenizer.")
        return msgspec.json.decode(source.read(file, 0, size), type=_TokenizerFile)
    except (msgspec.DecodeError, CheckpointError, RecursionError, UnicodeDecodeError) as error:
        claim = str(error) if isinstance(error, CheckpointError) else f"{file} is no tokenizer file: {str(error)[:160]}"
        out.findings.append(
            Finding(
                "tokenizer.file",
                "tokenizer+template",
                "fail",
                claim,
                evidence=(file,),
                remedy="download the file again",
            )
        )
        return _TokenizerFile()


def _read_chat(source: Source, settings: Mapping[str, Any], out: TokenizerFiles) -> list[str]:
    """Texts of the chat templates. Fills ``out.chat``."""
    places: dict[str, str] = {}
    own = settings.get("chat_template")
    if isinstance(own, str):
        places["tokenizer_config.json"] = own
    elif isinstance(own, list):
        for item in own:
            if isinstance(item, dict) and isinstance(item.get("template"), str):
                places[f"tokenizer_config.json ({item.get('name')})"] = item["template"]
    for pattern in TEMPLATES:
        for file in sorted(fnmatch.filter(source.files(), pattern)):
            if source.size(file) <= MIB:
                try:
                    places[file] = source.text(file)
                except CheckpointError as error:
                    out.findings.append(
                        Finding("chat.template", "tokenizer+template", "fail", str(error), evidence=(file,))
                    )
    for file, text in places.items():
        try:
            ChatTemplate(text).check()
        except UsageError as error:
            out.findings.append(
                Finding(
                    "chat.template", "tokenizer+template", "fail", f"the chat template of {file} can be read",
                    str(error), evidence=(file,), remedy="take the publisher's file, or give one with --chat-template",
                )
            )  # fmt: skip
    encoders = sorted({f for pattern in ENCODER_FILES for f in fnmatch.filter(source.files(), pattern)})
    kind = "encoder" if encoders else "template" if places else "none"
    out.chat = {"kind": kind, "templates": list(places), "encoders": encoders}
    beside = places.get("chat_template.jinja")
    if isinstance(own, str) and beside is not None and own.strip() != beside.strip():
        out.findings.append(
            Finding(
                "chat.templates_differ", "tokenizer+template", "note",
                "tokenizer_config.json and chat_template.jinja hold different chat templates",
                evidence=("tokenizer_config.json", "chat_template.jinja"),
                remedy="chat_template.jinja counts in newer libraries; compare prompt ids of both with the publisher's",
            )
        )  # fmt: skip
    return list(places.values())


def _ids(value: Any) -> list[int]:
    items = value if isinstance(value, list) else [value]
    return [i for i in items if type(i) is int and i >= 0]


def _report(source: Source, out: TokenizerFiles) -> None:
    if source.config_only:
        return
    if not out.tokenizer["files"]:
        out.findings.append(
            Finding(
                "tokenizer.absent", "tokenizer+template", "note", f"{source.name} holds no tokenizer",
                remedy="copy the publisher's tokenizer files beside the weights before anything is served",
            )
        )  # fmt: skip
    if out.chat["kind"] == "none":
        out.findings.append(
            Finding(
                "chat.absent", "tokenizer+template", "note", f"{source.name} holds no chat template and no encoder",
                remedy="chat requests will be refused; completions work",
            )
        )  # fmt: skip
    sources = {where for said in out.stop.values() for where in said}
    if any(len(said) != len(sources) for said in out.stop.values()):
        told = tuple(f"{i}: {', '.join(said)}" for i, said in sorted(out.stop.items()))
        out.findings.append(
            Finding(
                "stop_ids.differ", "tokenizer+template", "note",
                "the sources of stop ids do not agree; generation ends on any of them",
                measured=sorted(out.stop), evidence=told,
                remedy="check that each of them really ends an answer",
            )
        )  # fmt: skip
    if not out.stop and not source.config_only:
        out.findings.append(
            Finding(
                "stop_ids.absent", "tokenizer+template", "note", "no file names a token that ends an answer",
                remedy="answers will run to their token limit; give stop ids with each request",
            )
        )  # fmt: skip
