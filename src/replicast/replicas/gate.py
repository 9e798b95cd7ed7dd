"""The boundaries of one worker, where the training thread and the event loop meet.

The training thread enters with an event (it arrived, it rests, it waits for a ticket) and stays until the
loop lets it go. Meanwhile it executes the loop's orders: only this thread accesses variables.
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
from replicast.core.events import Perform
from replicast.core.messages import Replica
from replicast.core.operations.attempt import Exit
from replicast.core.operations.trial import BeginTrial, End
from replicast.core.operations.update import Apply
from replicast.core.records import Refusal, Refuse
from replicast.errors import JobFailed, ReplicastError, UpdateRefused

logger = logging.getLogger("replicast")

REMIND_SECS = 0.5
LONG_SECS = 10.0
"""After this time, the other workers are told that this one waits: they may wait for it in a transfer."""
RAISE_SECS = 30.0
"""How long an error that all workers raise is held back until the coordinator lets the training thread go."""
_MUST_NOT_FAIL = (Apply, BeginTrial, End)


class Gate:
    """The boundaries of one worker. `enter` is for the training thread, the rest for the event loop."""

    replica: Replica

    def __init__(
        self,
        check: Callable[[], None],
        waits_long: Callable[[bool], None],
        performed: Callable[[int, Any, Any], None],
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
        """Blocks the training thread, which executes orders, until the event loop lets it go."""
        self.check_not_in_function()
        self.check_not_left_early()
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
        """Queues an order for the waiting training thread."""
        self._items.put(command)

    def let_go(self, value: Any = None) -> None:
        """Lets the training thread continue."""
        self._items.put((value,))

    def check_not_in_function(self) -> None:
        """Raises inside a proposed function: all workers wait for it, so it must not wait for them."""
        if self._in_function and threading.current_thread() is self.thread:
            raise UpdateRefused(
                "A proposed function cannot wait for other workers: they wait for it",
                expected="a function that returns the changes",
                received="a call of boundary, sync, save, audit or result inside the function",
                remedy="Make that call after the step instead; a function may call propose()",
            )

    def check_not_left_early(self) -> None:
        """Raises when this thread has left a wait by an exception: what it missed there cannot be made up."""
        if self._is_left_early:
            raise JobFailed(
                "This worker was interrupted while it waited for the others, which count on it there: it "
                "cannot go on with them. Let the script end, and start the job again"
            )

    @contextlib.contextmanager
    def in_function(self) -> Iterator[None]:
        """Marks that the training thread runs a user's function."""
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
            elif waited >= RAISE_SECS:  # the one that raised first may have ended the coordinator
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
        except BaseException as error:  # sys.exit, Ctrl-C: this worker exits, and no one may wait for it
            ended = Refusal(f"It ended the worker ({type(error).__name__})")
            self._performed(command.number, order, ended)
            raise
        self._performed(command.number, order, value)
        if isinstance(order, Exit) and not self.ends:
            sys.exit(TOLD_TO_END)
