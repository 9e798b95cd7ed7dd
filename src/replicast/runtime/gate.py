"""Where the training thread and the event loop meet: the boundaries of one worker.

The training thread enters with an event (it has arrived, it rests, it waits for a ticket) and stays until the
loop lets it go. Meanwhile it carries out the loop's orders: only this thread touches variables.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from replicast.config import TOLD_TO_END
from replicast.core.commands import Perform
from replicast.core.operations.leave import Exit
from replicast.core.operations.trial import Begin, End
from replicast.core.operations.update import Apply
from replicast.core.order import Replica
from replicast.core.refusal import Refusal, Refuse
from replicast.errors import JobFailed, ReplicastError, UpdateRefused

logger = logging.getLogger("replicast")

REMIND_SECS = 0.5
LONG_SECS = 10.0
"""After this wait, the others learn that this thread stands: one of them may wait for it in a transfer."""
RAISE_SECS = 30.0
"""How long an error that all workers raise waits for the coordinator to let the training thread go."""
_MUST_NOT_FAIL = (Apply, Begin, End)


class Gate:
    """The boundaries of one worker. `enter` is for the training thread, the rest for the event loop.

    Args:
        check: Raises when waiting is in vain, because a thread or another worker has died.
        waits_long: Called with True when the training thread has waited for some time, and with False when it
            goes on after that.
        performed: Called with the number, the order and the result when an order was carried out.

    Attributes:
        replica: What orders are carried out on. Written before the first boundary.
        thread: The training thread: the last one that came to a boundary.
        since: When it began to wait, or ended its last order, by the monotonic clock.
        error: What it raises when it goes on, on all workers alike.
        ends: Whether the script has come to its end: then it need not be ended any more.
    """

    replica: Replica

    def __init__(
        self,
        check: Callable[[], None],
        waits_long: Callable[[bool], None],
        performed: Callable[[int | tuple[str, int], Any, Any], None],
    ) -> None:
        self._check = check
        self._waits_long = waits_long
        self._performed = performed
        self._items: queue.SimpleQueue[Perform | tuple[Any]] = queue.SimpleQueue()
        self._in_function = False
        self._is_left_early = False
        self.thread: threading.Thread | None = None
        self.since = 0.0
        self.error: Exception | None = None
        self.ends = False

    def enter(self, announce: Callable[[], None]) -> Any:
        """The training thread waits, carrying out orders, until it may go on.

        Args:
            announce: Tells the event loop that it is here, and why.

        Returns:
            What the event loop let it go with.
        """
        self.check_not_in_function()
        self.thread = threading.current_thread()
        self.since = time.monotonic()
        self._is_left_early = True
        announce()
        while True:
            item = self._next()
            if not isinstance(item, Perform):
                self._is_left_early = False
                self._raise_error()
                self._check()
                return item[0]
            self._carry_out(item)
            if isinstance(item.order, Exit):  # the script ends by itself, and nothing more is decided
                self._is_left_early = False
                return None
            self.since = time.monotonic()

    def perform(self, command: Perform) -> None:
        """The training thread has something to do, while it stands."""
        self._items.put(command)

    def let_go(self, value: Any = None) -> None:
        """The training thread goes on."""
        self._items.put((value,))

    def check_not_in_function(self) -> None:
        """Raises in a proposed function, for which all workers wait: it must not wait for them."""
        if self._in_function and threading.current_thread() is self.thread:
            raise UpdateRefused(
                "A proposed function cannot wait for other workers: they wait for it",
                expected="a function that returns what is to be changed",
                received="a call of boundary, sync, save, audit or result in it",
                remedy="Call it after the step instead; propose() may be called in a function",
            )

    def check_not_left_early(self) -> None:
        """Raises when this thread has left a wait by an exception: what it missed there cannot be made up."""
        if self._is_left_early:
            raise JobFailed(
                "This worker was interrupted while it waited for the others, which count on it there: it "
                "cannot train on. Let the script end, and start the job again"
            )

    @contextlib.contextmanager
    def in_function(self) -> Iterator[None]:
        """The training thread runs a user's function."""
        self._in_function = True
        try:
            yield
        finally:
            self._in_function = False

    def _next(self) -> Perform | tuple[Any]:
        waited = 0.0
        while True:
            try:
                item = self._items.get(timeout=REMIND_SECS)
                if waited >= LONG_SECS:
                    self._waits_long(False)
                return item
            except queue.Empty:
                waited += REMIND_SECS
                if waited == LONG_SECS:
                    self._waits_long(True)
            if self.error is None:
                self._check()
            elif waited >= RAISE_SECS:  # whoever raised first may have ended the coordinator
                self._waits_long(False)
                self._raise_error()

    def _raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _carry_out(self, command: Perform) -> None:
        order = command.order
        try:
            value: Any = order.perform(self.replica)
        except Refuse as error:
            value = error.refusal
        except Exception as error:
            if isinstance(error, ReplicastError) or isinstance(order, _MUST_NOT_FAIL):
                raise
            logger.exception("%s failed on this worker", type(order).__name__)
            value = Refusal(f"{type(order).__name__} failed ({type(error).__name__}: {error})")
        except BaseException as error:  # sys.exit, Ctrl-C: this worker ends, but nobody must wait for it
            ended = Refusal(f"It ended the worker ({type(error).__name__})")
            self._performed(command.number, order, ended)
            raise
        self._performed(command.number, order, value)
        if isinstance(order, Exit) and not self.ends:
            sys.exit(TOLD_TO_END)
