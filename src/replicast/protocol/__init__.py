"""The way of an update: proposed, staged, committed for one step, applied, verified.

`Member` is every worker's part, `Coordinator` worker 0's. Both take their coordination, transport, state and
journal as arguments; with the in-memory twins of these, N threads play N workers.
"""

from replicast.protocol.channel import Channel
from replicast.protocol.coordinator import Coordinator
from replicast.protocol.member import Member
from replicast.protocol.patience import Patience
from replicast.protocol.ticket import Ticket

__all__ = ["Channel", "Coordinator", "Member", "Patience", "Ticket"]
