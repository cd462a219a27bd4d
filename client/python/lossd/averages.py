"""Moving averages of a head's weights, which the server keeps by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lossd._arguments import number
from lossd.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from lossd.head import Head


class MovingAverage:
    """`average` follows `source`: average = decay · average + (1 − decay) · source, in fp32, each time that update()
    is called. Made by Head.ema; of a head that is there already, after a restart, by its name:

        average = lossd.MovingAverage(head, client.head("lm_head.ema"), 0.999)

    `head` is the average, a head like any other: it can teach, answers for logits, is saved. One process calls
    update(); not thread-safe.
    """

    def __init__(self, source: Head, average: Head, decay: float) -> None:
        if average.name == source.name:
            raise ValueError(f"average is {average.name!r}, the source itself; give it another head")
        self._source = source
        self._average = average
        self.decay = decay
        self._version = average.info().weight_version
        self._open = False  # whether the last update was made is not known

    @property
    def head(self) -> Head:
        """The average."""
        return self._average

    @property
    def source(self) -> Head:
        return self._source

    def update(self, decay: float | None = None) -> int:
        """Takes the source's weights, as of now, into the average once, and returns the average's new version. decay:
        None takes that of the average, which may change from call to call.

        After an error that leaves open whether it was done (UnavailableError, DeadlineExceededError, an interrupt)
        the next call is about the same update, and makes it only if it was not made. FailedPreconditionError if
        somebody else has written the average, or restored it: another MovingAverage goes on with what is there.
        """
        kept = number(self.decay if decay is None else decay, "decay")
        was_open = self._open
        if was_open and self._was_made():
            return self._version
        self._open = True
        try:
            self._version = self._average.blend(self._source, kept, target_version=self._version)
        except (FailedPreconditionError, InvalidArgumentError):
            # What its caller has given up may have waited at the server until now.
            if was_open and self._was_made():
                return self._version
            self._open = was_open
            raise
        self._open = False
        return self._version

    def _was_made(self) -> bool:
        """Whether the update whose fate was open has come about; then it is not open any more."""
        made = self._average.info().weight_version == self._version + 1
        if made:
            self._version += 1
            self._open = False
        return made
