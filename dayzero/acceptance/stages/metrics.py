"""Numbers that a server exports at ``/metrics``, in Prometheus' form, by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dayzero.acceptance.accept.http import Answer, Client, NoAnswer

# Names that dashboards scrape for servers of this kind, which ours exports under both; before the colon.
PREFIXES = ("vllm", "dayzero")
GENERATED = "generation_tokens_total"
RUNNING, WAITING, USAGE = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
HELD = (RUNNING, WAITING, USAGE)
ENDS = "request_success_total"
CACHE = "cache_config_info"


def samples_of(answer: Answer) -> list[Sample] | None:
    """Every sample; None where there was no answer, or one in another form."""
    if not answer.ok:
        return None
    try:
        families = list(text_string_to_metric_families(answer.body.decode("utf-8", "replace")))
    except (ValueError, LookupError):  # a label without a name is an IndexError of the parser
        return None
    return [sample for family in families for sample in family.samples]


def numbers_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Name without its prefix -> sum over its labels."""
    found: dict[str, dict[str, float]] = {prefix: {} for prefix in PREFIXES}
    for sample in samples:
        prefix, _, name = sample.name.partition(":")
        if name and prefix in found:
            found[prefix][name] = found[prefix].get(name, 0.0) + float(sample.value)
    return {name: value for prefix in reversed(PREFIXES) for name, value in found[prefix].items()}


def labels_of(samples: Sequence[Sample], name: str) -> dict[str, str]:
    """Labels of the first sample of that name, without its prefix; empty where there is none."""
    return next((dict(one.labels) for one in samples if one.name.partition(":")[2] == name), {})


def sums_by(samples: Sequence[Sample], name: str, label: str) -> dict[str, float]:
    """Value of a label -> sum of the samples of that name which have it, of one prefix."""
    for prefix in PREFIXES:
        found: dict[str, float] = {}
        for one in samples:
            if one.name == f"{prefix}:{name}" and label in one.labels:
                found[one.labels[label]] = found.get(one.labels[label], 0.0) + float(one.value)
        if found:
            return found
    return {}


def read_ends(client: Client) -> dict[str, float]:
    """How many answers have ended by ``stop``, ``length``, ``abort`` and the like; empty where none are told."""
    return sums_by(_read(client), ENDS, "finished_reason")


def read_numbers(client: Client) -> dict[str, float]:
    """``numbers_of`` what a server exports now; empty where it exports none."""
    return numbers_of(_read(client))


def read_labels(client: Client, name: str) -> Mapping[str, str]:
    """``labels_of`` what a server exports now."""
    return labels_of(_read(client), name)


def _read(client: Client) -> list[Sample]:
    try:
        return samples_of(client.get("/metrics")) or []
    except NoAnswer:
        return []
