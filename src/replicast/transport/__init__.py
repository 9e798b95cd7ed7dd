"""Moves bytes between workers: one small interface, with one transport for one host and one for several."""

from replicast.transport.base import Inspect, Parcel, Piece, Transport
from replicast.transport.broadcast import BroadcastTransport
from replicast.transport.memory import MemoryTransport
from replicast.transport.opening import open_transport
from replicast.transport.shared import SharedMemoryTransport

__all__ = [
    "BroadcastTransport",
    "Inspect",
    "MemoryTransport",
    "Parcel",
    "Piece",
    "SharedMemoryTransport",
    "Transport",
    "open_transport",
]
