"""Real threads, messages and files around the core. See `session.py` for who does what."""

from replicast.runtime.channel import Channel
from replicast.runtime.exchange import Exchange
from replicast.runtime.session import Session
from replicast.runtime.ticket import Ticket
from replicast.runtime.writer import Writer

__all__ = ["Channel", "Exchange", "Session", "Ticket", "Writer"]
