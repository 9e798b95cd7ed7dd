"""Every replica becomes that of one worker: compare first, then send what differs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from replicast.journal import Receipt
from replicast.protocol import Member


def sync(member: Member, source: int, names: Sequence[str], number: int, attempt: int) -> Receipt | None:
    """Has all workers assign worker `source`'s values of what differs. All of them call it.

    Args:
        member: This worker's part in the protocol.
        source: Whose values count.
        names: Full names, the same on all workers.
        number: How often this was called before; the same on all workers.
        attempt: Which life of the job this is.

    Returns:
        The receipt, or None when nothing differed.
    """
    member.pause("\n".join(["compare", str(source), *names]))
    member.channel.forget_agreed(f"sync/{number - 1}")  # all have heard it, else they would not be here
    mine = json.dumps([attempt, member.state.digests(names)])
    said = member.channel.agree(f"sync/{number}", mine, member.patience.begin_secs)
    attempts, theirs = zip(*(json.loads(said[worker]) for worker in sorted(said)), strict=True)
    differing = [name for name in names if any(their[name] != theirs[source][name] for their in theirs)]
    if not differing:
        return None
    # Worker 0's attempt: launchers on several hosts may have counted differently.
    id_ = f"sync-{attempts[0]}-{member.gate.step}-{number}"
    member.pause("\n".join(["sync", str(source), id_, *differing]))
    return next((receipt for receipt in reversed(member.history) if receipt.id == id_), None)
