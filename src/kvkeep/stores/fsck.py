"""Reports for administrators: what a store directory holds, and which of it is damaged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from ..schema import Key
from .catalog import Catalog, fault
from .index import Index
from .labels import Label
from .record import verify
from .rows import Place, SlabRow, SlotRow, State


@dataclass(frozen=True, slots=True)
class Usage:
    """The space that one group's records take."""

    fingerprint: bytes
    label: Label | None  # what people call it, if somebody has said it
    body_bytes: int
    records: int
    bytes: int  # on disk, including free slots
    open: bool  # some process has it open
    used: int  # stamp of the newest use, comparable within one directory
    written: float | None  # its file's last change, in seconds of ``time.time``; None: it is gone


@dataclass(frozen=True, slots=True)
class Report:
    """Slots by what a check found in them. Each slot counts once; holes do not count."""

    good: int  # records that read back whole
    corrupt: int  # rows whose record is torn, damaged or unreadable
    orphaned: int  # rows whose slot holds no record, or another's
    missing: int  # rows whose slab file is gone
    writing: int  # claimed by a process that is running
    free: int  # bytes on disk that hold no record
    bytes: int  # on disk, of all of these


def usage(catalog: Catalog) -> list[Usage]:
    """The space that each group of the directory takes, the least recently used first."""

    def account(index: Index) -> list[Usage]:
        return [
            Usage(
                fingerprint=slab.fingerprint,
                label=catalog.label(slab.fingerprint),
                body_bytes=slab.body,
                records=sum(slot.state == State.LIVE for slot in index.slots(slab)),
                bytes=slab.held * slab.stride,
                open=bool(slab.open),
                used=slab.used,
                written=catalog.written(slab),
            )
            for slab in sorted(index.slabs(), key=lambda slab: slab.used)
        ]

    return catalog.ask(account) or []


def fsck(catalog: Catalog, repair: bool) -> Report:
    """Read and verify every record of the directory. Other processes may go on using it.

    Args:
        repair: clear the rows of records that fail, and free the slots of dead writers.
    """
    if repair:
        catalog.heal()
    total: Counter[str] = Counter()
    for slab in catalog.ask(Index.slabs) or ():
        slots = partial(Index.slots, slab=slab)
        found = {slot: _examine(catalog, slab, slot) for slot in catalog.ask(slots) or ()}
        unchanged = set(catalog.ask(slots) or ())  # the others changed while we read them
        total.update(state for slot, state in found.items() if slot in unchanged)
        total["bytes"] += slab.held * slab.stride
        if repair:
            bad = {
                Key(slab.fingerprint, slot.page): Place(slab.id, slot.number, slot.sequence)
                for slot, state in found.items()
                if state in ("corrupt", "orphaned", "missing")
            }
            catalog.ask(partial(Index.clear, places=bad))
    del total["hole"]
    return Report(**{name: total[name] for name in Report.__slots__})


def _examine(catalog: Catalog, slab: SlabRow, slot: SlotRow) -> str:
    """The field of :class:`Report` that a slot counts in; ``hole``: none."""
    if slot.state != State.LIVE:
        return State(slot.state).name.lower()
    record = memoryview(bytearray(slab.stride))
    body, footer = record[: slab.body], record[slab.body :]
    try:
        (failed,) = catalog.slab(slab.fingerprint, slab.body).read([slot.number], [body], [footer])
    except OSError as error:
        failed = error
    if failed:
        return "missing" if fault(failed) == "missing" else "corrupt"
    verdict = verify(footer, Key(slab.fingerprint, slot.page), body)
    return {"GOOD": "good", "EMPTY": "orphaned", "OTHER_KEY": "orphaned"}.get(
        verdict.name, "corrupt"
    )
