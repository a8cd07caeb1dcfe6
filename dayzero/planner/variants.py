"""Which variant each operator of a plan runs, and what a plan takes from measured tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from dayzero.decl import OpUse
from dayzero.finding import Finding
from dayzero.hardware import Hardware
from dayzero.ops.bindings import chosen, variant_at
from dayzero.ops.catalog import REFERENCE, Catalog
from dayzero.ops.experts_tables import TABLES, Run
from dayzero.ops.tiles import CROSSOVER
from dayzero.units import counted

_EXPERTS, _SPARSE = "moe.experts", "attention.sparse"
ONCE = frozenset({"latent.absorb"})  # done while weights are loaded, not in a step
TILED = {"triton", "cuda"}  # variants of experts that run by the table, if not for very few tokens


def variant_of(use: OpUse, bindings: Mapping[str, str]) -> str:
    """The name of the variant that a use gets."""
    return variant_at(use.contract, use.site, bindings)


def called(bindings: Mapping[str, str], uses: Iterable[OpUse]) -> list[OpUse]:
    """Uses whose operator is called: no composed one that is left to its parts, no part that such a one stands for."""
    uses, stood_for, out = tuple(uses), defaultdict[str, list[bool]](list), []
    for use in uses:
        for part in use.parts:  # by each composed use that names it, or by none
            stood_for[part].append(part not in use.beside and variant_of(use, bindings) != REFERENCE)
    for use in uses:
        if use.parts:  # the first layer's sum and norm stand for nothing: there is no sum
            stands = variant_of(use, bindings) != REFERENCE and set(use.parts) > set(use.beside)
        else:
            stands = not (use.place in stood_for and all(stood_for[use.place]))
        if stands:
            out.append(use)
    return out


def by_contract(bindings: Mapping[str, str], uses: Iterable[OpUse]) -> dict[str, dict[str, list[str]]]:
    """contract -> variant -> the sites that run it, of what is called; contracts in the order of their names."""
    found: dict[str, dict[str, list[str]]] = {}
    for use in called(bindings, uses):
        found.setdefault(use.contract, {}).setdefault(variant_of(use, bindings), []).append(use.site)
    return dict(sorted(found.items()))


def binding_rows(bindings: Mapping[str, str], uses: Iterable[OpUse]) -> list[tuple[str, str]]:
    """One row a contract: which variants it runs, at how many sites each."""
    return [
        (
            f"operator {contract}",
            ", ".join(f"{variant} at {counted(len(s), 'site')}" for variant, s in variants.items()),
        )
        for contract, variants in by_contract(bindings, uses).items()
    ]


def binds_ring(bindings: Mapping[str, str], uses: Iterable[OpUse], catalog: Catalog) -> bool:
    """Whether some site converts its experts in the rank's ring."""
    return any(chosen(use.contract, use.site, bindings, catalog).ring for use in uses)


def reference_findings(bindings: Mapping[str, str], uses: Iterable[OpUse], hardware: Hardware) -> list[Finding]:
    """A note that names the operators that run their slow references on an accelerator; nothing on a CPU."""
    if hardware.target == "cpu":
        return []
    slow = {
        contract: variants[REFERENCE]
        for contract, variants in by_contract(bindings, uses).items()
        if REFERENCE in variants and contract not in ONCE
    }
    if not slow:
        return []
    evidence = tuple(f"{contract}: {counted(len(sites), 'site')}, first {sites[0]}" for contract, sites in slow.items())
    return [
        Finding(
            "plan.operators", "operator", "note",
            f"operators without a variant for {hardware.name} run their references, in float64",
            f"{counted(len(slow), 'operator')} at {counted(sum(map(len, slow.values())), 'site')}", 0, evidence,
            "expect them to dominate a step; `dayzero profile` says by how much",
        )
    ]  # fmt: skip


def measured_rows(
    bindings: Mapping[str, str], uses: Iterable[OpUse], hardware: Hardware, expert_bits: int
) -> list[tuple[str, str]]:
    """What stored measurements decide on this device: how products of experts run by rows, and until when attention to
    listed rows is masked. Says so where the device's own were never taken. expert_bits: of their codes where they are
    kept packed, else 0."""
    uses, rows = tuple(uses), []
    grouped = {use.contract for use in uses if use.contract.startswith(_EXPERTS) and variant_of(use, bindings) in TILED}
    packed = f"w{expert_bits}" if expert_bits else ""
    for form in sorted((packed + ("" if contract == _EXPERTS else "a8") if packed else "bf16") for contract in grouped):
        word = hardware.name if hardware.name in TABLES else next(iter(TABLES))
        rows.append((f"experts in {form}", f"{_runs(TABLES[word][form])}{_of(word, hardware)}"))
    sparse = [use for use in uses if use.contract == _SPARSE and variant_of(use, bindings) != REFERENCE]
    for form in sorted({"latent" if dict(use.traits).get("latent") else "grouped" for use in sparse}):
        word = (
            hardware.target if hardware.target in CROSSOVER else hardware.name if hardware.name in CROSSOVER else "h200"
        )
        most = CROSSOVER[word][form]
        said = f"masked up to {most:g} × the list's rows, then gathered" if most else "always gathered"
        rows.append((f"listed attention, {form}", f"{said}{_of(word, hardware)}"))
    return rows


def _of(word: str, hardware: Hardware) -> str:
    return "" if word in (hardware.name, hardware.target) else f" (measured on {word}, not on {hardware.name})"


def _runs(runs: tuple[Run, ...]) -> str:
    first = f"tiles of {runs[0].rows} rows"
    return "; ".join(
        [first, *(f"of {after.rows} from {before.below:g} rows an expert" for before, after in pairwise(runs))]
    )
