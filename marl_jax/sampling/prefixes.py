"""The prompts in the rows of the prefix cache: the host's side of prompt reuse.

An entry is keyed by (policy, token ids), so no other policy or adapter ever reads it; an update drops all entries.
Entries that no request waits for and no later turn continues lose their rows first, then entries kept for a later turn,
then entries that requests wait for; among equals, the least recently used.
"""

import collections
import dataclasses

Tokens = tuple[int, ...]
Owner = str | None  # the policy; None is the base
Key = tuple[Owner, Tokens]


@dataclasses.dataclass
class Entry:
    """A prompt in a row."""

    row: int
    kept: bool = False  # a later turn will continue it
    needed: bool = False  # requests wait for it, or for prompts that continue it


class Prefixes:
    """The entries, least recently used first."""

    def __init__(self, rows: int):
        self._free = list(range(rows))[::-1]
        self._entries: dict[Key, Entry] = {}  # an OrderedDict would hash every key in a loop over its items
        self._wanted: collections.Counter[Key] = collections.Counter()  # requests that wait for this prompt
        self._history: dict[Key, Key] = {}  # a prompt that is waited for -> the kept entry that it continues
        self._claims: collections.Counter[Key] = collections.Counter()  # kept entry -> waiting prompts

    def want(self, key: Key) -> None:
        """One more request waits for this prompt."""
        if key not in self._wanted and (kept_key := self._history_of(key)):
            self._history[key] = kept_key
            self._claims[kept_key] += 1
            self._note_need(kept_key)
        self._wanted[key] += 1
        self._note_need(key)

    def served(self, key: Key) -> None:
        """One fewer request waits for this prompt."""
        _decrement(self._wanted, key)
        if key not in self._wanted:
            self._release(key)
            self._note_need(key)

    def find(self, key: Key) -> int | None:
        """The row that contains exactly this prompt."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries[key] = self._entries.pop(key)  # now the most recently used
        return entry.row

    def keep(self, key: Key) -> bool:
        """Keep the entry of exactly this prompt for a later turn; False if there is none."""
        if self.find(key) is None:
            return False
        self._entries[key].kept = True
        return True

    def longest(self, key: Key) -> tuple[int, int]:
        """The row of the longest kept entry that the prompt begins with, and its length; (-1, 0) if there is none."""
        kept_key = self._history_of(key)
        return (self._entries[kept_key].row, len(kept_key[1])) if kept_key else (-1, 0)

    def extend(self, key: Key, locked: set[int], *, alone: bool) -> tuple[int, int] | None:
        """Replace the longest kept entry that the prompt begins with by the prompt's; returns row and common length.

        None if there is no such entry, its row is locked or, with `alone`, another request needs it, too.
        """
        kept_key = self._history_of(key)
        if kept_key is None or self._entries[kept_key].row in locked:
            return None
        own_claim = self._history.get(key) == kept_key
        if alone and (self._claims[kept_key] > own_claim or kept_key in self._wanted):
            return None
        self._release(key)
        row = self._entries.pop(kept_key).row
        self._entries[key] = Entry(row)
        self._note_need(key)
        return row, len(kept_key[1])

    def add(self, key: Key, locked: set[int], *, kept: bool = False, spare: bool = False) -> int | None:
        """Give the prompt a row, evicting the least useful entry if no row is free; None if no entry can be evicted.

        `locked` rows are never taken. A prompt that is `kept` for later evicts no entry that requests wait for, and a
        `spare` prompt, prefilled early, evicts no entry that is still of use.
        """
        if not self._free and not self._evict(locked, 0 if spare else 1 if kept else 3):
            return None
        entry = Entry(self._free.pop(), kept)
        self._entries[key] = entry
        self._note_need(key)
        return entry.row

    def _history_of(self, key: Key) -> Key | None:
        """The longest kept entry that the prompt begins with."""
        claimed = self._history.get(key)
        if claimed in self._entries:
            return claimed
        owner, tokens = key
        longest: Tokens = ()
        for (other, start), entry in self._entries.items():
            length = len(start)
            # Last tokens are compared first: there are hundreds of entries, of thousands of tokens.
            fits = entry.kept and len(longest) < length < len(tokens) and tokens[length - 1] == start[-1]
            if fits and other == owner and tokens[:length] == start:
                longest = start
        return (owner, longest) if longest else None

    def _release(self, key: Key) -> None:
        """The prompt no longer waits to continue an entry."""
        if kept_key := self._history.pop(key, None):
            _decrement(self._claims, kept_key)
            self._note_need(kept_key)

    def _note_need(self, key: Key) -> None:
        """Note in the prompt's entry whether it is needed: `_evict` would have to hash the prompts of all entries."""
        if (entry := self._entries.get(key)) is not None:
            entry.needed = key in self._wanted or key in self._claims

    def _evict(self, locked: set[int], most: int) -> bool:
        """Free the row of the least useful entry, if its use is at most `most`."""
        victim: Key | None = None
        for key, entry in self._entries.items():
            use = 2 * entry.needed + entry.kept
            if entry.row not in locked and use <= most:
                victim, most = key, use - 1
            if most < 0:  # no entry is of less use
                break
        if victim is None:
            return False
        self._free.append(self._entries.pop(victim).row)
        return True


def _decrement(counter: collections.Counter, key: object) -> None:
    """Decrease a count; remove it at zero."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
