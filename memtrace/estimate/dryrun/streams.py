"""How far the streams of a card that is not there are: what was asked of one is over once the host waited for it.

Memory that a second stream uses (``record_stream``) is free again only when that stream is through, and when that is
depends on the card's speed. A program that has the host wait for events does so because the host runs ahead: from then
on it is taken to be as far ahead as it can be, up to where it waits (FSDP1). Of others the card is taken to keep up
(ZeRO-3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

#: Streams by number, and how much of what was asked of each: the work before a moment.
Moment = Mapping[int, int]


class Streams:
    """The streams of one device."""

    def __init__(self) -> None:
        self._asked: defaultdict[int, int] = defaultdict(int)
        self._follows: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._over: dict[int, int] = {}
        self.is_ahead = False

    def moment(self, stream: int) -> Moment:
        """What lies before this point of ``stream``, on it and on those that it waited for."""
        self._asked[stream] += 1
        return self._follows[stream] | {stream: self._asked[stream]}

    def follow(self, stream: int, moment: Moment) -> None:
        """What ``stream`` is asked from now on comes after ``moment``."""
        _advance(self._follows[stream], moment)

    def wait(self, moment: Moment) -> None:
        """The host waits until ``moment``."""
        _advance(self._over, moment)

    def wait_for_all(self) -> None:
        """The host waits for every stream."""
        self._over |= self._asked

    def is_over(self, stream: int, moment: Moment) -> bool:
        """Whether ``stream`` itself is beyond ``moment``."""
        return self._over.get(stream, 0) >= moment[stream]


def _advance(known: dict[int, int], moment: Moment) -> None:
    for stream, count in moment.items():
        known[stream] = max(known.get(stream, 0), count)
