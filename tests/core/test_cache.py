"""The cache, one scenario at a time; ``test_state_machine`` tries operations in any order."""

import threading
import time

import numpy as np
import pytest
from schemas import FIVE, FOUR, TWO, P, group
from world import World

from kvkeep.core.cache import Cache
from kvkeep.core.policy import Policy
from kvkeep.schema import (
    NO_IDS,
    Closed,
    Component,
    Group,
    Identity,
    InvariantError,
    RequestError,
    Schema,
)
from kvkeep.stores.file import FileStore
from kvkeep.testing.fakes import DictStore, TruthMedia

A = [1, 1, 2, 2, 3, 3, 4]  # three pages that a hit may use


def world(schema: Schema = TWO, device: int = 16, host: int = 16, **more) -> World:
    """A world with room for all that its test does."""
    return World(schema, [device] * len(schema.groups), [host] * len(schema.groups), **more)


def serve(w: World, tokens: list[int], namespace: str = "", each: int = 99) -> None:
    """Run a request from its arrival to its end, and let all transfers land."""
    request = w.arrive(tokens, namespace)
    w.settle()
    assert w.admit(request, len(tokens))
    w.settle()
    while request.computed is None or request.computed < len(tokens):
        assert w.run(request, each)
        w.settle()
    w.release(request)
    w.settle()
    w.check()


def lease_of(w: World, tokens: list[int], ask: bool = False):
    """An admitted request whose loads have landed."""
    request = w.arrive(tokens, ask=ask)
    w.settle()
    assert w.admit(request)
    w.settle()
    return request


def read_counts(w: World) -> set[int]:
    return set(w.store.reads.values())


# --- hits and their explanations


@pytest.mark.parametrize("tier", ["device", "host", "storage"])
@pytest.mark.parametrize("schema", [TWO, FOUR], ids=["two groups", "four groups"])
def test_a_prompt_comes_back_from_every_tier(schema: Schema, tier: str) -> None:
    w = world(schema)
    serve(w, A, each=2)
    if tier == "host":
        w.empty(0)
    if tier == "storage":
        w.restart()
    request = lease_of(w, A, ask=True)
    w.check()
    lease = request.lease
    assert lease.pages == 3
    want = {"device": 0, "host": 0, "storage": 0} | {tier: 6}
    assert lease.explanation.tokens == want
    assert lease.explanation.limited_by is None
    pages = sum(len(g.needed(3)) for g in schema.groups)
    assert lease.explanation.loaded_bytes == (0 if tier == "device" else 4 * pages)
    assert w.cache.figures()[f"hit_tokens_total{{tier={tier}}}"] == 6


def test_one_token_is_always_computed() -> None:
    w = world()
    serve(w, A[:6])
    assert lease_of(w, A[:6]).lease.pages == 2
    assert lease_of(w, [5]).lease.pages == 0


def test_namespaces_are_strangers() -> None:
    w = world()
    serve(w, A, "a")
    serve(w, A, "b")
    assert lease_of(w, A).lease.pages == 0
    assert len(w.store.records) == 12
    w.restart()
    stranger = w.arrive(A, "c")
    w.settle()
    w.admit(stranger)
    assert stranger.lease.pages == 0


def test_the_group_that_limits_a_hit_is_named() -> None:
    w = world(FOUR)
    serve(w, A, each=2)
    for tier in range(2):
        w.evict(tier, 2, 16)  # the snapshots
    request = lease_of(w, A)
    assert request.lease.pages == 0
    assert request.lease.explanation.limited_by == "state"


def test_a_group_that_a_hit_may_do_without_does_not_limit_it() -> None:
    """Under ``lenient`` the hit is limited by a group that counts, whatever the order of groups."""
    schema = Schema(Identity("m"), P, (group("draft", required=False), *FOUR.groups[:3]))
    w = world(schema, missing="lenient")
    serve(w, A, each=2)
    for tier in range(2):
        w.evict(tier, 0, 16)
        w.evict(tier, 3, 16)
    assert lease_of(w, A).lease.explanation.limited_by == "state"


@pytest.mark.parametrize(("missing", "pages"), [("strict", 0), ("lenient", 3), ("stale", 3)])
def test_a_missing_optional_group_is_a_policy(missing: str, pages: int) -> None:
    """strict: no hit; lenient: masked up to the gap; stale: slots with other pages' bytes."""
    w = world(FOUR, missing=missing)
    serve(w, A)
    for tier in range(2):
        w.evict(tier, 3, 16)
    lease = w.cache.admit(np.array(A, np.int32), chunk=1)
    assert lease.pages == pages
    assert lease.valid_from("draft") == (3 if missing == "lenient" else 0)
    assert (lease.slots("draft")[:pages] == -1).all() == (missing != "stale")
    assert (lease.slots("full")[:pages] >= 0).all()
    w.cache.check()
    w.cache.grow(lease, 9)
    w.cache.commit(lease, np.array([*A, 4, 5], np.int32))
    w.cache.check()
    assert w.cache.residency.table.state[0, 3].any() == (missing == "strict"), (
        "after a gap, what is computed stays private"
    )
    w.cache.release(lease)
    w.cache.check()


def test_a_lenient_hit_comes_from_storage_too() -> None:
    """For example, the draft was replaced: the target's records stay valid."""
    w = world(FOUR, missing="lenient")
    serve(w, A)
    draft = FOUR.fingerprint(FOUR.groups[3])
    w.lost = {key for key in w.store.records if key.group == draft}
    w.store.delete(w.lost)
    w.restart()
    request = lease_of(w, A, ask=True)
    assert request.lease.pages == 3
    assert request.lease.valid_from("draft") == 3


# --- committing


