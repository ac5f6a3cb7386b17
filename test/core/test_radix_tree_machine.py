"""Random histories of the prefix cache against a plain dict: which page holds which prefix, who owns it, who pins it.

The model knows nothing of nodes: it maps (namespace, prefix bytes) to a page id and keeps a list of owners. After every rule the whole
tree is compared with it, and so are the sums, the eviction queue, the hash chains and the replayed KV events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixpd.core.effects import CacheCleared, PagesRemoved, PagesStored
from radixpd.core.eviction import RANKS
from radixpd.core.page_hash import token_bytes
from radixpd.core.prefix_cache import PrefixCache
from radixpd.core.radix_tree import TreeNode

SPACES = st.sampled_from([b"", b"", b"", b"x" * 32])
STEMS = ("aaaaaaa", "abcdabc")  # letters name page contents, see `CacheMachine._data`
PAGES = st.builds(
    lambda stem, length, tail: [*stem[:length], *tail],
    st.sampled_from(STEMS),
    st.sampled_from([7, 5, 4, 3, 2, 1, 0]),
    st.sampled_from(["", "a", "b", "c", "dd", "bc"]),
)
CAPS = st.sampled_from([9, 9, 3, 2, 1, 0])  # of pages that a match may have
TAILS = st.integers(0, 15)  # tokens after the last full page
Key = tuple[bytes, bytes]  # namespace, prefix in whole pages


@dataclass(eq=False)
class Owner:
    """A request: `shared` bytes are the tree's and locked by `node`; `own` pages hold `fresh`, which goes on from there."""

    space: bytes
    node: TreeNode
    shared: bytes
    own: list[int]
    fresh: bytes


