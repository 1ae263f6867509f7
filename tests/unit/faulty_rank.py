"""A rank that goes wrong: `python -m faulty_rank SETTINGS`, in the place of rank_main.

RANK_FAULTS="1 sum5 SIGSTOP, ..." : which rank, where, what. Places: import, join, load; sumN, planN
and idsN count all-reduces, plans and shared ids. What: a signal to itself, `slow`, or `differ`.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections import Counter

RANK = json.loads(sys.argv[1])["rank"]
FAULTS = [fault.split() for fault in os.environ["RANK_FAULTS"].split(",")]
MINE = {place: what for rank, place, what in FAULTS if int(rank) == RANK}
SLOW_S = 1.5
seen: Counter[str] = Counter()


def reach(place: str) -> bool:
    """Whether what happens here has to differ."""
    what = MINE.get(place, "")
    if what.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[what])
    elif what == "slow":
        time.sleep(SLOW_S)
    return what == "differ"


def counted(kind: str) -> bool:
    seen[kind] += 1
    return reach(f"{kind}{seen[kind]}")


reach("import")

from granikv.executor import all_reduce, group, rank_channel, rank_main, torch_ranks  # noqa: E402


def before(module: object, name: str, place: str) -> None:
    function = getattr(module, name)

    def wrapped(*arguments):
        reach(place)
        return function(*arguments)

    setattr(module, name, wrapped)


def reduce(self, x):
    counted("sum")
    return plain_reduce(self, x)


def receive(self):
    content = plain_receive(self)
    message = pickle.loads(content)
    if message[0] == "step" and counted("plan"):
        message[1].predicted_us += 1.0
        content = pickle.dumps(message)
    return content


def broadcast(tensor, source):
    plain_broadcast(tensor, source)
    if counted("ids"):
        tensor[-1] += 1


before(rank_main, "join", "join")
before(torch_ranks, "load_rank", "load")
plain_reduce = all_reduce.GlooAllReduce.__call__
plain_receive = rank_channel.RankChannel.receive
plain_broadcast = group.dist.broadcast
all_reduce.GlooAllReduce.__call__ = reduce
rank_channel.RankChannel.receive = receive
group.dist.broadcast = broadcast

raise SystemExit(rank_main.main())
