"""deploy/ and docs/operations.md, read without a network: every metric, path and number in them exists here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dayzero.commands.serve import API_KEY
from dayzero.engine.scheduler import _COUNTERS
from dayzero.server.routes import ROUTES
from tests.paper.command_lines import check_call
from tests.paper.server_support import ScriptedEngine, ask, client, make

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
PATHS = {route.path for route in ROUTES}
PROMQL_WORDS = {"by", "on", "and", "or", "unless", "without", "ignoring", "group_left", "bool", "offset"}


@cache
def exposed() -> dict[str, set[str]]:
    """Name of each sample that /metrics can show -> its labels."""
    counters = dict.fromkeys((*_COUNTERS, "preemptions", "evictions", "snapshots_taken", "snapshots_restored"), 1.0)
    world = make(ScriptedEngine(counters=counters))
    client(world).post("/v1/chat/completions", json=ask(max_tokens=-1))
    out: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(client(world).get("/metrics").text):
        for sample in family.samples:
            out.setdefault(sample.name, set()).update(sample.labels)
    return out


def selectors(expr: str) -> Iterator[tuple[str, set[str]]]:
    """(metric, labels asked of it) in a PromQL expression."""
    text = re.sub(r'"[^"]*"', '""', expr)
    text = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    for found in re.finditer(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(\s*\()?", text):
        name, labels, call = found.groups()
        if not call and name not in PROMQL_WORDS:
            yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels or ""))


def wrong(expr: str) -> list[str]:
    """What an expression asks for that no dayzero server shows."""
    out = []
    for name, labels in selectors(expr):
        if name not in exposed():
            out.append(name)
        elif labels - exposed()[name] - SCRAPED:
            out.append(f"{name}{{{', '.join(labels - exposed()[name])}}}")
    return out


@pytest.mark.parametrize(
    ("expr", "found"),
    [
        ("sum by (le) (rate(dayzero:engine_steps_total[5m])) > 2", []),
        ("dayzero:engine_steps > 0", ["dayzero:engine_steps"]),  # a counter ends in _total
        ('rate(http_requests_total{code="5xx"}[5m])', ["http_requests_total{code}"]),
        ('vllm:nothing{a="b"} and dayzero:engine_ready{instance="x"}', ["vllm:nothing"]),
        ("time() - dayzero:engine_last_step_timestamp_seconds > 1", []),
    ],
)
def test_the_reader_of_expressions(expr: str, found: list[str]) -> None:
    assert wrong(expr) == found


# --- alerts and dashboard


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text(encoding="utf-8"))["groups"]
    assert group["name"] == "dayzero"
    return list(group["rules"])


def test_rules_ask_for_what_is_there() -> None:
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert wrong(rule["expr"]) == [], rule["alert"]
        assert list(selectors(rule["expr"])), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_what_must_wake_somebody_has_an_alert() -> None:
    asked = {name for rule in rules() for name, _ in selectors(rule["expr"])}
    assert asked >= {
        "dayzero:engine_healthy", "dayzero:engine_stalled", "dayzero:corrupted_requests_total",
        "dayzero:num_requests_waiting", "dayzero:kv_cache_usage_perc", "dayzero:time_to_first_token_seconds_bucket",
        "http_requests_total", "dayzero:engine_deaths_total",
    }  # fmt: skip


def test_every_alert_is_explained_and_no_other() -> None:
    named = {rule["alert"] for rule in rules()}
    assert set(re.findall(r"^### (Dayzero\w+)$", OPERATIONS, re.M)) == named


def test_the_dashboard_asks_for_what_is_there() -> None:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    for panel in panels:
        assert panel["targets"] and panel["title"] and panel["description"]
        for target in panel["targets"]:
            assert wrong(target["expr"]) == [], panel["title"]
    for variable in board["templating"]["list"]:
        for metric in re.findall(r"label_values\(([\w:]+)", variable["query"]):
            assert metric in exposed()


def test_panels_do_not_overlap() -> None:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


# --- docs/operations.md


def test_metrics_and_paths_named_in_the_text_exist() -> None:
    named = set(re.findall(r"`((?:dayzero|vllm):\w+|http_\w+|process_\w+)", OPERATIONS))
    assert len(named) > 20
    assert not {name for name in named if name not in exposed() and f"{name}_bucket" not in exposed()}
    paths = set(re.findall(r"`(/[a-z_0-9/]+)`", OPERATIONS)) - {"/v1"}
    assert {"/health", "/ready", "/progress", "/metrics"} <= paths
    assert paths <= PATHS


def test_the_table_of_metrics_is_complete() -> None:
    """Every gauge, counter and histogram that is ours; names as scraped, a histogram without its endings."""
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed() if name.startswith("dayzero:")}
    rows = {name for row in re.findall(r"^\|(.*?)\|", OPERATIONS, re.M) for name in re.findall(r"`(dayzero:\w+)`", row)}
    histograms = {name for name in rows if f"{name}_bucket" in exposed()}
    assert ours - rows == set(), "missing in docs/operations.md"
    assert rows - histograms <= set(exposed())


# --- Kubernetes


def documents() -> dict[str, dict[str, Any]]:
    parsed = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in parsed}


def container() -> dict[str, Any]:
    (found,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def argument(name: str) -> str:
    return next(str(word).partition("=")[2] for word in container()["args"] if word.startswith(f"--{name}="))


def test_the_manifest_starts_what_exists() -> None:
    check_call([str(word) for word in container()["args"]])
    assert [entry["name"] for entry in container()["env"]] == [API_KEY]


def test_probes_ask_what_they_should() -> None:
    probes = {kind: container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/ready", "liveness": "/health", "readiness": "/ready"}
    assert set(probes.values()) <= PATHS
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": int(argument("port"))}
    assert {container()[f"{kind}Probe"]["httpGet"]["port"] for kind in probes} == {"http"}
    liveness = container()["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > float(argument("stall-seconds"))


def test_the_pod_is_given_time_to_drain() -> None:
    """preStop, the drain, and 10 s for the engine and for connections that are open still."""
    pod = documents()["Deployment"]["spec"]["template"]["spec"]
    before = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = before + float(argument("drain-seconds")) + 10
    assert needed <= pod["terminationGracePeriodSeconds"] <= 2 * needed


def test_the_pod_may_do_little() -> None:
    pod = documents()["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    own = container()["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert container()["resources"]["requests"]["memory"] == container()["resources"]["limits"]["memory"]
    assert not container()["image"].endswith(":latest") and ":" in container()["image"]
    mounts, volumes = container()["volumeMounts"], {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in mounts} == volumes
    assert str(container()["args"][1]).startswith(next(m["mountPath"] for m in mounts if m["name"] == "models"))


def test_the_service_selects_the_pods() -> None:
    deployment, service = documents()["Deployment"]["spec"], documents()["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == deployment["selector"]["matchLabels"] == labels
    assert service["ports"][0]["targetPort"] == "http"
    scraped = deployment["template"]["metadata"]["annotations"]
    assert scraped["prometheus.io/path"] in PATHS and scraped["prometheus.io/port"] == argument("port")


# --- the image


KNOWN = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT",
         "CMD", "LABEL", "VOLUME"}  # fmt: skip


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) in order; comments go, continued lines are joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(w[0].upper(), w[1] if len(w) > 1 else "") for line in joined.splitlines() if (w := line.split(None, 1))]


def lint(text: str) -> list[str]:
    """What is wrong with a Containerfile: the rules that a linter of such files has, as far as they matter here."""
    found, steps = [], instructions(text)
    stages = [i for i, (name, _) in enumerate(steps) if name == "FROM"]
    last = steps[stages[-1] :] if stages else steps
    found += [f"unknown instruction {name}" for name, _ in steps if name not in KNOWN]
    for name, rest in steps:
        image = rest.split()[0] if name == "FROM" else "x:1"
        if ":" not in image or image.endswith(":latest"):
            found.append(f"image without a version: {rest}")
        if name in ("CMD", "ENTRYPOINT") and not rest.strip().startswith("["):
            found.append(f"{name} is no JSON list")
        if name == "WORKDIR" and not rest.startswith("/"):
            found.append("WORKDIR is relative")
        if name == "RUN" and "apt-get install" in rest:
            found += [
                f"apt-get without {w}"
                for w in ("--no-install-recommends", "-y", "rm -rf /var/lib/apt/lists")
                if w not in rest
            ]
        if (
            name == "RUN"
            and "pip install" in rest
            and ("--no-cache-dir" not in rest or "-c constraints.txt" not in rest)
        ):
            found.append("pip install keeps a cache or pins nothing")
        if name == "RUN" and re.search(r"\b(sudo|curl|wget)\b|apt-get upgrade", rest):
            found.append(f"RUN {rest[:40]}")
    users = [rest for name, rest in last if name == "USER"]
    if not users or users[-1].split(":")[0] in ("0", "root"):
        found.append("runs as root")
    names = [name for name, _ in last]
    found += [f"no {name}" for name in ("HEALTHCHECK", "EXPOSE", "ENTRYPOINT") if name not in names]
    if names.count("CMD") > 1 or names.count("ENTRYPOINT") > 1:
        found.append("CMD or ENTRYPOINT twice")
    return found


CONTAINERFILE = (DEPLOY / "Containerfile").read_text(encoding="utf-8")


def test_the_image_is_clean() -> None:
    assert lint(CONTAINERFILE) == []


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("USER 10001:10001", "USER root", "runs as root"),
        ("USER 10001:10001", "", "runs as root"),
        ("FROM python:3.11-slim\n", "FROM python\n", "without a version"),
        ('ENTRYPOINT ["dayzero"]', "ENTRYPOINT dayzero", "no JSON list"),
        (" --no-install-recommends", "", "--no-install-recommends"),
        (" --no-cache-dir", "", "pip install"),
        (" -c constraints.txt", "", "pip install"),
        ("HEALTHCHECK", "# HEALTHCHECK", "no HEALTHCHECK"),
        ("WORKDIR /srv/dayzero", "WORKDIR srv", "relative"),
        ("EXPOSE 8000", "MAINTAINER x", "unknown instruction"),
    ],
)
def test_the_lint_sees_faults(before: str, after: str, said: str) -> None:
    assert before in CONTAINERFILE
    assert any(said in line for line in lint(CONTAINERFILE.replace(before, after)))


def test_the_image_runs_what_exists() -> None:
    steps = dict(instructions(CONTAINERFILE))
    entry, command = json.loads(steps["ENTRYPOINT"]), json.loads(steps["CMD"])
    assert entry == ["dayzero"]
    check_call(command)
    assert steps["EXPOSE"] == command[command.index("--port") + 1] == "8000"
    assert command[command.index("--host") + 1] == "0.0.0.0"
    asked = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", steps["HEALTHCHECK"])
    assert asked == ["/health"] and set(asked) <= PATHS
    health = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    compile(health[-1], "healthcheck", "exec")
    for name, rest in instructions(CONTAINERFILE):
        if name == "COPY" and not rest.startswith("--from"):
            assert all((ROOT / part).exists() for part in rest.split()[:-1]), rest


def test_image_and_pod_agree() -> None:
    pod = documents()["Deployment"]["spec"]["template"]["spec"]
    user = dict(instructions(CONTAINERFILE))["USER"].split(":")
    assert user == [str(pod["securityContext"][name]) for name in ("runAsUser", "runAsGroup")]
    mounted = {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert f"{dict(instructions(CONTAINERFILE))['WORKDIR']}/.cache" in mounted