def test_a_duplicate_takes_the_row_and_frees_its_own() -> None:
    """Two requests compute the same pages: the cache keeps one set of slots."""
    w = world()
    first, second = lease_of(w, A), lease_of(w, A)
    for request in (first, second):
        w.run(request, 7)
        w.check()
    assert first.lease.slots("full")[:3].tolist() == second.lease.slots("full")[:3].tolist()
    assert w.cache.figures()["free_slots{tier=device,group=full}"] == 16 - 3 - 2


def test_a_duplicate_fills_holes() -> None:
    """The next request that computes a page restores the groups that were evicted."""
    w = world(FOUR)
    serve(w, A)
    for tier in range(2):
        w.evict(tier, 3, 16)
    request = lease_of(w, A)
    assert request.lease.pages == 0
    w.run(request, 7)
    w.release(request)
    assert lease_of(w, A).lease.pages == 3


@pytest.mark.parametrize("schema", [TWO, FOUR], ids=["two groups", "four groups"])
def test_a_duplicate_of_what_is_being_loaded_stays_private(schema: Schema) -> None:
    """Its row cannot be pinned yet: the bytes are not there. A window slides past it all the
    same."""
    w = world(schema)
    request = lease_of(w, A)
    serve(w, A)
    w.empty(0)
    other = w.arrive(A, ask=False)
    assert w.admit(other)
    assert not other.lease.ready
    assert w.run(request, 7)
    w.check()
    assert w.inside.owned(request.lease, 0)[:3].all()
    w.finish()


def test_a_window_gives_private_slots_back_as_it_slides_past_them() -> None:
    """The rows of its pages were being filled for another request when it committed them."""
    w = world(FOUR)
    request = lease_of(w, [*A[:6], 7, 7, 8, 8, 9])
    serve(w, A)
    w.empty(0)
    other = w.arrive(A, ask=False)
    assert w.admit(other)
    assert w.run(request, 6)
    assert w.inside.owned(request.lease, 1).tolist() == [False, True, True]
    assert w.run(request, 4)
    w.check()
    assert w.inside.free(0, 1) == 16 - 5 - 1, "the pages' rows, and the other's first chunk"
    w.finish()


def test_a_request_whose_path_left_the_tree_keeps_to_itself() -> None:
    w = world(device=8)
    request = lease_of(w, A)
    w.run(request, 2)
    w.cache.residency.retire(request.lease.path)
    w.run(request, 5)
    w.check()
    assert request.lease.detached
    assert request.lease.pages == 1
    assert w.tree() == {}
    w.run(request, 0)  # again: nothing changes
    w.finish()


def test_a_partial_page_is_not_committed() -> None:
    w = world()
    request = lease_of(w, A)
    w.run(request, 5)
    assert request.lease.pages == 2
    assert len(w.tree()) == 2


def test_a_rejected_draft_finds_its_window_again() -> None:
    """Windows slide by accepted tokens, never by speculated ones."""
    w = world(FOUR)
    request = lease_of(w, [0] * 12)
    w.run(request, 6)
    w.run(request, 0, ahead=9)
    assert (request.lease.slots("window")[1:3] >= 0).all()
    w.run(request, 2)
    assert request.lease.slots("window")[:4].tolist()[:2] == [-1, -1]


def test_a_window_that_a_hit_ended_in_outlives_one_that_slid_by() -> None:
    """All pages of a window that a hit used stay; pages that slid by are evicted first."""
    schema = Schema(Identity("m"), P, (group("full"), group("window", 2)))
    w = world(schema)
    serve(w, [0, 0, 0, 0, 9])
    serve(w, [0, 0, 0, 0, *[1] * 8, 9], each=2)  # hits two pages, and moves on
    w.evict(1, 1, 2)
    w.evict(0, 1, 2)
    assert lease_of(w, [0, 0, 0, 0, 2, 2]).lease.pages == 2


def test_pages_that_slid_by_are_cold_on_the_host_too() -> None:
    """Even if the host has already sorted its next victims."""
    schema = Schema(Identity("m"), P, (group("full"), group("window", 1)))
    w = world(schema)
    for token in range(1, 7):
        serve(w, [token, token, 9])
    request = lease_of(w, [7, 7, 8, 8, 9, 9])
    w.run(request, 2)
    w.settle()
    w.evict(1, 1, 1)
    w.run(request, 2)
    w.evict(1, 1, 1)


def test_of_two_hits_a_place_is_kept_of_one_it_is_not() -> None:
    """Every conversation's next turn makes one hit; two hits show a shared prefix."""
    schema = Schema(Identity("m"), P, (group("full"), group("window", 2)))
    for hits, pages in ((1, 0), (2, 2)):
        w = world(schema)
        head = [5, 5, 6, 6]
        serve(w, [*head, 9])
        for last in range(hits):
            serve(w, [*head, *[last] * 4, 9], each=2)
        w.evict(0, 1, 2)
        w.evict(1, 1, 2)
        assert lease_of(w, [*head, 8, 8]).lease.pages == pages


# --- snapshots of recurrent state


def test_a_snapshot_is_kept_where_the_prompt_ends() -> None:
    """And only there: one slot for the snapshot, one for the running state."""
    w = world(FIVE)
    request = w.arrive(A, ask=False)
    w.admit(request, 7)
    lease = request.lease
    assert lease.cuts == [6]
    assert (lease.slots("state") >= 0).tolist() == [False, False, True, False]
    assert len(lease.working("state")) == 1
    serve(w, A)
    assert lease_of(w, [*A[:6], 9, 9]).lease.pages == 3
    assert lease_of(w, [*A[:4], 9, 9]).lease.pages == 0


def test_a_snapshot_is_kept_where_paths_part() -> None:
    """The second prompt shows where it branches from the first; the third hits that snapshot."""
    w = world(FIVE)
    serve(w, A)
    serve(w, [*A[:4], 9, 9, 9, 9, 9])
    assert lease_of(w, [*A[:4], 8, 8, 8]).lease.pages == 2


