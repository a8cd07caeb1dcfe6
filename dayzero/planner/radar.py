"""Known families and the operator traits they carry: which recur, which are computed here, and which are fast here."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

from dayzero.decl import FORMATS
from dayzero.hardware import Hardware
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line, lacking
from dayzero.planner.inspect import InspectReport
from dayzero.planner.operators import Operators

Standing = Literal["fast", "reference", "wiring", "missing"]
STANDINGS: tuple[Standing, ...] = ("fast", "reference", "wiring", "missing")
NUM_NEAREST = 5


@dataclass(frozen=True, slots=True)
class Trait:
    """Something that operators, formats or the wiring of layers must be able to do. It rests on one of: contract (of
    the catalog, with options; also: others that show it), format (of stored weights), part (``module:Class.field`` of
    ``arch`` or ``decl``), needs (the name of what does not exist yet)."""

    name: str
    about: str
    contract: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    format: str = ""
    part: str = ""
    needs: str = ""

    @property
    def rests_on(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in self.options.items())
        return self.needs or self.part or self.format or self.contract + (f" ({options})" if options else "")


@dataclass(frozen=True, slots=True)
class Family:
    """One design. first_run_by: which engines ran it first, and how long after."""

    name: str
    date: str
    size: str
    context: str
    modality: str
    first_run_by: str
    traits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Radar:
    """sources: what the entries were read from."""

    traits: tuple[Trait, ...]
    families: tuple[Family, ...]
    sources: tuple[str, ...]

    def recurrence(self) -> dict[str, int]:
        """trait -> families that carry it, most frequent first."""
        counts = {trait.name: sum(trait.name in f.traits for f in self.families) for trait in self.traits}
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def read_radar() -> Radar:
    """The radar that comes with the package. ValueError for an entry that names no trait, or a trait twice."""
    data = tomllib.loads((files("dayzero.models") / "radar.toml").read_text("utf-8"))
    return radar_from(data)


def radar_from(data: Mapping[str, Any]) -> Radar:
    traits = tuple(
        Trait(name, **values | {"also": tuple(values.get("also", ()))}) for name, values in data["trait"].items()
    )
    known = {trait.name for trait in traits}
    families = tuple(Family(**{**entry, "traits": tuple(entry["traits"])}) for entry in data["family"])
    for family in families:
        strange = [name for name in family.traits if name not in known]
        if strange or len(set(family.traits)) < len(family.traits):
            raise ValueError(f"radar: {family.name} has the traits {family.traits}, of which {strange} are unknown")
    return Radar(traits, families, tuple(data["sources"]))


def standing(trait: Trait, hardware: Hardware, catalog: Catalog = CATALOG) -> Standing:
    """What there is for a trait on a device. ``fast``: a variant that is made for it, and that a plan would choose
    there, has it; ``reference``: it is computed, slowly; ``wiring``: it is no operator, and the architecture's data has
    it; ``missing``: nothing."""
    if trait.needs:
        return "missing"
    if trait.part:
        return "wiring" if _exists(trait.part) else "missing"
    if trait.format:
        if trait.format not in FORMATS:
            return "missing"
        form = FORMATS[trait.format].form
        taken = form is not None and any(
            form in line.packed and _fast(line, hardware) for line in catalog.lines.values()
        )
        return "fast" if taken else "reference"
    fitting = [line for line in catalog.lookup(trait.contract) if not lacking(line, trait.options)]
    return "fast" if any(_fast(line, hardware) for line in fitting) else "reference" if fitting else "missing"


def _fast(line: Line, hardware: Hardware) -> bool:
    """Whether the variant is made for the device. What runs anywhere is made of library calls: on an accelerator that
    is a stopgap."""
    targets = ("any", "cpu") if hardware.target == "cpu" else (hardware.target,)
    preferred = line.variant != REFERENCE and line.rank > 0
    return preferred and line.target in targets and hardware.features.issuperset(line.needs)


def _exists(part: str) -> bool:
    """Whether ``module:Class.field`` names something of ``arch`` (or ``decl``)."""
    module, _, path = part.partition(":")
    found: object = import_module("dayzero.decl" if module == "decl" else f"dayzero.arch.{module}")
    cls, _, attribute = path.partition(".")
    found = getattr(found, cls, None)
    return found is not None and (not attribute or attribute in getattr(found, "__dataclass_fields__", {}))


def carried(
    uses: Iterable[tuple[str, Mapping[str, object]]], formats: Iterable[str], traits: Iterable[Trait]
) -> list[str]:
    """Names of the traits that a model has by its operators (contract, options) and formats of storage. Wiring does not
    show in either."""
    used, stored = list(uses), set(formats)
    return [
        trait.name
        for trait in traits
        if trait.format in stored
        or any(
            contract in (trait.contract, *trait.also)
            and all(_same(options.get(k), v) for k, v in trait.options.items())
            for contract, options in used
        )
    ]


def _same(held: object, wanted: object) -> bool:
    """A width counts as the trait ``True``."""
    return (held not in (None, False)) if wanted is True else held == wanted


@dataclass(frozen=True)
class RadarReport:
    """radar on one device. standings: by trait. source: a config that was looked at, with the traits that show in its
    operators and formats, the three-way list of its operators, and the families that share most of these traits."""

    radar: Radar
    hardware: str
    standings: Mapping[str, Standing]
    source: str | None = None
    carries: tuple[str, ...] = ()
    operators: Operators = field(default_factory=dict)
    nearest: tuple[tuple[str, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        counts = self.radar.recurrence()
        out: dict[str, Any] = {
            "hardware": self.hardware,
            "sources": list(self.radar.sources),
            "traits": [
                {"trait": t.name, "about": t.about, "rests_on": t.rests_on, "families": counts[t.name],
                 "standing": self.standings[t.name]}
                for t in self.radar.traits
            ],
            "families": [
                {"name": f.name, "date": f.date, "size": f.size, "context": f.context, "modality": f.modality,
                 "first_run_by": f.first_run_by, "traits": list(f.traits)}
                for f in self.radar.families
            ],
        }  # fmt: skip
        if self.source is not None:
            out |= {
                "source": self.source, "carries": list(self.carries), "operators": self.operators,
                "nearest": [{"family": name, "shared": shared} for name, shared in self.nearest],
            }  # fmt: skip
        return out


def report_on(radar: Radar, hardware: Hardware, catalog: Catalog, seen: InspectReport | None = None) -> RadarReport:
    """seen: what an inspection found of a config that is to be placed on the radar."""
    standings = {trait.name: standing(trait, hardware, catalog) for trait in radar.traits}
    if seen is None:
        return RadarReport(radar, hardware.name, standings)
    listed = [entry for kind in ("reuse", "extend", "build") for entry in seen.operators.get(kind, ())]
    uses = [(str(entry["contract"]), dict(entry.get("traits", {}))) for entry in listed]
    carries = tuple(carried(uses, _formats(seen), radar.traits))
    shared = {family.name: len(set(carries) & set(family.traits)) for family in radar.families}
    nearest = sorted(((name, n) for name, n in shared.items() if n), key=lambda item: -item[1])[:NUM_NEAREST]
    return RadarReport(radar, hardware.name, standings, seen.source, carries, seen.operators, tuple(nearest))


def _formats(seen: InspectReport) -> list[str]:
    """Names of the formats in which tensors are stored."""
    return list(seen.quantization.get("formats", ()))
