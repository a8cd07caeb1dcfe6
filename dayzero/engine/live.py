"""Live: which requests there are and what they hold: the queue, the running ones, slots, blocks. Paper.

Private to the scheduler. Slot and blocks go back only when the last step that names a request has retired.
"""

from __future__ import annotations

from bisect import insort

from dayzero.cache.manager import CacheManager
from dayzero.engine.sequence import Sequence


class Live:
    """waiting, running: in order of (priority, arrival). slots: free ones. released: slots that have become free and
    that the executor has not been told of. freed: whether anything was freed since it was last set to False."""

    def __init__(self, manager: CacheManager, max_running: int) -> None:
        self.manager = manager
        self.by_id: dict[str, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_leaving = 0
        self.num_preemptions = 0
        self._max_running = max_running
        self.slots = list(range(max_running - 1, -1, -1))
        self.released: list[int] = []
        self.freed = False

    def add(self, seq: Sequence) -> None:
        """A new request, to the queue."""
        assert seq.id not in self.by_id, f"{seq.id}: a request with this id is still live"
        if seq.leader is not None and seq.leader not in self.by_id:
            seq.leader = None  # it has gone already, or was never there
        self.by_id[seq.id] = seq
        insort(self.waiting, seq, key=_key)

    def candidate(self) -> Sequence | None:
        """Who may start next: the first in the queue whose leader's prompt is computed, if it has one."""
        for seq in self.waiting:
            leader = self.by_id.get(seq.leader) if seq.leader is not None else None
            if leader is None or leader.prompt_done or leader.status == "ended":
                return seq
        return None

    @property
    def num_parting(self) -> int:
        """Requests that run no more but hold blocks until their steps in flight have retired."""
        return self._max_running - len(self.slots) - len(self.running)

    def start(self, seq: Sequence, hit: int, now: float) -> None:
        """A waiting request whose blocks are open gets a slot and runs."""
        self.waiting.remove(seq)
        seq.started(self.slots.pop(), hit, now)
        insort(self.running, seq, key=_key)

    def preempt(self, seq: Sequence) -> None:
        """A running request goes back to the queue, at once or as soon as its steps in flight have retired."""
        self.running.remove(seq)
        seq.status = "leaving"
        self.num_leaving += 1
        self.num_preemptions += 1
        if not seq.flights:
            self.land(seq)

    def end(self, seq: Sequence) -> None:
        """A request has its last output. It gives back what it holds, at once or when its steps have retired."""
        if seq.status == "waiting":
            self.waiting.remove(seq)
        elif seq.status == "running":
            self.running.remove(seq)
        else:
            assert seq.status == "leaving", f"{seq.id}: ended twice"
            self.num_leaving -= 1
        seq.status = "ended"
        if not seq.flights:
            self.land(seq)

    def land(self, seq: Sequence) -> None:
        """No step in flight names a leaving or ended request any more: free what it holds."""
        if seq.slot >= 0:
            self.manager.close(seq.id, finished=seq.finish in ("stop", "length"))
            self.slots.append(seq.slot)
            self.released.append(seq.slot)
            self.freed = True
        seq.stopped()
        if seq.status == "ended":
            del self.by_id[seq.id]
        else:
            self.num_leaving -= 1
            seq.status = "waiting"
            insort(self.waiting, seq, key=_key)


def _key(seq: Sequence) -> tuple[int, float, int]:
    return seq.key