def test_interim_snapshots_come_as_often_as_asked() -> None:
    w = world(FIVE, every=2)
    request = w.arrive([*range(15)], ask=False)
    w.admit(request, 1)
    assert request.lease.cuts == [14]
    assert w.run(request, 3)
    assert request.lease.cuts == [4, 14]
    for end in (4, 14, 15):
        assert w.run(request, 99)
        assert request.computed == end, "a chunk ends at the next cut"
    assert request.lease.cuts == [4, 8, 12, 14, 16]
    assert [request.lease.next_cut(at) for at in (0, 4, 13, 16)] == [4, 8, 14, None]


def test_a_snapshot_that_was_not_taken_is_not_published() -> None:
    """For example, accepted tokens ran past the cut."""
    w = world(FIVE)
    request = lease_of(w, A)
    w.run(request, 7, stop=False)
    assert request.lease.pages == 3
    assert not w.table.state[:, 2].any()
    w.finish()


def test_without_room_for_a_snapshot_its_page_goes_without() -> None:
    w = World(FIVE, [16, 16, 1, 16, 16], [16] * 5)
    request = w.arrive(A, ask=False)
    assert w.admit(request, 7)
    assert (request.lease.slots("state") == -1).all()
    assert w.run(request, 7)
    w.finish()


def test_an_idle_snapshot_makes_room_for_the_next() -> None:
    w = World(FIVE, [16, 16, 2, 16, 16], [16] * 5)
    serve(w, A)
    request = lease_of(w, [9] * 7)
    assert w.run(request, 7)
    assert (request.lease.slots("state") >= 0).tolist() == [False, False, True]
    w.finish()


def test_working_slots_do_not_cost_a_request_its_own_snapshot() -> None:
    """They are reserved after the hit is pinned, which leaves too few here."""
    w = World(FIVE, [16, 16, 2, 16, 16], [0] * 5)
    serve(w, A)
    other = w.arrive([9, 9, 9], ask=False)
    assert w.admit(other, 0)
    request = w.arrive([*A[:6], 8], ask=False)
    assert not w.admit(request)
    w.check()
    w.release(other)
    assert w.admit(request)
    assert request.lease.pages == 3


# --- room


def may_begin(w: World, tokens: np.ndarray, total: int, chunk: int) -> bool:
    """Whether a request with ``total`` tokens is admitted; it ends at once."""
    lease = w.cache.admit(tokens, chunk=chunk, total=total)
    if lease is not None:
        w.cache.release(lease)
    w.cache.check()
    return lease is not None


def test_admission_is_all_or_nothing() -> None:
    w = World(TWO, [8, 3], [0, 0])
    request = w.arrive(A, ask=False)
    assert not w.admit(request, 7)
    assert w.cache.figures()["leases"] == 0
    assert w.admit(request, 6)
    w.check()


def test_a_path_that_ended_keeps_no_slots_for_who_waits() -> None:
    """Making room evicted the first group's pages, so the second group's serve no hit."""
    w = world(device=4, host=0)
    serve(w, A)
    behind = w.arrive(A)
    w.settle()
    request = w.arrive([4, 4, 5, 5, 6, 6, 7, 7, 8], ask=False)
    assert w.admit(request, chunk=8)
    w.check()
    w.release(request)
    assert w.admit(behind)
    w.check()


def test_a_refused_load_gives_everything_back() -> None:
    """Also slots of groups before the one without room."""
    w = World(TWO, [12, 6], [9, 9])
    serve(w, A)
    w.empty(0)
    other = lease_of(w, [9] * 7)
    w.run(other, 7)
    request = w.arrive(A, ask=False)
    assert not w.admit(request, 2)
    w.check()
    w.release(other)
    assert w.admit(request, 1)
    w.finish()


def test_growing_is_all_or_nothing() -> None:
    w = World(TWO, [8, 3], [0, 0])
    request = lease_of(w, A)
    assert not w.run(request, 7, ahead=1)
    w.check()
    assert w.run(request, 6)


def test_room_counts_what_is_idle_and_what_is_shared() -> None:
    w = World(TWO, [8, 8], [8, 8])
    mine, other = np.array(A, np.int32), np.array([9, 9, 9], np.int32)

    def most(tokens: np.ndarray) -> int:
        return max(n for n in range(20) if may_begin(w, tokens, n, chunk=P))

    assert most(mine) == 16
    request = lease_of(w, A)
    w.run(request, 7)
    assert most(mine) == 14  # all but the private page
    assert most(other) == 8
    w.release(request)
    assert most(other) == 16


def test_room_in_a_window_is_what_it_holds_for_a_moment() -> None:
    """A window needs room for its tail and one step, not for all pages that it will pass."""
    tokens = np.array(A, np.int32)

    def fits(*device: int, total: int = 40 * P) -> bool:
        return may_begin(World(FIVE, device, [0] * 5), tokens, total, chunk=2 * P)

    enough = (40, 2 + 1 + 2, 1 + 1, 40, 3 + 1 + 2)
    assert fits(*enough)
    for g in range(5):
        less = (*enough[:g], enough[g] - 1, *enough[g + 1 :])
        assert not fits(*less)
        assert fits(*less, total=0), "its first step has room all the same"


def test_a_cache_without_a_page_of_every_kind_forgets_paths() -> None:
    """No group needs every page: a path without slots must leave the tree."""
    schema = Schema(Identity("m"), P, (group("state", 1),))
    w = World(schema, [4], [4])
    for token in range(30):
        serve(w, [token] * 5)
    assert len(w.table) <= 2 * (4 + 4)


def test_a_path_that_came_to_nothing_is_forgotten() -> None:
    """No group needs every page, and the bytes were lost while a request held the path."""
    w = World(Schema(Identity("m"), P, (group("state", 1),)), [4], [4])
    serve(w, [1] * 5)
    w.restart()
    request = w.arrive([1] * 5)
    w.step("read")  # the probe
    w.tick()
    w.step("read", fault="raise")
    w.tick()
    assert len(w.table) == 2
    w.release(request)
    assert len(w.table) == 0
    w.check()


