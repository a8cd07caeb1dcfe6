"""The inspection as a person reads it: verdict, what the model is, its layers, operators, ledgers, findings."""

from __future__ import annotations

from typing import Any

from dayzero.console import Console
from dayzero.planner.inspect import InspectReport
from dayzero.planner.layer_text import map_rows
from dayzero.units import bytes_text, count_text, counted

MAX_ROWS = 12


def show_report(report: InspectReport, console: Console) -> None:
    """Print ``report``; nothing is computed here. Short by default, everything with ``console.show_all``."""
    console.headline(report.verdict, report.source, report.findings)
    _summary(report, console)
    _layers(report, console)
    _operators(report, console)
    _nearest(report, console)
    _ledgers(report, console)
    _effective(report.config.get("effective", {}), console)
    console.findings(report.findings, report.verdict)


def _summary(report: InspectReport, console: Console) -> None:
    total, active = report.parameters["total"], report.parameters["active"]
    size = f"{count_text(total)} parameters, {count_text(active or 0)} active" if total is not None else "size unknown"
    console.line(f"family {report.family or 'unknown'} ({report.why})")
    held = f"{bytes_text(report.total_bytes)} of tensors in {counted(len(report.files), 'file')}"
    console.line(f"{size}; {held if report.files else 'no weights yet'}; {bytes_text(report.bytes_read)} read")
    context = f"{report.context_tokens:,} tokens" if report.context_tokens is not None else "unknown"
    chat = report.chat["kind"] + (
        f" ({', '.join(report.chat['encoders'] or report.chat['templates'])})"
        if report.chat["encoders"] or report.chat["templates"]
        else ""
    )
    console.line(
        f"context {context}; {report.modality or 'modality unknown'}; "
        f"tokenizer {report.tokenizer['kind'] or 'none'}; chat {chat}"
    )
    said = ", ".join(f"{i} ({'; '.join(where)})" for i, where in report.stop_id_sources.items())
    console.line(f"stop ids {said or 'none'}" + (f"; sampling {report.sampling}" if report.sampling else ""))
    per_token, per_sequence = report.cache["per_token_bytes"], report.cache["per_sequence_bytes"]
    if per_token["bf16"] is not None:
        window = report.cache["window_bytes"]["bf16"]
        more = f" + {bytes_text(window)} in full windows" if window else ""
        console.line(
            f"cache {per_token['bf16']:,} B a token in bf16, {per_token['fp8']:,} B in fp8; "
            f"{bytes_text(per_sequence)} a sequence{more}"
        )


def _layers(report: InspectReport, console: Console) -> None:
    if report.layers:
        rows = map_rows(report.layers)
        console.table(f"layers ({len(report.layers)})", ("layers", "count", "mixer", "channel", "residual"), rows)


def _operators(report: InspectReport, console: Console) -> None:
    rows = []
    for word in ("build", "extend", "reuse"):
        for entry in report.operators[word]:
            where = f"{entry['uses']} sites" if "uses" in entry else ", ".join(entry["keys"])
            traits = ", ".join(f"{k}={v}" for k, v in (entry.get("traits") or {}).items())
            rows.append(
                (
                    word,
                    entry["contract"] or "?",
                    traits,
                    where,
                    "; ".join(entry.get("lacks", ())) or entry.get("about", ""),
                )
            )
    if not console.show_all:
        kept = [row for row in rows if row[0] != "reuse"]
        reused = sorted({row[1] for row in rows if row[0] == "reuse"})
        if reused:
            console.words("operators reused", reused)
        rows = kept
    if rows:
        console.table("operators", ("what", "contract", "traits", "where", "why"), rows)


