"""/metrics of a running service, read by Prometheus' own parser: the names that dashboards scrape, and its counts."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.asks import ask
from tests.clients.service import Service
from tests.paper.test_server_metrics import HTTP, OWN, PROCESS, SHARED


def test_every_golden_name_is_there_with_its_type(service: Service) -> None:
    """The list is the one the scripted server is held to; a real engine may count more, under dayzero: alone."""
    assert service.post("/v1/chat/completions", ask(temperature=9999)).status_code == 400
    assert service.post("/v1/chat/completions", ask()).status_code == 200
    answer = service.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {family.name: family for family in text_string_to_metric_families(answer.text)}
    wanted = {f"{p}:{n}": kind for p in ("dayzero", "vllm") for kind, names in SHARED.items() for n in names}
    wanted |= {f"dayzero:{n}": kind for kind, names in OWN.items() for n in names}
    wanted |= {n: kind for kind, names in HTTP.items() for n in names}
    assert {name: found[name].type for name in wanted if name in found} == wanted
    assert set(found) >= PROCESS
    more = {name for name in found if name not in wanted and not name.startswith("process_")}
    assert all(name.startswith("dayzero:engine_") for name in more), more
    for name in wanted:
        assert found[name].documentation and found[name].samples, name
        if ":" in name:
            assert all("handler" in s.labels or s.labels["engine"] == "0" for s in found[name].samples), name


def test_the_numbers_are_those_of_the_answers(service: Service) -> None:
    names = ("prompt_tokens", "generation_tokens", "request_success", "prefix_cache_queries")
    before = {name: service.total(f"vllm:{name}") for name in names}
    steps = service.total("dayzero:engine_steps")
    answers: list[httpx.Response] = [service.post("/v1/chat/completions", ask(n=2, seed=seed)) for seed in range(3)]
    usages = [answer.json()["usage"] for answer in answers]
    now = {name: service.total(f"vllm:{name}") - before[name] for name in names}
    assert now["prompt_tokens"] == 2 * sum(usage["prompt_tokens"] for usage in usages)
    assert now["generation_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert now["request_success"] == 6
    assert now["prefix_cache_queries"] > 0
    assert service.total("dayzero:engine_steps") > steps
