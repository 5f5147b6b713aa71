"""Mutants of ``stores/``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "quarantine without compare and delete",
        "readers clear each other's good slots",
        "stores/index.py",
        '            " AND page = :page AND sequence = :sequence",\n',
        '            "",\n',
        killer="../test_file_store.py: cleared_only_as_it_was_seen",
    ),
    Mutant(
        "a transaction begins with a read",
        "two processes decide on the same slot",
        "stores/index.py",
        '"BEGIN IMMEDIATE"',
        '"BEGIN"',
        killer="../test_file_store.py: decided_on_cannot_change",
    ),
    Mutant(
        "records are not verified",
        "wrong bytes reach a model",
        "stores/record.py",
        "Verdict.GOOD if _digest(fields, body) == digest else",
        "Verdict.GOOD if digest else",
        killer="../test_record.py: no_single_bit",
    ),
    Mutant(
        "a record of another key is taken",
        "wrong bytes reach a model, with a good checksum",
        "stores/record.py",
        "if fields[:_LENGTH] != _BEGIN or fields[_KEY:] != key.group + key.page:",
        "if fields[:_LENGTH] != _BEGIN:",
        killer="../test_record.py: another_key",
    ),
    Mutant(
        "a place is remembered while others write",
        "storage is asked for records that another process has replaced",
        "stores/places.py",
        "if version != self._version or sum",
        "if sum",
        killer="../test_index.py: remembered_as_a_stranger",
    ),
    Mutant(
        "a place outlives its record",
        "storage is asked for records that this process has recycled",
        "stores/room.py",
        "                    self._places.forget(slab.id, page)\n",
        "",
        killer="../test_index.py: remembered_as_a_stranger",
    ),
    Mutant(
        "a place outlives its transaction",
        "storage is asked for records that were never published",
        "stores/index.py",
        "            self._places.forget_all()  # some of it in this transaction\n",
        "",
        killer="../test_index.py: taken_back_is_forgotten",
    ),
    Mutant(
        "two threads read from a disk",
        "what the system reads ahead is of no use",
        "stores/moving.py",
        " or not _in_memory(records, slab):",
        ":",
        killer="../test_slab.py: one_thread_reads",
    ),
    Mutant(
        "a short write is not gone on with",
        "the end of a record is another record's",
        "stores/slab.py",
        "buffers = _rest(buffers, moved)",
        "buffers = buffers[len(part) :]",
        killer="../test_slab.py: however_little",
    ),
    Mutant(
        "touch does nothing",
        "what is hit in memory is recycled first",
        "stores/index.py",
        "self._stamp(enumerate(keys, start=self._tick(len(keys))))",
        "self._tick(len(keys))",
        killer="../test_file_store.py: touched_records_stay",
    ),
    Mutant(
        "published before the bytes are there",
        "a reader finds a slot's old bytes under a new key",
        "stores/file.py",
        "            landed, abandoned = self._put(grant.claims, bodies)  # bytes first, then the"
        " promise\n"
        "            present = grant.present | self._publish(landed, abandoned)\n",
        "            present = grant.present | self._publish(grant.claims, [])\n"
        "            landed, abandoned = self._put(grant.claims, bodies)\n",
        killer="test_store_order.py: before_the_promise",
    ),
    Mutant(
        "a late writer publishes",
        "a slot that was claimed again holds another's bytes",
        "stores/index.py",
        '" WHERE slab = ? AND number = ? AND sequence = ? AND state = 2",\n'
        "                ((key.page, *place) for key",
        '" WHERE slab = ? AND number = ? AND state = 2",\n'
        "                ((key.page, *place[:2]) for key",
        killer="../test_file_store.py: late_writer_cannot_publish",
    ),
    Mutant(
        "a dead writer keeps its slot",
        "slots are lost with every crash",
        "stores/index.py",
        "if not alive(owner):",
        "if owner:",
        killer="../test_file_store_faults.py: dead_writer_held",
    ),
    Mutant(
        "a closed index is damaged",
        "what one process could not join, it takes from all",
        "stores/index.py",
        "return self._open and same",
        "return same",
        killer="../test_file_store_faults.py: refused_once",
    ),
    Mutant(
        "each group of a call takes what room it can",
        "storage has one group of many pages, and no page with all of its groups",
        "stores/room.py",
        "        return sum(need <= room for need in needs)\n",
        "        return len(wanted)\n",
        killer="../test_file_store.py: whatever_their_groups and not Wrappers",
    ),
]