def _nearest(report: InspectReport, console: Console) -> None:
    near = report.nearest
    if near is None:
        return
    rows: list[tuple[str, str]] = [("config, only here", key) for key in near["config"]["only_here"]]
    rows += [("config, absent or refused", key) for key in near["config"]["absent_or_refused"]]
    rows += [("tensors, only here", key) for key in near["tensors"]["only_here"]]
    rows += [("tensors, only there", key) for key in near["tensors"]["only_there"]]
    for kind in near["layer_kinds"]:
        said = ", ".join(kind["unknown_tensors"][:4]) or "all known"
        said = f"{kind['kind']!r} of {kind['key']}" if kind["kind"] else said
        rows.append((f"layers {kind['root']}{kind['layers']}", said))
    _cut_table(console, f"against the nearest family, {near['family']}", ("difference", "what"), rows)


def _cut_table(console: Console, title: str, columns: tuple[str, ...], rows: list[Any]) -> None:
    shown = rows if console.show_all else rows[:MAX_ROWS]
    if rows:
        more = f" (+{len(rows) - len(shown)} more, --all shows them)" if len(shown) < len(rows) else ""
        console.table(title + more, columns, shown)


def _ledgers(report: InspectReport, console: Console) -> None:
    config, held = report.config, report.tensors
    ignored = sum(entry["count"] for entry in held["ignored"])
    console.line(
        f"config keys: {len(config['read'])} read, {len(config['ignored'])} ignored, "
        f"{len(config['defaulted'])} defaulted, {len(config['unread'])} unread"
    )
    console.line(
        f"tensors: {held['used']} used, {ignored} ignored, {len(held['unknown'])} unknown, "
        f"{len(held['missing'])} missing, {len(held['misfit'])} misfit"
    )
    draft = report.parameters.get("extra")
    if draft:
        size = f"  draft layers, counted apart: {count_text(draft)} parameters"
        if report.files and not held["extra"]:
            console.line(f"{size}; the files leave them out")
        else:
            console.line(f"{size}, {held['extra']} tensors; claimed and checked, not loaded: nothing uses them yet")
    for entry in held["ignored"]:
        console.line(f"  ignored {entry['count']}: {entry['why']}")
    if console.show_all:
        _cut_table(console, "config keys ignored", ("key", "why"), list(config["ignored"].items()))
        _cut_table(console, "defaults used", ("key", "value"), [(k, repr(v)) for k, v in config["defaulted"].items()])
    table = report.quantization["table"]
    quantized = [row for row in table if console.show_all or row["claimed"] != "unquantised" or row["why"] is not None]
    if report.quantization["method"] != "none" or quantized:
        rows = [(r["modules"], r["claimed"], r["stored"], r["count"], r["why"] or "") for r in quantized]
        _cut_table(
            console,
            f"quantisation: {report.quantization['method']}",
            ("modules", "claimed", "stored", "count", "why"),
            rows,
        )


def _effective(values: dict[str, Any], console: Console) -> None:
    if not values:
        return
    rows = []
    for section, entries in values.items():
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, dict) and (
                console.show_all or section in ("rope", "attention", "index", "recurrence", "routers")
            ):
                where = entry.get("layers", "")
                rows.append((section, where, _words({k: v for k, v in entry.items() if k != "layers"})))
    console.table("effective values", ("what", "layers", "values"), rows)
    tie = values["tie"]
    console.line(
        f"head {'tied to' if tie['tied'] else 'apart from'} the embedding ({tie['source']}); dtype {values['dtype']}"
    )


def _words(entry: dict[str, Any]) -> str:
    said = []
    for key, value in entry.items():
        if key == "inv_freq":
            said.append(
                f"inv_freq {value['first'][0]:.4g} … {value['last'][-1]:.4g} ({value['count']})"
                if value["count"]
                else ""
            )
        elif isinstance(value, dict):
            said.append(f"{key} ({_words(value)})")
        elif value is not None and value is not False and value != []:
            said.append(
                f"{key} {value:.6g}" if isinstance(value, float) else key if value is True else f"{key} {value}"
            )
    return ", ".join(part for part in said if part)
