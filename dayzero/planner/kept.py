"""How a rank keeps weights, on paper: as they are stored where the operator that takes them does, else decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dayzero.arch.channels import MoE
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.found import Source
from dayzero.checkpoint.rules import Group
from dayzero.checkpoint.slices import packed_form
from dayzero.decl import BF16, F32, Form, Format
from dayzero.ops.bindings import chosen
from dayzero.ops.catalog import Catalog, Line
from dayzero.planner.placement import PaperModel
from dayzero.units import counted

MATRICES = ("gate", "up", "down")
WORDS: Mapping[Form, str] = {"mxfp4": "in 4 bits as stored", "fp8_block": "in 8 bits as stored"}


def expert_lines(spec: ModelSpec, bindings: Mapping[str, str], catalog: Catalog) -> dict[str, Line]:
    """By name of a stack of experts, the variant that takes it."""
    found: dict[str, Line] = {}
    for i, layer in enumerate(spec.layers):
        if isinstance(layer.channel, MoE):
            site = f"layers.{i}.channel.experts"
            line = chosen(layer.channel.contract, site, bindings, catalog)
            found |= {f"{site}.{matrix}": line for matrix in MATRICES}
    return found


def as_kept(model: PaperModel, lines: Mapping[str, Line]) -> PaperModel:
    """The model with formats as a rank keeps them: what its operator does not take as it is stored, in bf16, or in f32
    where a declaration says so. lines: by name of a parameter, the variant that takes it. Layers beside the plain
    forward, which no operator is bound for, stay as they are stored."""
    forms = stored_forms(model)
    formats = [_kept(group, fmt, lines, forms) for group, fmt in zip(model.groups, model.formats, strict=True)]
    by_param = {t.decl.name: fmt for g, fmt in zip(model.groups, formats, strict=True) for t in g.targets}
    return replace(model, formats=formats, by_param=by_param)


def stored_forms(model: PaperModel) -> dict[str, Form]:
    """Form, by name of a parameter, in which it can stay as it is stored: that of all groups that fill it."""
    found: dict[str, Form | None] = {}
    for group, fmt in zip(model.groups, model.formats, strict=True):
        form = packed_form(group, [Source(group.name, fmt, ())])
        for target in group.targets:
            name = target.decl.name
            found[name] = form if found.get(name, form) == form else None
    return gated_alike({name: form for name, form in found.items() if form is not None})


def gated_alike(forms: Mapping[str, Form]) -> dict[str, Form]:
    """The forms, but for experts' gates that are stored otherwise than what they gate, and for that: operators multiply
    the two at once, in one form or decoded."""
    left = dict(forms)
    for stack in {name.rpartition(".")[0] for name in forms if name.endswith((".experts.gate", ".experts.up"))}:
        gate, up = f"{stack}.gate", f"{stack}.up"
        if forms.get(gate) != forms.get(up):
            left.pop(gate, None)
            left.pop(up, None)
    return left


def _kept(group: Group, fmt: Format, lines: Mapping[str, Line], forms: Mapping[str, Form]) -> Format:
    names = [target.decl.name for target in group.targets]
    if not fmt.quantized or names[0].startswith("extra."):
        return fmt
    if all(name in lines and forms.get(name) in lines[name].packed for name in names):
        return fmt
    return F32 if group.targets[0].decl.keep == "f32" else BF16


def expert_form(spec: ModelSpec, formats: Mapping[str, Format]) -> str:
    """In words, how the experts of some layers are kept; empty without any. formats: by parameter, as they are kept."""
    kept = [formats.get(f"layers.{i}.channel.experts.{MATRICES[0]}") for i in range(len(spec.layers))]
    words = [kept_as(fmt.form) for fmt in kept if fmt is not None]
    return ", ".join(dict.fromkeys(words))


def linear_form(forms: Iterable[Form], inputs: str) -> str:
    """In words, how many weights of linear layers stay as they are stored; empty where none does. forms: of each.
    inputs: what theirs are rounded to."""
    told = [f"{counted(count, 'weight')} {kept_as(form)}" for form, count in Counter(forms).items()]
    return f"{', '.join(told)}, inputs {inputs}" if told else ""


def kept_as(form: Form | None) -> str:
    return "decoded" if form is None else WORDS[form]
