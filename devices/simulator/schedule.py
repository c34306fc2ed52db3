"""Which threads run next.

Those that are earliest in the program's order, so that others find them where paths meet; unless
others have been waiting for long, or the running ones only poll. With a seed, the choice is random,
for warps apart from each other.
"""

from collections.abc import Callable

import numpy as np

from .groups import Array, Lanes
from .launch_shape import Options

_POLLS = 8
"""How often each of some polling threads runs before something in flight ends."""
_STARVED = 32
"""Times the patience after which threads run although others are earlier in the program."""


class Schedule:
    """The threads that can run, by the step that they are at.

    Attributes:
        ready: step -> bool [warps, 32].
        clock: basic blocks that have begun.
        random: whether a seed was given.
    """

    def __init__(self, options: Options, order: list[int]) -> None:
        self._options, self._order = options, order
        self._rng = np.random.default_rng(options.seed)
        self.random = options.seed is not None
        self.reset()

    def reset(self) -> None:
        """Nothing can run."""
        self.ready: dict[int, Lanes] = {}
        self.clock = 0
        self._since: dict[int, int] = {}
        self._budget = self._rival = 0
        self._exhausted = self._forced = -1
        self._polled = False
        self._polls = 0

    def put(self, pc: int, lanes: Lanes) -> None:
        """Makes threads ready to run at a step."""
        there = self.ready.get(pc)
        self.ready[pc] = lanes if there is None else there | lanes
        self._since.setdefault(pc, self.clock)
        self._rival = min(self._rival, self._order[pc])

    def take(self, pc: int) -> Lanes:
        """Takes the threads that are to run at a step now."""
        lanes = self.ready.pop(pc)
        del self._since[pc]
        self._rival = min((self._order[other] for other in self.ready), default=1 << 60)
        self._budget = self._options.patience
        if self.random:
            lanes = self._some_warps(pc, lanes)
            self._budget, self._rival = int(self._rng.integers(1, 12)), -1
        return lanes

    def goes_on(self, pc: int) -> bool:
        """Whether the running threads, about to begin a block, go on before others run."""
        self.clock += 1
        self._budget -= 1
        if self._budget < 0:
            self._exhausted = pc
            return False
        # Who has waited for long runs one block at least, also if others are earlier.
        forced, self._forced = self._forced, -1
        return forced == pc or self._order[pc] < self._rival or (self.random and self._budget > 0)

    def yield_soon(self) -> None:
        """Lets others run at the next block: called where threads poll in vain."""
        self._budget = min(self._budget, 0)
        self._polled = True

    def shuffled(self, rows: Array) -> Array:
        """Rows in a random order that the seed decides; as they are without one."""
        return self._rng.permutation(rows) if self.random else rows

    def choose(self, finish: Callable[[np.random.Generator | None], None]) -> int | None:
        """The step to run next; None if no thread can run.

        Args:
            finish: ends an asynchronous operation, a random one if it is given the generator.
        """
        if not self.ready:
            return None
        if self.random:
            if self._rng.random() < 0.1:
                finish(self._rng)
            return int(self._rng.choice(list(self.ready)))
        exhausted, self._exhausted = self._exhausted, -1
        polled, self._polled = self._polled, False
        if exhausted >= 0:
            # It went on for long: what it polls may depend on others, or on something in flight.
            self._polls += 1
            others = [pc for pc in self.ready if pc != exhausted]
            if not others or self._polls > _POLLS * len(self.ready):
                self._polls = 0
                finish(None)
            if others and polled:
                return self._force(min(others, key=self._age))
        if len(self.ready) > 1:
            oldest = min(self.ready, key=self._age)
            if self.clock - self._since[oldest] > _STARVED * self._options.patience:
                return self._force(oldest)
        return min(self.ready, key=self._order.__getitem__)

    def _force(self, pc: int) -> int:
        self._forced = pc
        return pc

    def _age(self, pc: int) -> tuple[int, int]:
        return self._since[pc], self._order[pc]

    def _some_warps(self, pc: int, lanes: Lanes) -> Lanes:
        """A random part of the warps; the others stay ready."""
        rows = np.flatnonzero(lanes.any(axis=1))
        chosen = rows[self._rng.random(len(rows)) < 0.5]
        if len(chosen) == 0:
            chosen = rows[self._rng.integers(len(rows), size=1)]
        some = np.zeros_like(lanes)
        some[chosen] = lanes[chosen]
        rest = lanes & ~some
        if rest.any():
            self.put(pc, rest)
        return some
