"""The weight plan places every element exactly once; a wrong plan is caught by the proof."""

from dataclasses import replace

import pytest

from dayzero.checkpoint.rules import Fuse, Narrow, Rule, Split, expand
from dayzero.checkpoint.weight_plan import Box, WeightPlan, plan_rank, prove
from dayzero.decl import BF16, MXFP4_PACK, Cut, ParamDecl
from dayzero.parallel.cut import piece_of
from dayzero.parallel.mesh import Mesh

DECLS = [
    ParamDecl("embed", (42, 16), "embed", cuts=(Cut(0, "tp"),)),
    ParamDecl("layers.0.mixer.a", (48, 16), cuts=(Cut(0, "tp", 8),)),
    ParamDecl("layers.0.mixer.b", (8, 16), cuts=(Cut(0, "tp", 8, repeat=True),)),
    ParamDecl("layers.0.mixer.rate", (6,), "scalar", cuts=(Cut(0, "tp"),)),
    ParamDecl("layers.0.channel.gate", (12, 16), cuts=(Cut(0, "tp"),)),
    ParamDecl("layers.0.channel.up", (12, 16), cuts=(Cut(0, "tp"),)),
    ParamDecl("layers.0.channel.experts.gate", (6, 12, 32), cuts=(Cut(0, "ep"), Cut(1, "tp"))),
    ParamDecl("layers.0.fused", (8, 4)),
]
RULES = (
    Rule("emb.weight", "embed"),
    Split("l.{i}.ab.weight", ("layers.{i}.mixer.a", "layers.{i}.mixer.b")),
    Narrow("l.{i}.rate", "layers.{i}.mixer.rate", 16),
    Split("l.{i}.gate_up.weight", ("layers.{i}.channel.gate", "layers.{i}.channel.up"), interleaved=True),
    Rule("l.{i}.e.{e}.w1.weight", "layers.{i}.channel.experts.gate[{e}]"),
    Fuse(("l.{i}.x", "l.{i}.y"), "layers.{i}.fused"),
)


def plans(mesh: Mesh) -> tuple[list[WeightPlan], list[object]]:
    expansion = expand(DECLS, RULES)
    assert not expansion.without_rule and not expansion.filled_twice
    formats = [MXFP4_PACK if "w1" in g.name else BF16 for g in expansion.groups]

    def holder(rank: int) -> object:
        def held(decl: ParamDecl) -> Box:
            piece = piece_of(decl, mesh, mesh.place(rank))
            return piece.starts, piece.stops

        return held

    pieces = [holder(rank) for rank in range(mesh.num_ranks)]
    made = [plan_rank(expansion.groups, formats, rank, pieces[rank]) for rank in range(mesh.num_ranks)]  # type: ignore[arg-type]
    return made, pieces


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2), Mesh(tp=3), Mesh(tp=2, ep=2), Mesh(ep=3, dp=3)])
def test_every_element_exactly_once(mesh: Mesh) -> None:
    made, pieces = plans(mesh)
    proof = prove(DECLS, pieces, made)  # type: ignore[arg-type]
    assert proof.holds, (proof.gaps, proof.overlaps)
    assert proof.elements == sum(d.numel for d in DECLS)


def test_one_rank_reads_every_stored_byte_once() -> None:
    made, _ = plans(Mesh())
    plain = sum(d.numel for d in DECLS if "experts" not in d.name) * 2
    experts = 6 * 12 * (32 // 2 + 1)  # packed nibbles and one scale for 32 columns
    assert made[0].bytes_read == plain + experts


def test_interleaved_rows_are_read_with_a_stride() -> None:
    made, _ = plans(Mesh(tp=2))
    up = next(c for c in made[1].copies if c.param == "layers.0.channel.up")
    assert (up.source_box[0][0], up.source_box[1][0], up.step) == (13, 24, 2)
    assert up.param_box == ((0, 0), (6, 16))


@pytest.mark.parametrize("fault", ["dropped", "shifted", "twice"])
def test_a_wrong_plan_is_caught(fault: str) -> None:
    made, pieces = plans(Mesh(tp=2))
    copies = list(made[1].copies)
    at = next(i for i, c in enumerate(copies) if c.param == "layers.0.mixer.a")
    if fault == "dropped":
        del copies[at]
    elif fault == "shifted":
        starts, stops = copies[at].param_box
        copies[at] = replace(copies[at], param_box=((starts[0] + 1, starts[1]), (stops[0] + 1, stops[1])))
    else:
        copies.append(copies[at])
    made[1] = replace(made[1], copies=tuple(copies))
    proof = prove(DECLS, pieces, made)  # type: ignore[arg-type]
    assert not proof.holds
    assert "layers.0.mixer.a" in " ".join(proof.gaps + proof.overlaps)


def test_a_wrong_cut_is_caught() -> None:
    made, pieces = plans(Mesh(tp=2))

    def same_half(decl: ParamDecl) -> Box:
        return pieces[0](decl)  # type: ignore[operator,no-any-return]

    proof = prove(DECLS, [pieces[0], same_half], [made[0], made[0]])  # type: ignore[list-item]
    assert any("embed" in gap and "all ranks" in gap for gap in proof.gaps)
