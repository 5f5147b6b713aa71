"""What the engine's figures mean, in words, and which of them are there from the start."""

from __future__ import annotations

HELP = {
    "admitted_tokens_total": "Tokens of requests that began: hit tokens by them are the hit rate",
    "bytes_per_second": "Recent speed of a transfer lane; 0: not measured yet",
    "computed_tokens_total": "Tokens whose state was computed: prefilled, decoded or verified",
    "engine_restarts_total": "Times that the engine's process died and was started again",
    "engine_up": "1 if the engine answered this scrape; if not, its figures are absent",
    "evicted_pages_total": "Pages that lost their slot in a memory tier, by group",
    "free_slots": "Slots of a memory tier that hold nothing, by group",
    "generation_tokens_total": "Tokens that requests were sent",
    "hit_tokens_total": "Prompt tokens that requests found cached, by the tier that had them",
    "invariant_errors_total": "Times that bookkeeping was wrong and the cache mended it",
    "lane_seconds_total": "Seconds that a transfer lane was at work",
    "leases": "Requests that hold pages on the device",
    "lenient_hits_total": "Hits that lacked the draft's state, under --missing-policy lenient",
    "missed_loads_total": "Pages that a load from host to device did not bring",
    "missed_reads_total": "Pages that a read from storage did not bring",
    "moved_bytes_total": "Bytes that a transfer lane moved",
    "pages": "Pages that the cache knows",
    "preemptions_total": "Running requests that gave up their slots and were queued again",
    "prefetches": "Requests whose prefix is looked up in or read from storage",
    "prefill_tokens_per_second": "Recent speed of prefill; 0: not measured yet",
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
    "transfer_faults_total": "Batches of a lane, and calls of the store, that failed or stalled",
    "transfers_pending": "Transfers that are queued or under way",
    "unsaved_pages_total": "Pages that were dropped before the host had a copy",
    "unwritten_pages_total": "Pages that were dropped before storage had a copy",
    "waiting_requests": "Requests that wait for their first step",
}
"""Help texts by name, without labels."""

_LANES = ("save", "load", "write", "read", "ask")
_FILE_STORE = (  # what a FileStore counts; its docstring explains them
    *("corrupt", "empty", "other_key", "other_version", "missing", "io", "full", "no_room"),
    *("read_only", "unreachable", "busy", "index", "recycled"),
)
_LABELS = {
    "bytes_per_second": ("lane", ("load", "read")),
    "hit_tokens_total": ("tier", ("device", "host", "storage")),
    "lane_seconds_total": ("lane", _LANES),
    "moved_bytes_total": ("lane", _LANES[:4]),
    "skipped_tokens_total": ("why", ("short", "slow", "slow_load")),
    "storage_faults_total": ("kind", _FILE_STORE),
    "transfer_faults_total": ("lane", (*_LANES, "probe", "touch", "stall")),
}
_PLAIN = (
    *("admitted_tokens_total", "computed_tokens_total", "invariant_errors_total"),
    *("lenient_hits_total", "missed_loads_total", "missed_reads_total", "preemptions_total"),
    *("prefill_tokens_per_second", "recomputed_tokens_total", "step_sequences_total"),
    *("steps_total", "unsaved_pages_total", "unwritten_pages_total"),
)

ZEROS = dict.fromkeys(_PLAIN, 0.0) | {
    f"{name}{{{label}={value}}}": 0.0
    for name, (label, values) in _LABELS.items()
    for value in values
}
"""What the engine does not report before it counts or measures it, as it is until then."""
