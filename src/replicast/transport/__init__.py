"""Moves bytes between workers: shared memory within one host, a chain over TCP between several."""

from replicast.transport.chain import ChainTransport, open_transport
from replicast.transport.shared import Inspect, Parcel, Piece, Transport

__all__ = ["ChainTransport", "Inspect", "Parcel", "Piece", "Transport", "open_transport"]