# --- the way down


@pytest.mark.parametrize("schema", [TWO, FOUR], ids=["two groups", "four groups"])
def test_everything_committed_is_in_storage_after_a_drain(schema: Schema) -> None:
    """Every page of every group, including ancestors and pages that slid out of a window."""
    w = world(schema)
    serve(w, A, each=2)
    serve(w, [1, 1, 9, 9, 9])
    assert len(w.store.records) == 4 * len(schema.groups)
    assert not w.cache.counts["unsaved_pages_total"] + w.cache.counts["unwritten_pages_total"]
    w._check_storage()


def test_saving_evicts_only_for_what_it_saves() -> None:
    """A page that is being read to the host needs no second slot."""
    w = World(TWO, [40, 40], [8, 8])
    serve(w, A)
    w.restart()
    for token in (7, 8):
        serve(w, [token] * 5)
    w.arrive(A)
    w.step("read")
    w.tick()
    request = w.arrive(A, ask=False)
    assert w.admit(request)
    w.run(request, 7)
    w.tick()
    assert w.cache.figures()["evicted_pages_total{tier=host,group=full}"] == 0
    w.finish()


@pytest.mark.parametrize("lost", [0, 1])
def test_room_for_a_save_may_end_what_is_saved(lost: int) -> None:
    """Room for a page evicts its ancestor from the host, which the device has lost: both end."""
    w = world(device=3, host=1)
    request = lease_of(w, A)
    assert w.run(request, 2)
    w.settle()
    assert w.run(request, 2)  # the first page is on the host, the second waits in line
    first = request.lease.path[:1]
    w.release(request)
    w.cache.residency.drop(w.cache.residency.device, lost, first)
    w.settle()
    assert not w.tree()
    assert w.cache.counts["unsaved_pages_total"] == 2
    w.check()


def test_without_a_host_nothing_is_saved() -> None:
    w = world(host=0)
    serve(w, A)
    assert w.cache.idle
    assert not w.store.records
    assert lease_of(w, A).lease.pages == 3


def test_what_did_not_get_down_is_counted() -> None:
    w = world()
    request = lease_of(w, A)
    w.run(request, 6)
    w.tick()
    w.step("save", fault="raise")
    w.tick()
    assert w.cache.counts["unsaved_pages_total"] == 6
    w.release(request)
    serve(w, [8] * 7)
    assert w.cache.counts["unsaved_pages_total"] == 6
    w.run(lease_of(w, [9] * 7), 6)
    w.tick()
    w.step("save")
    w.tick()
    w.step("write", fault="raise")
    w.tick()
    assert w.cache.counts["unwritten_pages_total"] == 6


def test_a_slow_store_pins_at_most_half_of_the_host() -> None:
    w = World(TWO, [9, 9], [8, 8])
    request = lease_of(w, [0] * 13)
    w.run(request, 13)
    w.tick()
    w.step("save")
    w.tick()
    assert np.count_nonzero(w.table.pins[1, 0]) == 4
    w.tick()
    assert np.count_nonzero(w.table.pins[1, 0]) == 4
    w.finish()


def test_each_group_has_half_of_its_own_host_for_writes() -> None:
    """What is being written of one group takes nothing from the others."""
    w = World(TWO, [9, 9], [8, 8])
    for token in (1, 2):
        request = w.arrive([token] * 5, ask=False)
        assert w.admit(request, 5)
        assert w.run(request, 5)
        w.tick()
        w.step("save")
        w.tick()
    assert np.count_nonzero(w.table.pins[1], axis=1).tolist() == [4, 4]
    w.finish()


