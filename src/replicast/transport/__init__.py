"""Moves bytes between workers: one small interface, a transport for one host, and two for several."""

from replicast.transport.base import Inspect, MemoryTransport, Parcel, Piece, Transport
from replicast.transport.broadcast import BroadcastTransport
from replicast.transport.chain import ChainTransport
from replicast.transport.opening import open_transport
from replicast.transport.shared import SharedMemoryTransport

__all__ = [
    "BroadcastTransport",
    "ChainTransport",
    "Inspect",
    "MemoryTransport",
    "Parcel",
    "Piece",
    "SharedMemoryTransport",
    "Transport",
    "open_transport",
]
