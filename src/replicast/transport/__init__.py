"""How bytes cross workers: one small interface, and a transport for each place the workers may be in."""

from replicast.transport.base import Parcel, Piece, Transport
from replicast.transport.memory import MemoryTransport
from replicast.transport.shared import SharedMemoryTransport

__all__ = ["MemoryTransport", "Parcel", "Piece", "SharedMemoryTransport", "Transport"]
