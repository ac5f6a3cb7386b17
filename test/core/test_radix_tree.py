"""The tree without its cache around it: what it promises to a caller that locks nothing, or drops a private path."""

from __future__ import annotations

import numpy as np

from radixpd.core.page_hash import token_bytes
from radixpd.core.radix_tree import RadixTree, TreeNode


def _key(*tokens: int) -> bytes:
    return token_bytes(np.array(tokens))


def _extend(tree: RadixTree, node: TreeNode, *tokens: int) -> TreeNode:
    """Hang pages of one token under `node`; their ids are the tokens."""
    return tree.extend(node, _key(*tokens), list(tokens), [b""] * len(tokens), 0)


def test_a_leaf_that_gets_a_child_is_no_longer_evictable() -> None:
    tree = RadixTree(1)
    root, _ = tree.match(b"", b"", 0)
    leaf = _extend(tree, root, 1)
    child = _extend(tree, leaf, 2)
    assert leaf not in tree.evictable
    assert child in tree.evictable
    assert tree.evict(9)[0] == [2, 1]


def test_only_the_sole_owner_grows_a_leaf_in_place() -> None:
    tree = RadixTree(1)
    root, _ = tree.match(b"", b"", 0)
    leaf = _extend(tree, root, 1)
    tree.lock(leaf)
    assert _extend(tree, leaf, 2) is leaf
    assert (leaf.page_ids, tree.pages, tree.locked_pages) == ([1, 2], 2, 2)
    tree.lock(leaf)
    assert _extend(tree, leaf, 3) is not leaf
    assert (leaf.page_ids, tree.pages, tree.locked_pages) == ([1, 2], 3, 2)


def test_a_split_keeps_the_locked_object_at_the_end_of_its_prefix() -> None:
    tree = RadixTree(1)
    root, _ = tree.match(b"", b"", 0)
    leaf = _extend(tree, root, 1, 2, 3)
    tree.lock(leaf)
    upper, found = tree.match(b"", _key(1, 2, 9), 3)
    assert found == [1, 2]
    assert leaf.parent is upper
    assert leaf.page_ids == [3]
    assert (upper.refs, leaf.refs, tree.locked_pages) == (1, 1, 3)


def test_drop_takes_the_idle_path_and_stops_at_what_is_shared_or_locked() -> None:
    tree = RadixTree(1)
    root, _ = tree.match(b"", b"", 0)
    one = _extend(tree, root, 1)
    two, three = _extend(tree, one, 2, 3), _extend(tree, one, 4)
    tree.lock(three)
    assert tree.drop(two)[0] == [3, 2]
    assert tree.drop(three)[0] == []
    tree.unlock(three)
    assert tree.drop(three)[0] == [4, 1]
    assert not tree.roots
