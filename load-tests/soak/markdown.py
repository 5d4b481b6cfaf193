"""The report of a run, as Markdown."""

from typing import Sequence

from clients import Ledger
from judge import Check
from samples import Metrics, total

VERDICTS = {True: "met", False: "**MISSED**", None: "not judged"}
# Shown beside the verdicts: what the run has gone through, so that a reader sees that there was something to judge.
SHOWN_COUNTERS = (
    ("retries", "tidegate_retries_total", ""),
    ("breaks in event streams", "tidegate_kv_stream_gaps_total", ""),
    ("replays", "tidegate_kv_stream_replays_total", ""),
    ("index entries expired", "tidegate_kv_index_evictions_total", "expired"),
    ("cached answers gone for want of room", "tidegate_cache_evictions_total", "size"),
    ("cached answers expired", "tidegate_cache_evictions_total", "expired"),
    ("hits of the response cache", "tidegate_cache_requests_total", '"hit"'),
    ("joined a running answer", "tidegate_cache_requests_total", "joined"),
    ("handed over after a failed call", "tidegate_cache_handovers_total", ""),
    ("model fallbacks", "tidegate_model_fallbacks_total", ""),
    ("refused by quotas", "tidegate_quota_refusals_total", ""),
    ("settings applied", "tidegate_reloads_total", "applied"),
    ("settings refused", "tidegate_reloads_total", "rejected"),
    ("cancelled", "tidegate_requests_total", "cancelled"),
)


def report(title: str, checks: Sequence[Check], ledger: Ledger, metrics: Metrics, warnings: Sequence[tuple[str, int]]) -> str:
    lines = [f"# {title}", "", "| check | verdict | found | wanted |", "|---|---|---|---|"]
    lines += [f"| {c.name} | {VERDICTS[c.met]} | {cell(c.found)} | {cell(c.wanted)} |" for c in checks]
    lines += ["", "## What happened", ""]
    lines += [f"* endings: {listed(ledger.endings.most_common())}", f"* clients: {listed(ledger.visits.most_common())}"]
    lines += [f"* `x-cache`: {listed(ledger.caches.most_common())}"]
    lines += ["* router: " + listed((name, total(metrics, of, label)) for name, of, label in SHOWN_COUNTERS)]
    if ledger.faults:
        lines += ["", "## Faults that clients saw, the first of them", "", *(f"* {cell(fault)}" for fault in ledger.faults)]
    if warnings:
        lines += ["", "## Warnings in the log, by kind", "", *(f"* {count} × {cell(kind)}" for kind, count in warnings)]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def listed(counts) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in counts)
