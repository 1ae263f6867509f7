"""What becomes HOT: nodes that two requests share, that a client declares, or that another
request used a moment ago. Unwritten ones get an extent at admission, COLD ones are promoted.
It decides and plans copies; it does not know when requests run.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from granikv.cache.compaction import Compactor
from granikv.cache.prefix_tree import Node, common_length
from granikv.cache.storage import NodeStorage
from granikv.config import EngineConfig
from granikv.core import Move, Namespace, Request

MAX_PREFIX_IDS = 256  # remembered prompts: 128 KB each at a 32K context


class PrefixIds:
    """Heads that requests with one prefix_id have in common, per namespace; an LRU of ids.

    The first prompt of an id is only remembered. The second one's common head with it is the
    declared prefix; later requests may narrow it. A head below min_tokens (a template's first
    tokens) declares nothing: the id is taken to mean the newer prompt from then on.
    """

    def __init__(self, min_tokens: int, capacity: int = MAX_PREFIX_IDS):
        self.min_tokens, self.capacity = min_tokens, capacity
        self._heads: OrderedDict[tuple[Namespace, str], np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heads)

    def declared_len(self, request: Request) -> int:
        """Tokens of the prompt that are declared as shared, learning from this request."""
        declared, prompt = request.shared_prefix_len, request.prompt_token_ids
        if not request.prefix_id:
            return declared
        key = (request.namespace, request.prefix_id)
        remembered = self._heads.get(key)
        if not declared and remembered is not None:
            common = common_length(prompt, remembered)
            declared = common if common >= self.min_tokens else 0
        self._heads[key] = prompt[: declared or None].copy()
        self._heads.move_to_end(key)
        if len(self._heads) > self.capacity:
            self._heads.popitem(last=False)
        return declared


class HotPolicy:
    """Extents of one cache's nodes, within config.min_extent_tokens and max_move_tokens."""

    def __init__(self, config: EngineConfig, storage: NodeStorage, compactor: Compactor):
        self.config = config
        self.storage, self.compactor = storage, compactor
        self.prefix_ids = PrefixIds(config.min_extent_tokens)
        self.is_enabled = config.prefix_layout == "asymmetric"
        self._can_move = self.is_enabled and config.max_move_tokens >= config.min_extent_tokens
        self._promotable: dict[Node, None] = {}
        self.counters = dict.fromkeys(("promotions", "extents", "extent_fallbacks"), 0)

    def note_arrival(self, request: Request, path: list[Node], now: float) -> None:
        """Before the request counts as a user of `path`: hint at what it alone makes HOT."""
        if not self.is_enabled:
            return
        came_back = request.num_preemptions > 0  # the recent use is its own
        for node in path:
            age_s = now - node.last_use
            recent = node.published > 0 and age_s < self.config.recency_window_s
            declared = node.end <= request.shared_prefix_len
            if declared or (recent and not came_back):
                node.hinted = True

    @staticmethod
    def _is_shared(node: Node) -> bool:
        return node.users > 1 or (node.users == 1 and node.hinted)

    def offer(self, node: Node) -> None:
        """Remember a COLD node for promotion if it is shared and has something to copy."""
        if self._can_move and not node.is_hot and node.published and self._is_shared(node):
            self._promotable[node] = None

    def claim(self, path: list[Node], writer: Request) -> None:
        """The unwritten nodes of an admitted request get extents as far as they deserve them."""
        parent_is_hot = True  # every ancestor of a HOT node is HOT
        for node, want_hot in zip(path, self._wanted(path), strict=True):
            if not node.is_complete:
                node.writer = writer
                if want_hot and parent_is_hot and not node.is_hot:
                    self._reserve(node)
            elif want_hot:
                self.offer(node)
            parent_is_hot = parent_is_hot and node.is_hot

    def _wanted(self, path: list[Node]) -> list[bool]:
        """A shared node long enough, and each of its ancestors (short heads included)."""
        wanted, below = [], False
        for node in reversed(path):
            long_enough = len(node) >= self.config.min_extent_tokens
            below = self.is_enabled and (below or (long_enough and self._is_shared(node)))
            wanted.append(below)
        wanted.reverse()
        return wanted

    def _reserve(self, node: Node) -> bool:
        if self.compactor.reserve(node) is None:  # fragmented: COLD serves it, slower
            self.counters["extent_fallbacks"] += 1
            return False
        self.counters["extents"] += 1
        return True

    def plan_promotions(self) -> None:
        """Promote shared COLD nodes within the budget; the next plan uses the new indices."""
        for node in sorted(self._promotable, key=lambda n: n.start):
            long_enough = len(node) >= self.config.min_extent_tokens
            if node.is_hot or not node.published or not self._is_shared(node) or not long_enough:
                del self._promotable[node]
                continue
            chain = [n for n in self.storage.tree.path(node) if not n.is_hot]
            if not all(n.is_complete for n in chain):
                continue
            for part in chain:
                fitting = self._within(part)
                if fitting is None:
                    break  # next step
                if not self._promote(fitting):
                    if not self.compactor.is_clearing:
                        self.counters["extent_fallbacks"] += 1
                        del self._promotable[node]
                    break

    def _within(self, node: Node) -> Node | None:
        """The node, or the head of one too long for any step, if it can be copied in this one."""
        budget, storage = self.compactor.budget, self.storage
        if node.filled_step > storage.completed_step:
            return None  # its own copy is under way
        if storage.window is not None and storage.window.fits(node):
            return node if len(node) <= budget else None
        if len(node) > self.config.max_move_tokens:
            if budget < self.config.min_extent_tokens or budget > storage.arena.num_free:
                return None
            return storage.tree.split(node, budget)
        fits = len(node) <= min(budget, storage.arena.num_free)
        return node if fits else None

    def _promote(self, node: Node) -> bool:
        assert node.slots is not None
        slots = node.slots.copy()
        start = self.compactor.reserve_for_copy(node)
        if start is None:
            return False
        self.compactor.add(Move(slots, start, "promotion"))
        self.counters["promotions"] += 1
        return True
