"""How bytes cross workers: one small interface, and a transport for each place the workers may be in."""

from replicast.transport.base import Look, Parcel, Piece, Transport
from replicast.transport.broadcast import BroadcastTransport
from replicast.transport.memory import MemoryTransport
from replicast.transport.opening import open_transport
from replicast.transport.shared import SharedMemoryTransport

__all__ = [
    "BroadcastTransport",
    "Look",
    "MemoryTransport",
    "Parcel",
    "Piece",
    "SharedMemoryTransport",
    "Transport",
    "open_transport",
]
