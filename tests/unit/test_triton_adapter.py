"""The order of commands to the engine: an abort never overtakes the request that it ends."""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace

import numpy as np

from granikv.serving import wire
from granikv.serving.settings import ServingSettings
from granikv.serving.triton_adapter import TritonAdapter


class Sender:
    def is_cancelled(self) -> bool:
        return True

    def send(self, *args, **kwargs) -> None:
        pass


class Client:
    """While the first Add is on its way, a watcher looks for calls to end."""

    dead_reason = ""

    def __init__(self):
        self.sent: list[wire.Add | wire.Abort] = []
        self.watcher: threading.Thread | None = None

    def send(self, command) -> None:
        if self.watcher is None:
            self.watcher = threading.Thread(target=self.adapter._watch_calls)
            self.watcher.start()
            self.watcher.join(0.2)
        self.sent.append(command)


def test_c79_a_cancel_during_the_hand_over_reaches_the_engine_after_the_request():
    adapter = TritonAdapter.__new__(TritonAdapter)
    adapter.settings, adapter.client = ServingSettings({}), Client()
    adapter.client.adapter = adapter
    adapter.pb_utils = SimpleNamespace()
    adapter.calls, adapter.owners, adapter.lock = {}, {}, threading.Lock()
    adapter.stopping, adapter.finished = False, deque()
    tensors = {
        "text_input": np.array([[b"a"], [b"b"]], object),
        "max_tokens": np.array([[4], [4]], np.int32),
    }
    adapter._submit("call", Sender(), tensors)
    adapter.client.watcher.join(5)
    sent = [(type(c).__name__, c.request_id) for c in adapter.client.sent]
    assert sent[:2] == [("Add", "call#0"), ("Add", "call#1")]
    assert sorted(sent[2:]) == [("Abort", "call#0"), ("Abort", "call#1")]
