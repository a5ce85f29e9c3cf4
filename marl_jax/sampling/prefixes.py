"""Which prompt lies in which row of the prefix cache: the host's side of prompt reuse.

An entry is keyed by (policy, its update count, token ids), so no other policy, adapter or update ever meets it.
Rows that nobody waits for are given up first, those kept for a later turn next, oldest first.
"""

import collections
import dataclasses

Tokens = tuple[int, ...]
Owner = tuple[str | None, int]  # policy and its update count


@dataclasses.dataclass
class Entry:
    """A prompt held in a row."""

    row: int
    kept: bool = False  # a later turn will continue it


class Prefixes:
    """The entries, least recently used first."""

    def __init__(self, rows: int):
        self._free = list(range(rows))[::-1]
        self._entries: collections.OrderedDict[tuple[Owner, Tokens], Entry] = collections.OrderedDict()
        self._waiting: collections.Counter[tuple[Owner, Tokens]] = collections.Counter()
        self._kept_lengths: collections.Counter[int] = collections.Counter()

    def want(self, owner: Owner, tokens: Tokens) -> None:
        """One more request waits for this prompt."""
        self._waiting[owner, tokens] += 1

    def served(self, owner: Owner, tokens: Tokens) -> None:
        """One request that waited has its copy."""
        self._waiting[owner, tokens] -= 1
        if not self._waiting[owner, tokens]:
            del self._waiting[owner, tokens]

    def find(self, owner: Owner, tokens: Tokens) -> int | None:
        """The row that holds exactly these tokens."""
        entry = self._entries.get((owner, tokens))
        if entry is None:
            return None
        self._entries.move_to_end((owner, tokens))
        return entry.row

    def keep(self, owner: Owner, tokens: Tokens) -> bool:
        """Hold the entry of exactly these tokens for a later turn; False if there is none."""
        if self.find(owner, tokens) is None:
            return False
        entry = self._entries[owner, tokens]
        self._kept_lengths[len(tokens)] += not entry.kept
        entry.kept = True
        return True

    def longest(self, owner: Owner, tokens: Tokens) -> tuple[int, int]:
        """The row of the longest kept entry that `tokens` begin with, and its length; (-1, 0) if there is none."""
        for length in sorted((n for n in self._kept_lengths if n < len(tokens)), reverse=True):
            entry = self._entries.get((owner, tokens[:length]))
            if entry is not None and entry.kept:
                return entry.row, length
        return -1, 0

    def add(
        self, owner: Owner, tokens: Tokens, locked: set[int], *, kept: bool = False, spare: bool = False
    ) -> int | None:
        """Give the prompt a row, taking one from the least useful entry; None if every row is locked.

        `spare`: only a row that nobody has any use for.
        """
        if not self._free and not self._evict(locked, spare):
            return None
        entry = Entry(self._free.pop(), kept)
        self._entries[owner, tokens] = entry
        if kept:
            self._kept_lengths[len(tokens)] += 1
        return entry.row

    def _evict(self, locked: set[int], spare: bool) -> bool:
        key: tuple[Owner, Tokens] | None = None  # of the least useful entry so far
        use = (True, True, True)
        for other, entry in self._entries.items():
            found = (False, other in self._waiting, entry.kept)
            if entry.row not in locked and found < use:
                use, key = found, other
            if not any(use):  # none is of less use
                break
        if key is None or (spare and any(use)):
            return False
        entry = self._entries.pop(key)
        if entry.kept:
            self._kept_lengths[len(key[1])] -= 1
            self._kept_lengths += collections.Counter()  # drops what fell to zero
        self._free.append(entry.row)
        return True