class CacheMachine(RuleBasedStateMachine):
    """Rules are what the scheduler does with a cache."""

    owners = Bundle("owners")

    @initialize(size=st.sampled_from([1, 4, 16]), pages=st.sampled_from([12, 8, 20, 3]), policy=st.sampled_from(sorted(RANKS)))
    def start(self, size: int, pages: int, policy: str) -> None:
        self.size, self.pages, self.policy = size, pages, policy
        self.cache = PrefixCache(pages, size, eviction_policy=policy)
        self.cache.fingerprint = "model"
        self.held: dict[Key, int] = {}
        self.live: list[Owner] = []
        self.known: dict[bytes, Key] = {}  # hash -> key, from events alone

    # ---- the model ----

    def _data(self, letters: Sequence[str], tail: int = 0) -> bytes:
        """a: zeros. b, c, d differ from it in the first, the middle and the last token, so every border inside a page is met."""
        tokens = np.zeros((len(letters), self.size), dtype=np.int32)
        for row, letter in zip(tokens, letters):
            row[{"a": 0, "b": 0, "c": self.size // 2, "d": self.size - 1}[letter]] = "abcd".index(letter)
        return token_bytes(np.concatenate([tokens.reshape(-1), np.full(tail % self.size, 7, dtype=np.int32)]))

    def _longest(self, space: bytes, data: bytes, limit: int) -> list[int]:
        found: list[int] = []
        while len(found) < limit and (page := self.held.get((space, data[: (len(found) + 1) * 4 * self.size]))) is not None:
            found.append(page)
        return found

    def _pinned(self) -> set[Key]:
        step = 4 * self.size
        return {(o.space, o.shared[:end]) for o in self.live for end in range(step, len(o.shared) + 1, step)}

    def _available(self) -> int:
        return self.pages - len(self._pinned()) - sum(len(o.own) for o in self.live)

    def _allocate(self, count: int) -> list[int]:
        """Allocate, replay what was evicted for it, and check that no more went than had to."""
        assert self.cache.available == self._available()
        free = self.cache.allocator.free_pages
        before = len(self.held)
        if count > free:  # asked only here: asking tidies the queue
            first, rank = self.cache.tree.evictable.first(), RANKS[self.policy]
            assert first is not None
            assert rank(first) == min(rank(leaf) for leaf in self._leaves()), "another leaf should go first"
        pages: list[int] = self.cache.allocate(count).tolist()
        self._replay()
        assert before - len(self.held) == max(count - free, 0)
        taken = set(self.held.values()).union(*(o.own for o in self.live))
        assert len(set(pages)) == count
        assert not taken & set(pages), "a page that has an owner was handed out"
        assert all(0 <= page < self.pages for page in pages)
        return pages

    def _leaves(self) -> list[TreeNode]:
        return [node for node in self.cache.tree.nodes() if not node.children and not node.refs]

    def _replay(self) -> None:
        """Events since the last time, into `known`; evicted pages leave the model."""
        for event in self.cache.events:
            if isinstance(event, PagesRemoved):
                for name in event.hashes:
                    key = self.known.pop(name)
                    assert key not in self._pinned(), "a locked page was evicted"
                    assert not any(k[0] == key[0] and k[1].startswith(key[1]) for k in self.known.values()), "a page went before its tail"
                    del self.held[key]
            elif isinstance(event, PagesStored):
                space, prefix = self.known[event.parent] if event.parent else (self.storing, b"")
                assert event.tokens.dtype == np.int32
                assert len(event.tokens) == self.size * len(event.hashes)
                for name, tokens in zip(event.hashes, event.tokens.reshape(-1, self.size), strict=True):
                    assert name not in self.known, "stored twice"
                    prefix += token_bytes(tokens)
                    self.known[name] = (space, prefix)
            else:
                assert isinstance(event, CacheCleared)
                self.known.clear()
        self.cache.events.clear()

    # ---- rules ----

    @rule(target=owners, space=SPACES, letters=PAGES, tail=TAILS, cap=CAPS, stage=st.sampled_from(["run", "commit", "leave", "leave"]))
    def arrive(self, space: bytes, letters: list[str], tail: int, cap: int, stage: str) -> Owner | MultipleResults[Owner]:
        """Match, lock, allocate the rest, and go on to some stage. If it does not fit, give the lock back: nothing is left of it."""
        data = self._data(letters, tail)
        limit = min(cap, len(letters))
        node, found = self.cache.match(space, data, limit)
        assert found.dtype == np.int32
        assert found.tolist() == self._longest(space, data, limit)
        owner = Owner(space, node, data[: len(found) * 4 * self.size], [], b"")
        self.live.append(owner)
        need = len(letters) - len(found)
        if need > self.cache.available:
            self.cache.release(node, found[:0])
            self.live.remove(owner)
            return multiple()
        owner.own = self._allocate(need)
        owner.fresh = data[len(found) * 4 * self.size :][: need * 4 * self.size]
        if stage != "run":
            self._commit(owner, need, 0)
        if stage == "leave":
            self._release(owner)
            return multiple()
        return owner

    @rule(owner=owners, count=st.sampled_from([9, 9, 1, 2]), priority=st.integers(0, 2))
    def commit(self, owner: Owner, count: int, priority: int) -> None:
        """Hand over the next pages; those that the tree has already are freed, and the tree's are used."""
        self._commit(owner, count, priority)

    def _commit(self, owner: Owner, count: int, priority: int) -> None:
        count = min(count, len(owner.own))
        if not count:
            return
        step = 4 * self.size
        data, computed = owner.fresh[: count * step], owner.own[:count]
        self.storing = owner.space
        done = self.cache.commit(owner.node, data, np.array(computed, dtype=np.int32), priority)
        expected = []
        for page in computed:
            owner.shared, owner.fresh = owner.shared + owner.fresh[:step], owner.fresh[step:]
            expected.append(self.held.setdefault((owner.space, owner.shared), page))
        owner.node, owner.own = done.node, owner.own[count:]
        assert done.page_ids.tolist() == expected
        assert done.merged == (expected != computed)
        self._replay()

    @precondition(lambda self: self._available() > 0)
    @rule(owner=owners, letter=st.sampled_from("abcd"))
    def grow(self, owner: Owner, letter: str) -> None:
        """One more page, as in generation."""
        owner.own += self._allocate(1)
        owner.fresh += self._data([letter])

    @rule(target=owners, owner=owners)
    def fork(self, owner: Owner) -> Owner:
        """A second owner of the shared part."""
        self.cache.lock(owner.node)
        sibling = Owner(owner.space, owner.node, owner.shared, [], b"")
        self.live.append(sibling)
        return sibling

    @rule(owner=consumes(owners))
    def release(self, owner: Owner) -> None:
        self._release(owner)

    def _release(self, owner: Owner) -> None:
        self.cache.release(owner.node, np.array(owner.own, dtype=np.int32))
        self.live.remove(owner)

    @rule(space=SPACES, letters=PAGES, tail=TAILS, cap=CAPS)
    def peek(self, space: bytes, letters: list[str], tail: int, cap: int) -> None:
        """Tells what `match` would find and changes nothing."""
        data, limit = self._data(letters, tail), min(cap, len(letters))
        before = self._shape()
        node, found = self.cache.peek(space, data, limit)
        assert found == len(self._longest(space, data, limit))
        assert self._shape() == before
        assert node is None or node.space == space

    @precondition(lambda self: not self.live)
    @rule(really=st.sampled_from([False, False, False, True]))
    def flush(self, really: bool) -> None:
        if not really:  # a full tree is worth more
            return
        self.cache.flush()
        assert self.cache.events[-1:] == [CacheCleared()]
        assert len(self.cache.events) == 1
        self._replay()
        self.held.clear()
        assert self.cache.allocator.free_pages == self.pages
        assert not self.cache.tree.roots

    # ---- invariants ----

    def _shape(self) -> list[object]:
        tree = self.cache.tree
        nodes = sorted(((id(n), bytes(n.key), n.refs, n.hits, n.last_used) for n in tree.nodes()), key=lambda n: n[0])
        return [nodes, sorted(tree.roots), len(tree.evictable)]

    @invariant()
    def one_owner_per_page(self) -> None:
        owned = [page for node in self.cache.tree.nodes() for page in node.page_ids] + [page for o in self.live for page in o.own]
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert len(owned) + self.cache.allocator.free_pages == self.pages, "a page has no owner"

    @invariant()
    def tree_is_the_model(self) -> None:
        step, contents = 4 * self.size, {}
        for node in self.cache.tree.nodes():
            prefix = _prefix(node)
            above = len(prefix) - len(node.key)
            for at, page in enumerate(node.page_ids):
                contents[node.space, prefix[: above + (at + 1) * step]] = page
        assert contents == self.held

    @invariant()
    def nodes_are_well_formed(self) -> None:
        step, tree = 4 * self.size, self.cache.tree
        for space, root in tree.roots.items():
            assert root.space == space
            assert root.parent is None
            assert root.children or root.refs, "an empty root stayed"
        for node in [*tree.roots.values(), *tree.nodes()]:
            for edge, child in node.children.items():
                assert child.parent is node
                assert child.space == node.space, "namespaces share a node"
                assert edge == bytes(child.key[:step])
        for node in tree.nodes():
            assert node.page_ids, "an empty node stayed"
            assert len(node.key) == step * len(node.page_ids) == step * len(node.hashes)

    @invariant()
    def sums(self) -> None:
        nodes = list(self.cache.tree.nodes())
        assert self.cache.tree.pages == sum(len(n.page_ids) for n in nodes)
        assert self.cache.tree.locked_pages == sum(len(n.page_ids) for n in nodes if n.refs)
        assert self.cache.tree.locked_pages == len(self._pinned())

    @invariant()
    def locks(self) -> None:
        """`refs` counts the owners at and below a node, and a lock ends exactly where the shared part of its owner ends."""
        count: dict[int, int] = {}
        for owner in self.live:
            assert owner.node.space == owner.space
            assert _prefix(owner.node) == owner.shared
            for node in owner.node.path():
                count[id(node)] = count.get(id(node), 0) + 1
        for node in [*self.cache.tree.roots.values(), *self.cache.tree.nodes()]:
            assert node.refs == count.pop(id(node), 0)
        assert not count, "a locked node left the tree"

    @invariant()
    def queue(self) -> None:
        """In the queue: every unlocked leaf and nothing else."""
        leaves = self._leaves()
        assert all(leaf in self.cache.tree.evictable for leaf in leaves)
        assert len(self.cache.tree.evictable) == len(leaves)

    @invariant()
    def hashes(self) -> None:
        """Each page's hash chains on its prefix, from the framed model name and namespace."""
        for node in self.cache.tree.nodes():
            name = hashlib.sha256((5).to_bytes(4, "little") + b"model" + node.space).digest()
            prefix, step = _prefix(node), 4 * self.size
            chain = [name := hashlib.sha256(name + prefix[at : at + step]).digest() for at in range(0, len(prefix), step)]
            assert node.hashes == chain[-len(node.hashes) :]

    @invariant()
    def events(self) -> None:
        """Replayed events give the pages of the tree."""
        assert not self.cache.events, "an event that no rule explains"
        assert {name: self.held[key] for name, key in self.known.items()} == {
            name: page for node in self.cache.tree.nodes() for name, page in zip(node.hashes, node.page_ids, strict=True)
        }


def _prefix(node: TreeNode) -> bytes:
    return b"".join(bytes(each.key) for each in reversed(list(node.path())))


def _settings(examples: int, steps: int, derandomize: bool) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def test_pc_04_sizes_follow_the_tree_in_random_histories() -> None:
    run_state_machine_as_test(CacheMachine, settings=_settings(400, 40, True))


@pytest.mark.full
def test_many_random_histories() -> None:
    run_state_machine_as_test(CacheMachine, settings=_settings(3000, 80, False))