def test_storage_hears_of_hits_in_memory_ancestors_last() -> None:
    w = world(FOUR)
    serve(w, A)
    w.store.touched.clear()
    lease_of(w, A)
    prints = [FOUR.fingerprint(g) for g in FOUR.groups]
    depths = [(prints.index(key.group), len(w.names[key.page][1]) // P) for key in w.store.touched]
    third, second = [(0, 3), (1, 3), (2, 3), (3, 3)], [(0, 2), (1, 2), (3, 2)]
    assert depths == [*third, *second, (0, 1), (3, 1)], "page by page"


# --- the way up


def test_64_requests_with_one_prefix_read_it_once() -> None:
    w = world(FOUR, device=80, host=40)
    serve(w, A)
    w.restart()
    requests = [w.arrive([*A[:6], 9, k]) for k in range(64)]
    for _ in range(64 // 16):  # a tick tries only some of a long line
        w.settle()
        w.check()
    for request in requests:
        assert w.admit(request, 2)
    w.settle()
    w.check()
    assert {request.lease.pages for request in requests} == {3}
    assert read_counts(w) == {1}
    assert w.happened["load lands"] == 1
    assert requests[0].lease.explanation.tokens["storage"] == 6


def test_a_prefetch_joins_a_read_and_waits_for_it() -> None:
    w = world()
    serve(w, A)
    w.restart()
    first, second = w.arrive(A), w.arrive([*A[:4], 9])
    w.step("read", count=2)  # both probes
    w.tick()
    assert len(w.lanes["read"].queue) == 1
    assert not w.cache.ready(second.prefetch)
    w.settle()
    kept = {int(page) for _, pages in second.prefetch.pinned for page in pages}
    assert kept == {*second.prefetch.path.tolist()}, "of what it waited for, its own pages only"
    w.release(first)
    w.empty(1)
    w.admit(second)
    assert second.lease.pages == 2, "the second pins what it waited for"
    w.finish()


def test_prefetches_share_a_part_of_the_host() -> None:
    """They wait in line for it; a later one that fits may start first."""
    w = World(TWO, [24, 24], [8, 8])
    long, other, short = [1] * 9, [2] * 7, [3] * 3
    for tokens in (long, other, short):
        serve(w, tokens)
    w.restart()
    first, second, third = (w.arrive(tokens) for tokens in (long, other, short))
    w.settle()
    assert [w.cache.ready(r.prefetch) for r in (first, second, third)] == [True, False, False]
    assert w.admit(first)
    w.settle()
    assert w.cache.ready(second.prefetch)
    assert w.cache.ready(third.prefetch)
    w.finish()


def test_a_prefetch_does_not_evict_its_own_path() -> None:
    """The host has more of it than a prefetch may pin, and storage has the rest."""
    w, roomy = World(TWO, [24, 24], [7, 7]), World(TWO, [24, 24], [24, 24])
    serve(roomy, [1] * 17)
    w.store.records, w.names = roomy.store.records, roomy.names
    serve(w, [1] * 11)
    serve(w, [2] * 5)  # newer, and fills the host
    w.empty(0)
    request = w.arrive([1] * 17)
    w.settle()
    w.check()
    assert w.admit(request)
    assert request.lease.pages == 7
    w.finish()


def test_a_prefetch_takes_what_fits() -> None:
    w = World(TWO, [24, 24], [12, 12])
    serve(w, [1] * 21)
    w.restart()
    request = w.arrive([1] * 21)
    w.settle()
    assert w.admit(request)
    assert request.lease.pages == 6


def test_a_prefetch_evicts_only_for_what_it_reads() -> None:
    """A hit on a long prompt needs one snapshot: reading it evicts no other prompt's."""
    schema = Schema(Identity("m"), P, (group("full"), group("state", 1)))
    w = World(schema, [40, 40], [40, 12])
    serve(w, [0] * 21, each=2)
    w.restart()
    for token in range(1, 9):
        serve(w, [token] * 3)
    request = w.arrive([0] * 21)
    w.settle()
    assert request.prefetch.reach == 10
    assert w.cache.figures()["evicted_pages_total{tier=host,group=state}"] == 0


def test_a_record_that_is_gone_shortens_the_hit() -> None:
    w = world()
    serve(w, A)
    w.restart()
    request = w.arrive(A)
    w.step("read")  # the probe
    w.tick()
    key = next(k for k in w.store.records if len(w.names[k.page][1]) == 6)
    w.store.delete([key])
    w.lost.add(key)
    w.settle()
    w.check()
    w.admit(request)
    assert request.lease.pages == 2
    assert w.cache.counts["missed_reads_total"] == 1
    w.finish()


def test_a_cancelled_prefetch_arrives_for_others() -> None:
    w = world()
    serve(w, A)
    w.restart()
    request = w.arrive(A)
    w.step("read")
    w.tick()
    w.step("read")
    w.release(request)
    w.check()
    w.settle()
    w.check()
    assert lease_of(w, A).lease.pages == 3
    w.finish()


def test_what_nobody_waits_for_any_more_is_not_read() -> None:
    w = world()
    serve(w, A)
    w.restart()
    first = w.arrive(A)
    w.step("read")
    w.tick()
    w.release(first)
    w.settle()
    assert not read_counts(w)
    assert w.cache.counts["missed_reads_total"] == 0
    second = w.arrive(A)
    w.settle()
    assert w.admit(second)
    assert second.lease.pages == 3
    w.finish()


def test_a_probe_that_comes_back_to_nobody() -> None:
    w = world()
    request = w.arrive(A)
    w.release(request)
    w.finish()


def test_a_load_that_fails_shortens_the_hit() -> None:
    w = world(FOUR)
    serve(w, A, each=2)
    w.empty(0)
    request = w.arrive(A, ask=False)
    w.admit(request)
    assert not request.lease.ready
    w.step("load", fault="raise")
    w.tick()
    w.check()
    assert request.lease.ready
    assert request.lease.pages == 0
    assert request.lease.explanation.limited_by == "full"
    assert w.cache.counts["missed_loads_total"] == 9
    assert w.run(request, 7)
    w.finish()


def test_a_load_is_joined_by_whoever_needs_any_group_of_it() -> None:
    """It brings the third page of one group, and the first page of the other."""
    w = world()
    serve(w, A)
    w.evict(0, 0, 1)
    device = w.cache.residency.device
    w.cache.residency.drop(device, 1, np.array([w.tree()["", (1, 1)]]))
    long, short = w.arrive(A, ask=False), w.arrive([1, 1, 9], ask=False)
    for request in (long, short):
        assert w.admit(request)
        assert not request.lease.ready
    assert len(w.lanes["load"].queue) == 1
    w.settle()
    assert (long.lease.pages, short.lease.pages) == (3, 1)
    w.finish()


def test_a_hit_is_as_long_as_what_is_there_at_last() -> None:
    """A page whose load failed for one request and landed for another serves both."""
    w = world()
    serve(w, A)
    w.empty(0)
    first, second, third = (w.arrive(t, ask=False) for t in ([1, 1, 9], A, [1, 1, 8]))
    w.admit(first)
    w.admit(second)
    assert len(w.lanes["load"].queue) == 2, "the second joins the first, and loads two pages more"
    w.step("load", fault="raise")
    w.tick()
    assert first.lease.pages == 0
    w.admit(third)
    w.step("load", 1)
    w.tick()
    assert third.lease.ready
    assert not second.lease.ready
    w.step("load")
    w.tick()
    w.check()
    assert second.lease.pages == 3
    w.finish()


def test_a_lenient_load_that_fails_is_masked() -> None:
    w = world(FOUR, missing="lenient")
    serve(w, A)
    w.empty(0)
    request = w.arrive(A, ask=False)
    w.admit(request)
    (ticket,) = w.lanes["load"].queue
    w.step("load")
    ticket.moves[3].landed = np.array([True, False, True])
    w.tick()
    w.check()
    assert request.lease.pages == 3
    assert request.lease.valid_from("draft") == 2
    w.run(request, 1)
    w.finish()


def test_a_lenient_hit_that_came_to_nothing_masks_nothing() -> None:
    """The request computes all pages itself: they are valid and worth keeping."""
    w = world(FOUR, missing="lenient")
    serve(w, A)
    w.evict(0, 3, 16)
    w.evict(1, 3, 1)
    w.empty(0)
    request = w.arrive(A, ask=False)
    w.admit(request)
    assert request.lease.valid_from("draft") == 3
    w.step("load", fault="raise")
    w.tick()
    assert request.lease.pages == request.lease.valid_from("draft") == 0
    w.run(request, 7)
    w.release(request)
    assert lease_of(w, A).lease.valid_from("draft") == 0


def test_a_stale_hit_is_private_also_when_it_was_loaded() -> None:
    """Pages computed after other pages' bytes are never shared."""
    w = world(FOUR, missing="stale")
    serve(w, A)
    for tier in range(2):
        w.evict(tier, 3, 16)
    w.empty(0)
    lease = w.cache.admit(np.array(A, np.int32), chunk=1)
    w.settle()
    assert lease.pages == 3
    w.cache.grow(lease, 9)
    w.cache.commit(lease, np.array([*A, 4, 5, 5], np.int32))
    w.cache.check()
    assert not w.table.state[0, 3].any()


# --- a store that hangs


@pytest.mark.parametrize("verb", ["probe", "read", "write"])
def test_requests_go_on_without_a_store_that_hangs(verb: str) -> None:
    """No request waits longer than the stall limit."""
    store, go = DictStore(), threading.Event()
    media = TruthMedia([16] * 2, [16] * 2)
    tokens = np.array(A, np.int32)
    with_records = World(TWO, [16] * 2, [16] * 2)
    serve(with_records, A)
    if verb != "write":
        store.records = with_records.store.records
    method = getattr(store, verb)
    setattr(store, verb, lambda *args: (go.wait(120), method(*args))[1])
    policy = Policy(stall_seconds=0.05, prefetch_min_tokens=0)
    cache = Cache(TWO, [16] * 2, [16] * 2, store, policy, media)
    try:
        for _ in range(2):
            prefetch = cache.prefetch(tokens)
            end = time.monotonic() + 60
            while not cache.ready(prefetch):
                assert time.monotonic() < end, "a request waits for a store that hangs"
                cache.tick()
                time.sleep(0.005)
            lease = cache.admit(tokens, chunk=7, prefetch=prefetch)
            assert lease is not None
            assert cache.grow(lease, 7)
            cache.commit(lease, tokens)
            cache.release(lease)
            for _ in range(20):
                cache.tick()
                cache.check()
                time.sleep(0.005)
        while not cache.figures()["storage_breaker_trips_total"]:
            assert time.monotonic() < end, "a store that hangs goes unnoticed"
            cache.tick()
            time.sleep(0.005)
    finally:
        go.set()
        cache.close(60)


# --- ends


def test_release_is_idempotent_and_final() -> None:
    w = world()
    request = lease_of(w, A)
    lease = request.lease
    w.run(request, 5)
    w.release(request)
    w.cache.release(lease)
    w.cache.commit(lease, np.array(A, np.int32))
    w.cache.check()
    assert len(w.tree()) == 2


def test_growing_a_released_lease_leaks_nothing() -> None:
    w = world()
    request = lease_of(w, A)
    lease = request.lease
    w.release(request)
    assert not w.cache.grow(lease, 4)
    w.cache.check()


def test_a_closed_cache_refuses_requests() -> None:
    w = world()
    request = lease_of(w, A)
    w.run(request, 7)
    w.release(request)
    w.settle()
    w.cache.close()
    w.cache.close()
    with pytest.raises(Closed):
        w.cache.prefetch(request.array)
    with pytest.raises(Closed):
        w.cache.admit(request.array)


def test_draining_gives_up_in_time() -> None:
    w = world()
    request = lease_of(w, A)
    w.run(request, 7)
    assert not w.cache.drain(timeout=0.01)


def test_figures_name_everything() -> None:
    w = world()
    serve(w, A)
    w.store.faults["corrupt"] = 2
    w.step("read")
    figures = w.cache.figures()
    assert figures["slots{tier=host,group=draft}"] == 16
    assert figures["pages"] == 3
    assert figures["leases"] == figures["prefetches"] == 0
    assert figures["moved_bytes_total{lane=save}"] == 6 * 512
    assert figures["storage_faults_total{kind=corrupt}"] == 2
    assert figures["storage_breaker_open"] == 0
    assert all(isinstance(value, (int, float)) for value in figures.values())


def test_there_are_two_memory_tiers() -> None:
    with pytest.raises(RequestError, match="no memory tier is called 'disk'"):
        world().cache.evict("disk")


# --- damage


@pytest.mark.parametrize("kind", ["load", "read"])
def test_broken_bookkeeping_costs_pages_not_the_server(kind: str, caplog) -> None:
    """A row is damaged: its pages are dropped, no request waits, and serving goes on."""
    w = world()
    serve(w, A)
    if kind == "load":
        w.empty(0)
        request = w.arrive(A, ask=False)
        w.admit(request)
    else:
        w.restart()
        request = w.arrive(A)
        w.step("read")
        w.tick()
    w.table.state[0 if kind == "load" else 1, 1, w.tree()["", (1, 1)]] = 0
    w.step(kind)
    w.tick()
    assert w.cache.counts["invariant_errors_total"] == 1
    assert "bookkeeping is wrong" in caplog.text
    assert w.tree() == {}
    if kind == "load":
        assert request.lease.ready
    else:
        assert w.cache.ready(request.prefetch)
    again = w.arrive([8] * 5, ask=False)
    assert w.admit(again)


def test_a_job_that_breaks_costs_its_own_pages_and_no_other_job() -> None:
    """All jobs of the tick are applied."""
    w = world()
    for token in (1, 2):
        request = w.arrive([token] * 5, ask=False)
        assert w.admit(request, 5)
        assert w.run(request, 5)
        w.release(request)
        w.tick()
        w.step("save")
        w.tick()
    assert [kind for kind, _ in w.inside.moves()] == ["write"] * 4
    w.table.pins[1, 0, w.tree()["", (1, 1)]] = 0
    w.step("write", 0, 2)
    w.tick()
    assert w.cache.counts["invariant_errors_total"] == 1
    assert not w.inside.busy, "the other job waits for the next tick"
    assert set(w.tree()) == {("", (2,) * 2), ("", (2,) * 4)}
    assert w.inside.stored[:, list(w.tree().values())].all()
    w.cache.check()


@pytest.mark.parametrize("together", [False, True])
def test_who_waits_for_two_loads_is_ready_when_one_of_them_broke(together: bool) -> None:
    w = world()
    serve(w, A)
    w.empty(0)
    first, second = (w.arrive(tokens, ask=False) for tokens in ([1, 1, 9], A))
    assert w.admit(first)
    assert w.admit(second)
    assert len(second.lease.arriving) == 2
    w.table.state[0, 1, w.tree()["", (1, 1)]] = 0
    w.step("load")
    if not together:
        w.tick()
        assert second.lease.released
        assert second.lease.ready, "a lost lease waits for the other load"
    w.step("load")
    w.tick()
    assert w.cache.counts["invariant_errors_total"] == 1
    assert second.lease.ready
    w.cache.check()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda w, page: w.table.holds.__setitem__(page, 0), ""),
        (lambda w, page: w.table.holds.__setitem__(page, 0), "raise"),
        (lambda w, page: w.table.pins.__setitem__((1, 1, page), 0), ""),
        (lambda w, page: w.table.pins.__setitem__((1, 1, page), 0), "raise"),
        (lambda w, page: w.table.pins.__setitem__((0, 0, page), 0), "raise"),
    ],
    ids=["holds", "holds, nothing landed", "source", "source, nothing landed", "pins"],
)
def test_who_waits_for_what_broke_reads_nothing(spoil, fault: str, begun: bool) -> None:
    """It may have begun on lost pages: its lease is released, and the request asks again."""
    w = world()
    serve(w, A)
    w.evict(0, 1, 16)
    request = w.arrive(A, ask=False)
    assert w.admit(request)
    lease = request.lease
    spoil(w, w.tree()["", tuple(A[:6])])
    w.step("load", fault=fault)
    if begun:
        w.cache.grow(lease, 7)
    w.tick()
    assert w.cache.counts["invariant_errors_total"] == 1
    assert lease.ready
    assert lease.released
    assert not w.cache.grow(lease, 8)
    assert lease.pages == len(lease.slots("full")) == len(lease.slots("draft")) == 0
    w.cache.check()
    assert w.table.holds.sum() == w.table.pins.sum() == 0
    w.release(request)
    serve_again(w)


