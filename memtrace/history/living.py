"""What was live at an event, for those who ask about many, as a screen does that plays a recording."""

from __future__ import annotations

import numpy as np

from memtrace.snapshot.model import I4, I8

_MOST_MARKS = 128


class Living:
    """The rows that lived at a few events (marks): those of any other event are among them and what came since.

    ``born`` ascends; ``done`` is the event that ended a row, -1 for none. Of many rows that live long fewer marks are
    made, so that all of them hold no more than there are rows.
    """

    def __init__(self, born: I4, done: I4, events: int) -> None:
        self._born, self._done = born, done
        until = np.where(done < 0, events, done)
        lives = int((until - np.maximum(born, 0)).sum()) // max(events, 1) + 1  # rows at an event, on average
        self._step = events // max(min(_MOST_MARKS, len(born) // lives), 1) + 1
        first, stop = np.maximum(-(-born // self._step), 0), -(-until // self._step)  # marks that a row lives at
        row = np.flatnonzero(stop > first)
        times = (stop - first)[row]
        mark = np.repeat(first[row] - np.cumsum(times) + times, times) + np.arange(int(times.sum()))
        self._rows = np.repeat(row.astype(np.int32), times)[np.argsort(mark, kind="stable")]
        self._edges = np.cumsum(np.append(0, np.bincount(mark, minlength=events // self._step + 2)))

    def rows(self, event: int) -> I8:
        """Rows that hold memory just after an event, ascending."""
        mark = max(event, 0) // self._step
        new = slice(*np.searchsorted(self._born, (mark * self._step if event >= 0 else -2, event), side="right"))
        old = self._rows[self._edges[mark] : self._edges[mark + 1]] if event >= 0 else np.zeros(0, np.int32)
        found = np.concatenate([old.astype(np.int64), np.arange(new.start, new.stop)])
        done = self._done[found]
        return found[(done < 0) | (done > event)]
