"""What a store directory holds, and whether it is whole: for administrators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

from ..schema import Key
from .catalog import Catalog, fault
from .index import Index
from .record import verify
from .rows import Place, SlabRow, SlotRow, State


@dataclass(frozen=True, slots=True)
class Usage:
    """What one group's records take."""

    fingerprint: bytes
    body_bytes: int
    records: int
    bytes: int  # on disk, free slots included
    open: bool  # some process has it open
    used: int  # stamp of the newest use; stamps of one directory can be compared


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found, in slots. All but holes are counted once."""

    good: int  # records that read back whole
    corrupt: int  # rows whose record is torn, damaged or unreadable
    orphaned: int  # rows whose slot holds no record, or another's
    missing: int  # rows whose slab file is gone
    writing: int  # claimed by a process that lives
    free: int  # bytes on disk that hold no record
    bytes: int  # on disk, of all of these


def usage(catalog: Catalog) -> list[Usage]:
    """What each group of the directory takes, the least recently used first."""

    def account(index: Index) -> list[Usage]:
        return [
            Usage(
                fingerprint=slab.fingerprint,
                body_bytes=slab.body,
                records=sum(slot.state == State.LIVE for slot in index.slots(slab)),
                bytes=slab.held * slab.stride,
                open=bool(slab.open),
                used=slab.used,
            )
            for slab in sorted(index.slabs(), key=lambda slab: slab.used)
        ]

    return catalog.ask(account) or []


def fsck(catalog: Catalog, repair: bool) -> Report:
    """Read every record of the directory. Others may go on using it.

    Args:
        repair: take back the rows of records that fail, and the slots of dead writers.
    """
    if repair:
        catalog.heal()
    total: Counter[str] = Counter()
    for slab in catalog.ask(Index.slabs) or ():
        slots = partial(Index.slots, slab=slab)
        found = {slot: _examine(catalog, slab, slot) for slot in catalog.ask(slots) or ()}
        unchanged = set(catalog.ask(slots) or ())  # others were recycled while we read them
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
    """Which number of a :class:`Report` a slot counts for; ``hole``: none."""
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