def serve_again(w: World) -> None:
    """After damage nothing is leaked, and requests are served."""
    w.settle()
    w.cache.check()
    w.cache.evict("device")
    assert [w.cache.residency.device.free_slots(g) for g in w.groups] == w.device
    request = w.arrive([8] * 7, ask=False)
    assert w.cache.admit(request.array, chunk=7)


@pytest.mark.parametrize("column", ["holds", "pins"])
def test_a_release_that_breaks_leaks_nothing(column: str, caplog) -> None:
    w = world()
    serve(w, A)
    request, other = lease_of(w, A), lease_of(w, A[:3])
    w.run(request, 1)
    page = request.lease.path[2]
    getattr(w.table, column)[..., page] = 0
    w.cache.release(request.lease)
    assert "bookkeeping is wrong" in caplog.text
    w.tick()
    w.cache.check()
    assert other.lease.slots("full")[0] >= 0
    w.cache.release(other.lease)
    assert w.table.holds.sum() == w.table.pins.sum() == 0
    serve_again(w)


def test_a_cancel_that_breaks_leaks_nothing() -> None:
    w = world()
    serve(w, A)
    w.restart()
    request = w.arrive(A)
    w.settle()
    w.table.pins[1, 1, w.tree()["", (1, 1)]] = 0
    w.cache.cancel(request.prefetch)
    w.tick()
    w.cache.check()
    assert w.table.holds.sum() == w.table.pins.sum() == 0


