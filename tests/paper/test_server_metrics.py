"""/metrics against a list of names, and that the numbers are those of the requests."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.paper.server_support import ScriptedEngine, World, ask, client, ids, make

CHAT = "/v1/chat/completions"
# What dashboards and gateways scrape, type by type; each is there under both prefixes.
SHARED = {
    "gauge": {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc",
        "cache_config_info", "engine_healthy",
    },
    "counter": {
        "prompt_tokens", "generation_tokens", "request_success", "num_preemptions", "prefix_cache_queries",
        "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries",
        "mm_cache_hits", "corrupted_requests", "admission_rejections", "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
    },
    "histogram": {
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens",
        "request_params_max_tokens", "request_params_n", "iteration_tokens_total",
    },
}  # fmt: skip
OWN = {
    "gauge": {
        "engine_stalled", "engine_ready", "engine_last_step_timestamp_seconds", "engine_slowest_step_seconds",
        "engine_host_share", "weights_loaded_bytes", "weights_to_load_bytes",
    },
    "counter": {
        "engine_steps", "engine_deaths", "requests_client_gone", "requests_with_ignored_fields", "tool_problems",
        "http_errors", "engine_recomputed_tokens",
    },
}  # fmt: skip
HTTP = {"counter": {"http_requests"}, "histogram": {"http_request_duration_seconds"}}
PROCESS = {"process_start_time_seconds", "process_resident_memory_bytes"}


Families = dict[str, tuple[str, dict[Any, float]]]


def families(world: World) -> Families:
    """name -> (type, labels -> value of its plain samples)."""
    out = {}
    for family in text_string_to_metric_families(client(world).get("/metrics").text):
        assert family.name not in out, f"{family.name} is there twice"
        values = {(s.name.removeprefix(family.name), *sorted(s.labels.items())): s.value for s in family.samples}
        out[family.name] = (family.type, values)
    return out


def total(found: Families, name: str, suffix: str = "", **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for key, value in found[name][1].items() if key[0] == suffix and wanted <= set(key[1:]))


def test_every_name_that_is_scraped_is_there_and_no_other() -> None:
    world = make(ScriptedEngine(counters={"preemptions": 1, "recomputed_tokens": 5, "steps": 7}))
    client(world).post(CHAT, json=ask(max_tokens=-1))
    wanted = {f"{p}:{n}": kind for p in ("dayzero", "vllm") for kind, names in SHARED.items() for n in names}
    wanted |= {f"dayzero:{n}": kind for kind, names in OWN.items() for n in names}
    wanted |= {n: kind for kind, names in HTTP.items() for n in names}
    found = {name: kind for name, (kind, _) in families(world).items()}
    process = {name for name in found if name.startswith("process_")}
    assert process >= PROCESS
    assert {name: kind for name, kind in found.items() if name not in process} == wanted


def test_labels_do_not_grow_with_what_clients_send() -> None:
    world = make()
    web = client(world)
    for number in range(20):
        web.get(f"/v1/models/x{number}")
        web.get(f"/path{number}")
        web.request(f"VERB{number}", "/health")
        web.post(CHAT, json=ask(model=f"m{number}"))
    for name, (_, values) in families(world).items():
        assert len(values) <= 200, name
        for key in values:
            labels = dict(key[1:])
            if ":" in name and "handler" not in labels and "le" not in labels:
                assert labels["model_name"] == "tiny"
                assert labels["engine"] == "0"
    found = families(world)
    assert total(found, "http_requests", "_total", handler="other", method="GET", status="4xx") == 20
    assert total(found, "http_requests", "_total", handler="/health", method="other", status="4xx") == 20
    assert total(found, "http_requests", "_total", handler="/v1/models/{model:path}", status="4xx") == 20
    assert total(found, "dayzero:http_errors", "_total", handler=CHAT, code="404") == 20


def test_numbers_are_those_of_the_requests() -> None:
    world = make(ScriptedEngine(reply=lambda request: ids("four"), pieces=2))
    web = client(world)
    usage = web.post(CHAT, json=ask(n=2)).json()["usage"]
    web.post(CHAT, json=ask(max_tokens=2, foo=1))
    found = families(world)
    for prefix in ("vllm:", "dayzero:"):
        assert total(found, f"{prefix}prompt_tokens", "_total") == 3 * usage["prompt_tokens"]
        assert total(found, f"{prefix}generation_tokens", "_total") == usage["completion_tokens"] + 2
        assert total(found, f"{prefix}request_success", "_total", finished_reason="stop") == 2
        assert total(found, f"{prefix}request_success", "_total", finished_reason="length") == 1
        assert total(found, f"{prefix}request_success", "_total", finished_reason="abort") == 0
        assert total(found, f"{prefix}e2e_request_latency_seconds", "_count") == 3
        assert total(found, f"{prefix}iteration_tokens_total", "_sum") >= usage["completion_tokens"]
        assert total(found, f"{prefix}time_to_first_token_seconds", "_count") == 3
        assert total(found, f"{prefix}request_generation_tokens", "_sum") == usage["completion_tokens"] + 2
        assert total(found, f"{prefix}request_params_n", "_sum") == 3
        assert total(found, f"{prefix}request_params_n", "_count") == 2
        assert total(found, f"{prefix}inter_token_latency_seconds", "_count") == 4  # outputs behind the first
        assert total(found, f"{prefix}num_preemptions", "_total") == 2
        assert total(found, f"{prefix}prefix_cache_hits", "_total") == 64
    assert total(found, "dayzero:requests_with_ignored_fields", "_total") == 1
    assert total(found, "dayzero:engine_steps", "_total") == 7
    assert total(found, "dayzero:engine_last_step_timestamp_seconds") == 1e9
    assert total(found, "http_requests", "_total", handler=CHAT, method="POST", status="2xx") == 2


def test_what_went_wrong_is_counted() -> None:
    for engine, name in [
        (ScriptedEngine(overloaded=True), "admission_rejections"),
        (ScriptedEngine(dies_after=1, fails=("nan_logits", "no numbers.")), "corrupted_requests"),
    ]:
        world = make(engine)
        client(world).post(CHAT, json=ask())
        client(world).post(CHAT, json=ask(stream=True))
        assert total(families(world), f"vllm:{name}", "_total") == 2
    world = make(ScriptedEngine(dies_after=1))
    client(world).post(CHAT, json=ask())
    assert total(families(world), "vllm:request_success", "_total", finished_reason="error") == 1
    assert total(families(make(ScriptedEngine(state="dead"))), "vllm:engine_healthy") == 0
    assert total(families(make(ScriptedEngine(stalled=True))), "vllm:engine_healthy") == 0
    assert total(families(make()), "vllm:engine_healthy") == 1
    assert families(make(ScriptedEngine(state="loading")))["dayzero:engine_ready"][1]
