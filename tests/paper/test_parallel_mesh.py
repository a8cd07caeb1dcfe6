"""Meshes and cuts: which rank holds what, and why a layout is refused."""

import pytest

from dayzero.decl import FP8_BLOCK, Cut, ParamDecl
from dayzero.parallel.cut import piece_of, why_not
from dayzero.parallel.mesh import Mesh

EXPERT = ParamDecl("layers.0.channel.experts.gate", (16, 96, 64), cuts=(Cut(0, "ep"), Cut(1, "tp")))


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        (Mesh(tp=4, ep=3), "ep 3 does not divide tp 4"),
        (Mesh(tp=4, ep=6, dp=3), "ep 6 is no multiple of tp 4"),
        (Mesh(tp=2, ep=8, dp=2), "ep 8 does not divide the 4 ranks"),
        (Mesh(tp=0), "tp must be at least 1"),
    ],
)
def test_illegal_sizes_say_why(mesh: Mesh, why: str) -> None:
    assert why in str(mesh.why_not())


@pytest.mark.parametrize(
    "mesh", [Mesh(tp=4, ep=2), Mesh(tp=4, ep=4, dp=2), Mesh(tp=2, ep=8, dp=4), Mesh(tp=2, ep=4, pp=2, cp=2)]
)
def test_experts_are_covered_once_on_each_replica(mesh: Mesh) -> None:
    assert mesh.why_not() is None
    held: dict[tuple[int, int, int], int] = {}
    for place in mesh.places():
        piece = piece_of(EXPERT, mesh, place)
        for expert in range(piece.starts[0], piece.stops[0]):
            for row in range(piece.starts[1], piece.stops[1]):
                held[place.stage, expert, row] = held.get((place.stage, expert, row), 0) + 1
    replicas = mesh.stage_ranks // max(mesh.ep, mesh.tp)
    assert len(held) == mesh.pp * 16 * 96
    assert set(held.values()) == {replicas}


def test_places_are_distinct_and_complete() -> None:
    mesh = Mesh(tp=3, pp=2, cp=2, dp=2)
    seen = {(p.stage, p.dp, p.cp, p.tp) for p in mesh.places()}
    assert len(seen) == mesh.num_ranks == 24


def test_heads_that_do_not_divide_are_refused_by_number() -> None:
    q = ParamDecl("layers.0.mixer.q", (9 * 64, 32), cuts=(Cut(0, "tp", 64),))
    assert "9 units of 64" in str(why_not(q, Mesh(tp=2), None))
    assert why_not(q, Mesh(tp=3), None) is None


def test_kv_heads_are_repeated_when_there_are_more_ranks() -> None:
    k = ParamDecl("layers.0.mixer.k", (2 * 16, 32), cuts=(Cut(0, "tp", 16, repeat=True),))
    assert why_not(k, Mesh(tp=8), None) is None
    rows = [piece_of(k, Mesh(tp=8), Mesh(tp=8).place(r)).starts[0] for r in range(8)]
    assert rows == [0, 0, 0, 0, 16, 16, 16, 16]
    assert "which 3 ranks do not divide" in str(why_not(k, Mesh(tp=3), None))


def test_scale_blocks_stay_whole() -> None:
    up = ParamDecl("layers.0.channel.up", (1536, 512), cuts=(Cut(0, "tp"),))
    assert why_not(up, Mesh(tp=12), FP8_BLOCK) is None
    assert "192" in str(why_not(up, Mesh(tp=8), FP8_BLOCK)) and "128-wide" in str(why_not(up, Mesh(tp=8), FP8_BLOCK))
    assert why_not(up, Mesh(tp=8), None) is None