def test_an_admission_that_breaks_is_refused_and_leaks_nothing() -> None:
    """It breaks half way: what it pinned and reserved becomes free."""
    w = world()
    serve(w, A)
    w.empty(0)
    adopt = w.cache.residency.device.adopt

    def broken(group: int, *rest) -> None:
        if group:
            raise InvariantError("planted")
        adopt(group, *rest)

    w.cache.residency.device.adopt = broken
    request = w.arrive(A, ask=False)
    assert w.cache.admit(request.array, chunk=7) is None
    w.cache.residency.device.adopt = adopt
    again = w.cache.admit(request.array, chunk=7)  # before its leftovers confuse anything
    assert again.pages == 0
    w.cache.release(again)
    w.cache.check()
    assert w.table.holds.sum() == w.table.pins.sum() == 0
    serve_again(w)


def test_an_admission_that_breaks_costs_its_hit() -> None:
    """Or the request would be refused for the same page again and again."""
    w = world()
    serve(w, A)
    device, page = w.cache.residency.device, w.tree()["", tuple(A[:6])]
    pin = device.pin

    def broken(groups, pages: np.ndarray) -> np.ndarray:
        if page in pages:
            raise InvariantError("planted")
        return pin(groups, pages)

    device.pin = broken
    tokens = np.array(A, np.int32)
    assert w.cache.admit(tokens, chunk=7) is None
    again = w.cache.admit(tokens, chunk=7)
    assert again is not None
    assert again.pages == 0
    w.cache.release(again)
    w.cache.check()
    assert w.cache.counts["invariant_errors_total"] == 1


