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
    mine = member.state.digests(names)
    said = member.channel.agree(f"sync/{number}", json.dumps(mine), member.patience.begin_secs)
    theirs = [json.loads(text) for text in said.values()]
    differing = [name for name in names if any(their[name] != theirs[source][name] for their in theirs)]
    if not differing:
        return None
    id_ = f"sync-{attempt}-{member.gate.step}-{number}"
    member.pause("\n".join(["sync", str(source), id_, *differing]))
    return next((receipt for receipt in reversed(member.history) if receipt.id == id_), None)
