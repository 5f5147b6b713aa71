"""What the engine's figures mean, in words, and which of them are there from the start."""

from __future__ import annotations

HELP = {
    "bytes_per_second": "Recent speed of a transfer lane",
    "computed_tokens_total": "Tokens whose state was computed: prefilled, decoded or verified",
    "evicted_pages_total": "Pages that lost their slot in a memory tier, by group",
    "free_slots": "Slots of a memory tier that hold nothing, by group",
    "hit_tokens_total": "Prompt tokens that requests found cached, by the tier that had them",
    "invariant_errors_total": "Times that bookkeeping was wrong and the cache mended it",
    "leases": "Requests that hold pages on the device",
    "lenient_hits_total": "Hits that lacked the draft's state, under --missing-policy lenient",
    "missed_loads_total": "Pages that a load from host to device did not bring",
    "missed_reads_total": "Pages that a read from storage did not bring",
    "moved_bytes_total": "Bytes that a transfer lane moved",
    "pages": "Pages that the cache knows",
    "preemptions_total": "Running requests that gave up their slots and were queued again",
    "prefetches": "Requests whose prefix is looked up in or read from storage",
    "prefill_tokens_per_second": "Recent speed of prefill",
    "recomputed_tokens_total": "Tokens computed again after a preemption or a failed load",
    "running_requests": "Requests that are computed in every step",
    "skipped_tokens_total": "Cached prompt tokens that were computed instead of loaded, and why",
    "speculative_rounds_total": "Rounds of drafting and verifying, of requests that finished",
    "speculative_tokens_total": "Tokens that these rounds brought: divided by them, accept length",
    "slots": "Slots of a memory tier, by group",
    "step_sequences_total": "Requests of all steps: divided by steps_total, the mean batch",
    "steps_total": "Forward passes of the target",
    "storage_breaker_open": "1 while storage is left alone because it failed",
    "storage_breaker_trips_total": "Times that storage was left alone because it failed",
    "storage_faults_total": "Failures that the storage backend counted, by kind",
    "transfer_faults_total": "Batches that a transfer lane lost to an error",
    "transfers_pending": "Transfers that are queued or under way",
    "unsaved_pages_total": "Pages that were dropped before the host had a copy",
    "unwritten_pages_total": "Pages that were dropped before storage had a copy",
    "waiting_requests": "Requests that wait for their first step",
}
"""Help texts by name, without labels."""

_LABELS = {
    "hit_tokens_total": ("tier", ("device", "host", "storage")),
    "moved_bytes_total": ("lane", ("save", "load", "write", "read")),
    "skipped_tokens_total": ("why", ("short", "slow", "slow_load")),
    "transfer_faults_total": ("lane", ("save", "load", "write", "read")),
}
_PLAIN = (
    *("computed_tokens_total", "invariant_errors_total", "lenient_hits_total"),
    *("missed_loads_total", "missed_reads_total", "preemptions_total", "recomputed_tokens_total"),
    *("step_sequences_total", "steps_total", "unsaved_pages_total", "unwritten_pages_total"),
)

ZEROS = dict.fromkeys(_PLAIN, 0.0) | {
    f"{name}{{{label}={value}}}": 0.0
    for name, (label, values) in _LABELS.items()
    for value in values
}
"""Counters that the engine does not report before they count, as they are until then."""
