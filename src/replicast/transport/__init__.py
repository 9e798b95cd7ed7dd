"""Moves bytes between workers: one small interface, a transport for one host, and one for several."""

from replicast.transport.base import Inspect, Parcel, Piece, Transport
from replicast.transport.chain import ChainTransport, open_transport
from replicast.transport.shared import SharedMemoryTransport

__all__ = [
    "ChainTransport",
    "Inspect",
    "Parcel",
    "Piece",
    "SharedMemoryTransport",
    "Transport",
    "open_transport",
]
