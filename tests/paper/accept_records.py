"""Records of acceptances made by hand, as ``accept/record.py`` writes them, for tests of what reads them."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from dayzero.acceptance.accept.digest import digest_of, outcome_of
from dayzero.finding import VERDICTS, Finding, worst


def finding(
    verdict: str = "pass", kind: str = "tensors.missing", layer: str = "weights", **more: Any
) -> dict[str, Any]:
    """JSON of one finding; ``more`` are its other fields."""
    words = {"claim": f"{kind} holds", "remedy": "" if verdict in ("pass", "not applicable") else "Look again."}
    return Finding(kind, layer, verdict, **(words | more)).to_json()  # type: ignore[arg-type]


def figure(kind: str, data: dict[str, Any], title: str = "A figure", **more: Any) -> dict[str, Any]:
    words = {"x_label": "", "y_label": "", "log_x": False, "log_y": False}
    return {"kind": kind, "title": title, "data": data} | words | more


def stage(
    name: str, findings: list[dict[str, Any]], figures: tuple[dict[str, Any], ...] = (), **more: Any
) -> dict[str, Any]:
    listed = [Finding(**{**one, "evidence": tuple(one["evidence"])}) for one in findings]
    absent = all(one.verdict == "not applicable" for one in listed)
    return {
        "name": name,
        "title": name.replace("_", " ").capitalize(),
        "verdict": "not applicable" if absent else worst(listed),
        "counts": {verdict: sum(one.verdict == verdict for one in listed) for verdict in VERDICTS},
        "began": "2026-07-01T09:00:00+00:00",
        "seconds": 3.25,
        "taken": False,
        "findings": findings,
        "figures": list(figures),
        "facts": {},
        "samples": {},
    } | more


def record(*stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    findings = [Finding(**{**one, "evidence": tuple(one["evidence"])}) for part in stages for one in part["findings"]]
    seen = Counter(one.verdict for one in findings)
    subject = {"source": "models/nova-small", "url": None, "model": "nova-small", "recipe": None, "serve": []}
    content = {
        "schema": 1,
        "verdict": worst(findings),
        "complete": True,
        "subject": subject,
        "profile": "quick",
        "seed": 0,
        "counts": {verdict: seen[verdict] for verdict in VERDICTS},
        "began": "2026-07-01T09:00:00+00:00",
        "ended": "2026-07-01T09:06:12+00:00",
        "seconds": 372.0,
        "protocol": {
            "subject": subject | {"config_sha256": "9f2c" * 16, "template_sha256": "ab01" * 16},
            "profile": "quick",
            "seed": 0,
            "left_out": [],
            "package": {"name": "dayzero", "version": "0.4.0", "commit": "4488ec2" + "0" * 33, "changed": False},
            "versions": {"python": "3.11.2", "torch": "2.13.0"},
            "machine": {
                "cpu": "A processor",
                "cpus": 2,
                "memory_bytes": 25769803776,
                "accelerator": None,
                "num_accelerators": 0,
                "features": ["avx2", "avx512"],
            },
            "service": {"family": "nova", "dtype": "float32"},
        },
        "stages": list(stages),
    }
    content = content | more
    return content | {"digest": digest_of(content), "outcome": outcome_of(content)}


def showcase() -> dict[str, Any]:
    """One with every verdict, every layer at fault and every kind of figure, as a run could have left it."""
    draw = random.Random(7)
    return record(_weights(draw), _numerics(draw), _long_context(), _performance(draw), _robustness(draw), _contract())


def _weights(draw: random.Random) -> dict[str, Any]:
    passing = [
        finding("pass", f"weights.{word}", claim=claim)
        for word, claim in (
            ("hashes", "every file has the hash that the publisher states"),
            ("coverage", "every tensor of the checkpoint fills a parameter or is ignored with a reason"),
            ("statistics", "no matrix is constant, and none holds a value that is not finite"),
            ("norms", "every norm's mean lies where its recipe says"),
        )
    ]
    told = finding(
        "fail",
        "quantization.scale",
        "weights",
        claim="every scale of a quantised matrix is a power of two",
        measured="3 of 512 scales are not: 0.75, 1.5, 0.375",
        bound="0 of 512",
        evidence=[f"model.layers.{at}.mlp.experts.7.down_proj.weight_scale" for at in (3, 4, 11)],
        remedy="Fetch shard 2 again (dayzero inspect --hash says whether it is whole), then ask the publisher.",
    )
    note = finding(
        "note",
        "config.defaulted",
        "config",
        claim="3 keys are absent and take the class's default",
        measured="rms_norm_eps, rope_theta, tie_word_embeddings",
        remedy="Compare with the publisher's code.",
    )
    return stage(
        "weights",
        [*passing, told, note],
        facts={"family": "nova", "parameters": {"total": 4_689_504, "active": 2_778_912}},
    )


def _numerics(draw: random.Random) -> dict[str, Any]:
    rungs = [("embed", 2e-8), *((f"layers.{n // 2}.{'mixer' if n % 2 == 0 else 'channel'}", 3e-7) for n in range(16))]
    rows = [
        {"name": name, "value": base * draw.uniform(0.4, 2.5), "bound": 4e-6, "verdict": "pass"} for name, base in rungs
    ]
    rows[0]["value"] = 0.0
    rows[9] |= {"value": 3.1e-2, "verdict": "fail"}
    long = [
        {
            "name": f"layers.{n // 3}.{('mixer', 'channel', 'carry')[n % 3]}",
            "bound": 4e-6 * (1 + n / 60),
            "value": 2e-7 * draw.uniform(0.3, 3) * (1 + n / 40),
            "verdict": "pass",
        }
        for n in range(183)
    ]
    for at in (120, 121, 124):
        long[at] |= {"value": 7e-4 * (at - 118), "verdict": "fail"}
    long[60] |= {"value": 4e-6, "verdict": "note"}
    edges = [10 ** (-8 + at / 4) for at in range(21)]
    counts = [round(400 * math.exp(-(((at - 9) / 4) ** 2))) for at in range(20)]
    figures = (
        figure("ladder", {"rows": rows}, "Error by module, on the twin", x_label="relative L2 to the oracle"),
        figure("ladder", {"rows": long}, "Error by module, on the weights", y_label="relative L2 to the oracle"),
        figure(
            "histogram",
            {
                "edges": edges,
                "counts": counts,
                "marks": {"mean": 3.2e-6, "p99": 8e-5, "max": 4e-4, "noise floor": 1.1e-6},
            },
            "KL to the oracle, by token",
            x_label="KL, nat",
            y_label="tokens",
            log_x=True,
        ),
    )
    told = finding(
        "fail",
        "numerics.module",
        "operator",
        claim="layers.4.mixer is the first module that diverges from the oracle",
        measured="relative L2 3.10e-02, worst token 9.2e-02 (token 17), first wrong token 4",
        bound="4.0e-06: 12 sums of 96 in float32",
        evidence=[f"layers.{n}.mixer" for n in range(4, 12)],
        remedy="Look at the rope's style and at the width that it turns.",
    )
    rest = [
        finding(
            "pass",
            "numerics.perplexity",
            "operator",
            claim="perplexity is the oracle's",
            measured=14.2211,
            bound=14.2209,
        )
    ]
    rest += [
        finding(
            "not applicable",
            "numerics.real_weights",
            "weights",
            claim="real weights agree with the oracle",
            measured="the source is seeded from a config: there are no real weights (twin only)",
        )
    ]
    return stage("numerics", [told, *rest], figures)


def _long_context() -> dict[str, Any]:
    depths, lengths = [f"{at}%" for at in (0, 25, 50, 75, 100)], [256, 512, 1024, 2048, 4096, 8192]
    values: list[list[float | None]] = [[1.0] * 6 for _ in depths]
    values[2][4], values[3][4], values[2][5], values[1][5], values[4][5] = 0.9, 0.75, 0.4, 0.0, None
    wide = [[math.sin(a / 9) ** 2 if (a + b) % 29 else None for a in range(40)] for b in range(24)]
    figures = (
        figure(
            "heat",
            {"rows": depths, "columns": [str(n) for n in lengths], "values": values},
            "Needle found, by depth and length",
            x_label="tokens of context",
            y_label="depth of the needle",
        ),
        figure(
            "heat",
            {"rows": [f"layer {b}" for b in range(24)], "columns": [f"expert {a}" for a in range(40)], "values": wide},
            "Agreement of expert sets",
        ),
    )
    told = finding(
        "fail",
        "long_context.needle",
        "cache",
        claim="a needle is found at every depth and length",
        measured="found in 88 % of 145 tries",
        bound="95 %",
        evidence=["depth 25%, 8192 tokens", "depth 50%, 8192 tokens"],
        remedy="Run dayzero accept --stages equalities: chunks and pages are held against each other there.",
    )
    return stage(
        "long_context",
        [
            told,
            finding(
                "pass",
                "long_context.memory",
                "cache",
                claim="peak memory is what the plan said",
                measured="1.02 GiB",
                bound="1.10 GiB",
            ),
        ],
        figures,
    )


def _performance(draw: random.Random) -> dict[str, Any]:
    xs = [1, 2, 4, 8, 16, 32]
    figures = (
        figure(
            "curves",
            {
                "x": xs,
                "series": {"TTFT p50": [42, 44, 51, 70, 122, 260], "TTFT p99": [51, 60, 88, 150, 300, 720]},
                "bounds": {"limit": 500},
            },
            "Time to first token",
            x_label="requests at a time",
            y_label="ms",
            log_x=True,
            log_y=True,
        ),
        figure(
            "curves",
            {
                "x": xs,
                "series": {"TPOT mean": [21, 21.5, 23, 27, 38, None], "gap p99": [24, 26, 31, 44, 71, 140]},
                "bounds": {},
            },
            "Time of a token",
            x_label="requests at a time",
            y_label="ms",
            log_x=True,
        ),
        figure(
            "bars",
            {
                "rows": [
                    {"name": name, "value": value, "bound": 0.6}
                    for name, value in (
                        ("attention.decode", 0.71),
                        ("attention.prefill", 0.64),
                        ("moe.experts", 0.38),
                        ("linear", 0.83),
                        ("norm", 0.55),
                    )
                ]
            },
            "Share of the roofline, by operator",
            x_label="share",
        ),
    )
    told = finding(
        "note",
        "performance.roofline",
        "compiler",
        claim="every operator reaches 0.6 of its floor",
        measured="moe.experts 0.38, norm 0.55",
        bound=0.6,
        remedy="dayzero profile names the kernels.",
    )
    return stage(
        "performance",
        [
            told,
            *(
                finding(
                    "pass",
                    f"performance.{n}",
                    "scheduler",
                    claim=f"level {n} is served",
                    measured=draw.uniform(100, 900),
                )
                for n in (1, 4, 16)
            ),
        ],
        figures,
    )


def _robustness(draw: random.Random) -> dict[str, Any]:
    xs = [round(at * 0.5, 1) for at in range(2400)]
    resident = [812 + 30 * (1 - math.exp(-x / 90)) + draw.gauss(0, 1.5) for x in xs]
    used = [300 + 120 * abs(math.sin(x / 60)) for x in xs]
    figures = (
        figure(
            "curves",
            {"x": xs, "series": {"resident": resident, "blocks in use": used}, "bounds": {"plan": 900}},
            "Memory over time",
            x_label="seconds",
            y_label="MiB",
        ),
    )
    return stage(
        "robustness",
        [
            finding("pass", f"robustness.{word}", layer, claim=claim)
            for word, layer, claim in (
                ("slope", "cache", "memory does not grow over the soak"),
                ("abort", "scheduler", "aborted requests give their blocks back"),
                ("frozen", "server", "a frozen engine is told to clients within its limit"),
            )
        ],
        figures,
    )


def _contract() -> dict[str, Any]:
    words = ("models", "chat", "stream", "stop", "usage", "logprobs", "tools", "errors", "unicode", "messages")
    passing = [
        finding("pass", f"contract.{word}", "server", claim=f"/v1 answers as the API says: {word}") for word in words
    ]
    absent = [
        finding(
            "not applicable",
            f"contract.{word}",
            "server",
            claim=f"/v1 takes {word}",
            measured=f"the model has no {word}",
        )
        for word in ("images", "audio")
    ]
    return stage("contract", passing + absent)
