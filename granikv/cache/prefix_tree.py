"""A radix tree over token ids that indexes stored KV and the demand for it.

A node covers tokens [start, start + len). It may have storage for the first `published` of them,
or none: then it stands for what waiting requests will need, so that "shared by two" is a property
of the tree and not a search. Tokens are compared for equality; no hash decides identity.
With pages every node covers whole pages, and prompts part at a page's start.
It knows neither the arena's free list nor the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

import numpy as np

from granikv.core import Namespace, Request


class Node:
    """A run of tokens with at most one storage: an extent (HOT) or a list of slots (COLD)."""

    __slots__ = (
        "parent", "children", "tokens", "start", "extent", "slots", "allocated", "published",
        "users", "locks", "writer", "last_use", "reader_step", "filled_step", "hinted",
    )  # fmt: skip

    def __init__(self, parent: Node | None, tokens: np.ndarray, start: int):
        self.parent = parent
        self.children: dict[int | bytes, Node] = {}  # by PrefixTree.key of their tokens
        self.tokens = tokens  # int32 [len]
        self.start = start
        self.extent: int | None = None  # HOT: first arena slot; `allocated` slots are reserved
        self.slots: np.ndarray | None = None  # COLD: int32 [len], the first `allocated` are valid
        self.allocated = 0
        self.published = 0  # readable by others
        self.users = 0  # live requests, waiting ones included: demand
        self.locks = 0  # running requests: not evictable while above 0
        self.writer: Request | None = None
        self.hinted = False  # HOT for one user too: declared, or another used it recently
        self.last_use = 0.0
        self.reader_step = -1  # last launched step that may still read it after the last unlock
        self.filled_step = -1  # the step whose moves write what it stores

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_hot(self) -> bool:
        return self.extent is not None

    def stored_slots(self) -> np.ndarray:
        """int32 [allocated]: the slots it holds, in token order."""
        if self.extent is not None:
            return np.arange(self.extent, self.extent + self.allocated, dtype=np.int32)
        return np.empty(0, np.int32) if self.slots is None else self.slots[: self.allocated]

    @property
    def is_complete(self) -> bool:
        return self.published == len(self.tokens)

    @property
    def is_orphan(self) -> bool:
        """Nobody stores, wants or extends it."""
        return not self.children and not self.users and not self.allocated

    @property
    def has_stored_children(self) -> bool:
        return any(c.allocated or c.has_stored_children for c in self.children.values())


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common head of two int32 arrays."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class PrefixTree:
    """One root per namespace. `version` changes whenever a path or a storage does.

    page_tokens: nodes start and end at multiples of it; callers pass whole pages.
    """

    def __init__(self, page_tokens: int = 1) -> None:
        self.roots: dict[Namespace, Node] = {}
        self.version = 0
        self.page_tokens = page_tokens

    def key(self, tokens: np.ndarray) -> int | bytes:
        """What siblings differ by: the first page. They may share tokens inside it."""
        if self.page_tokens == 1:
            return int(tokens[0])
        return tokens[: self.page_tokens].tobytes()

    def insert_path(self, namespace: Namespace, tokens: np.ndarray) -> Node:
        """The node that ends exactly at the last of `tokens`, made if needed."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(None, np.empty(0, np.int32), 0)
        return self.extend_path(root, tokens)

    def extend_path(self, node: Node, tokens: np.ndarray) -> Node:
        """The node below `node` that ends exactly behind `tokens`, made if needed."""
        while len(tokens):
            child = node.children.get(self.key(tokens))
            if child is None:
                child = Node(node, np.array(tokens, dtype=np.int32), node.end)
                node.children[self.key(tokens)] = child
                return child
            shared = common_length(child.tokens, tokens)
            shared -= shared % self.page_tokens
            node = child if shared == len(child) else self.split(child, shared)
            if child is not node and child.is_orphan:
                del node.children[self.key(child.tokens)]  # the evicted tail of `node`
            tokens = tokens[shared:]
        return node

    def split(self, node: Node, k: int) -> Node:
        """Cut `node` behind its first k tokens; returns the new head. No KV moves.

        The object stays the tail, so that requests whose leaf it is keep their leaf.
        """
        assert node.parent is not None and 0 < k < len(node) and k % self.page_tokens == 0
        head = Node(node.parent, node.tokens[:k], node.start)
        head.users, head.locks, head.writer = node.users, node.locks, node.writer
        head.last_use, head.reader_step = node.last_use, node.reader_step
        head.filled_step, head.hinted = node.filled_step, node.hinted
        head.allocated, head.published = min(node.allocated, k), min(node.published, k)
        if head.allocated:
            head.extent = node.extent
        node.allocated, node.published = max(node.allocated - k, 0), max(node.published - k, 0)
        if node.slots is not None:
            head.slots = node.slots[:k]
            node.slots = node.slots[k:] if node.allocated else None
        if node.extent is not None:
            node.extent = node.extent + k if node.allocated else None
        if head.published == k:
            head.writer = None
        node.tokens = node.tokens[k:]
        node.start += k
        node.parent.children[self.key(head.tokens)] = head
        head.children[self.key(node.tokens)] = node
        node.parent = head
        self.version += 1
        return head

    def path(self, leaf: Node) -> list[Node]:
        """Nodes from below the root to `leaf`."""
        nodes = []
        node: Node | None = leaf
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def hot_paths(self, leaves: Iterable[Node]) -> tuple[list[list[Node]], list[int]]:
        """(distinct paths of HOT nodes, index of each leaf's): leaves share one walk upwards."""
        paths: list[list[Node]] = []
        known: dict[Node, int] = {}  # by the last HOT node, or the root
        indices = []
        for leaf in leaves:
            node = leaf
            while node.extent is None and node.parent is not None:
                node = node.parent
            index = known.get(node)
            if index is None:
                index = known[node] = len(paths)
                paths.append(list(takewhile(lambda n: n.is_hot, self.path(node))))
            indices.append(index)
        return paths, indices

    def prune(self, node: Node) -> None:
        """Drop `node` and its ancestors as far as nobody stores or wants them.

        Dropped nodes have no parent, so that dropping one again does nothing.
        """
        while node.parent is not None and node.is_orphan:
            parent = node.parent
            del parent.children[self.key(node.tokens)]
            node.parent, node = None, parent
        if node.parent is None and not node.children and not node.users:
            for key, root in list(self.roots.items()):
                if root is node:
                    del self.roots[key]

    def nodes(self) -> Iterator[Node]:
        for root in self.roots.values():
            for child in root.children.values():
                yield from self.subtree(child)

    @staticmethod
    def subtree(node: Node) -> Iterator[Node]:
        """The node and all below it, parents first."""
        stack = [node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node
