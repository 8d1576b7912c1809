"""A shared disk beside a TieredStore: what is on it is asked for, believed for a while, and announced when it was written.

The store decides by what it believes; `SharedPresence` finds out, on threads of its own. Between them, on the store's thread: before a lookup the keys that
are not in DRAM are asked for, answers become beliefs, what nobody has answered yet is believed of nobody. Actions that concern the others are carried out here.
"""

import secrets
import time
from collections.abc import Sequence

from kvtier.store.moves import Action, CommitParts, DeleteParts, Key, LoadFailed, Outcome, ReadDone
from kvtier.store.tiered import Run, TieredStore
from kvtier.tier.disk.presence import SharedPresence

_ASKED_FIRST = 64
_ASKED_MORE = 4
# Each round answers a run of keys four times as long as the one before.
_ROUNDS_MAX = 12


class SharedDisk:
    """Keeps `store` up to date on what a shared disk has. Used by the store's thread alone."""

    def __init__(self, store: TieredStore, presence: SharedPresence) -> None:
        self.presence = presence
        self._store = store

    def ask(self, keys: Sequence[Key], group: int, now_s: float) -> int:
        """Bring the store up to date on `keys`, all of one group. Returns how many, from the first on, are known; the rest is being asked."""
        elsewhere = self._store.not_in_dram(keys)
        if not elsewhere:
            return len(keys)
        answers = self.presence.lookup(elsewhere)
        self._store.believe([key for key, answer in zip(elsewhere, answers, strict=True) if answer], group, now_s)
        if all(answers):
            return len(keys)
        self._store.disbelieve([key for key, answer in zip(elsewhere, answers, strict=True) if not answer], now_s)
        asked = {key for key, answer in zip(elsewhere, answers, strict=True) if answer is None}
        return next((place for place, key in enumerate(keys) if key in asked), len(keys))

    def leading_run(self, keys: Sequence[Key], group: int, now_s: float, *, through_reads: bool = False) -> Run:
        """The leading run of `keys`, as of the store: a few of them are asked for first, for most prompts are new, then more and more."""
        length, window, pending = 0, _ASKED_FIRST, False
        while length < len(keys):
            batch = keys[length : length + window]
            known = self.ask(batch, group, now_s)
            run = self._store.leading_run(batch, through_reads=through_reads)
            length += run.length
            pending |= run.pending
            if run.length < len(batch):
                # What follows a hole is believed of nobody: it would keep what is computed now from being stored.
                self._store.disbelieve(keys[length:], now_s)
                return Run(length, pending or run.length >= known)
            window *= _ASKED_MORE
        return Run(length, pending)

    def settle(self, keys: Sequence[Key], group: int, now_s: float, deadline_s: float) -> None:
        """Ask for `keys` as `leading_run` does, and wait for the answers, at most `deadline_s` seconds: for a caller who has nothing else to do."""
        end_s = time.monotonic() + deadline_s
        for _ in range(_ROUNDS_MAX):
            if not self.leading_run(keys, group, now_s).pending:
                return
            if not self.presence.wait(keys, max(0.0, end_s - time.monotonic())):
                return

    def hear(self, outcome: Outcome) -> None:
        """What was seen there and could not be read is not there, or is not what it should be: ask again."""
        if isinstance(outcome, LoadFailed):
            self.presence.forget(list(outcome.lost))
        elif isinstance(outcome, ReadDone):
            self.presence.forget(list(outcome.failed))

    def carry_out(self, actions: Sequence[Action]) -> list[Action]:
        """Tell others what is there and what is not; returns what is left for the ranks."""
        for action in actions:
            if isinstance(action, CommitParts):
                self.presence.publish(action.keys)
            elif isinstance(action, DeleteParts):
                self.presence.uncommit(action.keys)
        return [action for action in actions if not isinstance(action, CommitParts)]

    def reset(self, now_s: float) -> None:
        """Reset the store. Others count generations on this disk too: the new one is later than all that any engine has taken."""
        fresh = time.time_ns() // 10**6 << 20 | secrets.randbits(19) << 1
        self._store.reset(now_s, max(fresh, self._store.generation + 1))
        self.presence.reset(self._store.generation)

    def close(self, deadline_s: float) -> bool:
        """End the threads that ask. True if they ended in time."""
        return self.presence.close(deadline_s)