def test_a_lease_whose_page_has_moved_is_lost() -> None:
    """It would read another page's bytes: the audit finds that when anything breaks."""
    w = world()
    serve(w, A)
    victim, request = lease_of(w, A), lease_of(w, [7] * 5)
    w.run(request, 5)
    w.table.slot[0, 0, victim.lease.path[0]] = 15
    w.table.holds[request.lease.path[1]] = 0
    w.cache.release(request.lease)
    w.tick()
    assert victim.lease.released
    assert not w.cache.grow(victim.lease, 8)


def test_a_copy_that_breaks_while_room_is_made_is_contained() -> None:
    """Under write-back a lease that grows waits for the copy; a tick applies and mends it."""
    w = world(device=4)
    w.lanes.clear()
    back = Policy(write="write_back", write_ahead=0.0, prefetch_min_tokens=0)
    w.cache = Cache(TWO, [4, 4], [16, 16], w.store, back, w.media, w._lane)
    w.table = w.cache.residency.table
    request = lease_of(w, A)
    w.run(request, 7)
    w.release(request)
    lease = w.cache.admit(np.array([9], np.int32), chunk=1)
    assert not w.cache.grow(lease, 3)
    w.step("save", 0, 99)
    w.table.pins[0, :, w.tree()["", tuple(A[:6])]] = 0
    assert not w.cache.grow(lease, 3)
    assert w.cache.counts["invariant_errors_total"] == 0, "no copy lands while a lease grows"
    w.tick()
    assert w.cache.counts["invariant_errors_total"] > 0
    w.cache.check()
    assert w.cache.grow(lease, 3)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w, lease: w.table.holds.__setitem__(lease.path[0], 9), "owner"),
        (lambda w, lease: w.table.pins.__setitem__((0, 0, lease.path[0]), 9), "owner"),
        (lambda w, lease: lease.table.__setitem__((0, 0), 9), "not its page's"),
        (lambda w, lease: w.cache.residency.device.reserve(0, 1), "private slot"),
        (lambda w, lease: w.table.dying.__setitem__(lease.path[0], True), "neither|dying"),
        (lambda w, lease: w.table.used.__setitem__((0, lease.path[1]), 99), "newer"),
        (lambda w, lease: w.table.allocate(NO_IDS, 1, []), "neither"),
        (
            lambda w, lease: w.table.dying.__setitem__(w.table.allocate(NO_IDS, 1, []), True),
            "no holds",
        ),
        (lambda w, lease: _strip(w, lease), "serve no hit"),
    ],
    ids=["holds", "pins", "slot", "private", "dying", "clock", "lost", "nobody", "useless"],
)
def test_check_sees_damage(spoil, message: str) -> None:
    w = world()
    request = lease_of(w, A)
    w.run(request, 7)
    w.check()
    spoil(w, request.lease)
    with pytest.raises(InvariantError, match=message):
        w.cache.check()


def _strip(w: World, lease) -> None:
    """Take a page's slots away but leave it in the tree."""
    w.table.pins[0, 0, lease.path[-1]] = 0
    w.cache.residency.device.recount(w.cache._audit.count().private[0])
    w.cache.residency.device.drop(0, lease.path[-1:])


# --- real bytes, real threads, a real store


def test_a_restart_brings_every_byte_back(tmp_path) -> None:
    """With CPU tensors, threaded lanes and the file store; two groups of different shape."""
    schema = Schema(
        Identity("m"),
        4,
        (
            Group("full", tuple(Component(n, (0, 1), (4, 8), "BF16") for n in "kv")),
            Group("state", (Component("conv", (0,), (3,), "F32"),), tail=1),
        ),
    )
    sizes = {schema.fingerprint(g): g.record_bytes for g in schema.groups}
    tokens = np.arange(33, dtype=np.int32)

    def start() -> Cache:
        policy = Policy(prefetch_min_tokens=0)
        return Cache(schema, [10, 10], [16, 16], FileStore(tmp_path, sizes), policy)

    def pages(cache: Cache, lease, page: int) -> list[bytes]:
        return [
            pool[lease.slots(name)[page]].reshape(-1).view(dtype=pool.dtype).clone()
            for name, components in cache.media.pools.items()
            for pools in components.values()
            for pool in pools
            if lease.slots(name)[page] >= 0
        ]

    cache = start()
    lease = cache.admit(tokens, chunk=33)
    assert cache.grow(lease, 33)
    for g in schema.groups:
        for components in cache.media.pools[g.name].values():
            for pool in components:
                pool.copy_(
                    (np.random.default_rng(0).random(1)[0] + pool.new_ones(1)).expand_as(pool)
                )
                pool[:] = pool * pool.new_tensor(range(1, len(pool) + 1)).view(
                    -1, *[1] * (pool.dim() - 1)
                )
    first = [pages(cache, lease, i) for i in range(8)]
    cache.commit(lease, tokens)
    cache.release(lease)
    cache.close()

    cache = start()
    prefetch = cache.prefetch(tokens)
    while not cache.ready(prefetch):
        cache.tick()
    lease = cache.admit(tokens, chunk=1, prefetch=prefetch)
    assert lease.pages == 8
    while not lease.ready:
        cache.tick()
    assert lease.explanation.tokens == {"device": 0, "host": 0, "storage": 32}
    for i in range(8):
        for a, b in zip(first[i], pages(cache, lease, i), strict=False):
            assert a.equal(b)
    cache.release(lease)
    cache.check()
    cache.close()
