"""share: one copy in host memory of the arrays that several ranks of a machine keep there.

Called by PinnedGraph. The first rank that keeps an array on the host allocates its memory; the others map it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gids.cuda.host_memory import SharedFile, open_shared, share_memory
from gids.sampler.device.held import OnHost, Original, no_memory

if TYPE_CHECKING:
    from gids.cuda import Device

log = logging.getLogger("gids")


class Peers(Protocol):
    """Ranks of one machine that pin the same graphs. index, size: this one's place, and their number."""

    index: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """What each rank says, plain values. Collective. Raises RankError if one failed, ended or stalls."""

    def name_of(self, index: int) -> str:
        """How errors and logs call a rank."""


class Shared(NamedTuple):
    """Pinned memory, of which this rank fills every step-th part, from the first one on."""

    memory: OnHost
    first: int
    step: int


def share(
    peers: Peers,
    device: Device,
    sources: Sequence[Original],
    relation: str,
    check: Callable[[list[Original]], None],
) -> dict[str, Shared]:
    """Pinned memory by name, of those arrays that other ranks keep on the host too. Collective.

    sources: the arrays that this rank keeps on the host. check: raises MemoryError if memory is short; it is
    asked about arrays that this rank allocates. When the ranks have filled the memory, they must meet once
    more.

    Returns nothing if a rank cannot use the memory; the first rank logs why. Raises MemoryError, and
    RankError if another rank fails.
    """
    wanted = peers.gather([s.name for s in sources])
    named = sorted({name for names in wanted for name in names})
    users = {name: [i for i, names in enumerate(wanted) if name in names] for name in named}
    users = {name: ranks for name, ranks in users.items() if len(ranks) > 1}
    if not users:
        return {}
    sources = [s for s in sources if s.name in users]
    mine = [s for s in sources if users[s.name][0] == peers.index]
    check(mine)
    held: dict[str, OnHost] = {}
    files: dict[str, SharedFile] = {}
    try:
        refusal = _attempt(lambda: _make(mine, device, relation, held, files))
        told = peers.gather({"files": files, "refusal": refusal})
        if all(said["refusal"] is None for said in told):
            theirs = {s.name: SharedFile(*told[users[s.name][0]]["files"][s.name]) for s in sources}
            refusal = _attempt(lambda: _borrow(sources, theirs, device, relation, held))
        refusals = peers.gather(refusal)
    except BaseException:
        _release(held)
        raise
    finally:
        for file in files.values():
            os.close(file.descriptor)
    if all(r is None for r in refusals):
        at = {s.name: users[s.name].index(peers.index) for s in sources}
        return {name: Shared(memory, at[name], len(users[name])) for name, memory in held.items()}
    _release(held)
    peers.gather(None)  # the memory is free before anyone looks for memory of its own
    if peers.index == 0:
        why = "; ".join(f"{peers.name_of(i)}: {r}" for i, r in enumerate(refusals) if r is not None)
        log.warning(
            "the ranks of this machine do not share the topology of %s, and each copies it (%s)",
            relation,
            why,
        )
    return {}


def _attempt(work: Callable[[], None]) -> str | None:
    """Why this rank cannot share memory, or None."""
    try:
        work()
    except (OSError, RuntimeError) as error:  # the kernel, or the driver, refuses
        return str(error)
    return None


def _make(
    sources: Sequence[Original],
    device: Device,
    relation: str,
    held: dict[str, OnHost],
    files: dict[str, SharedFile],
) -> None:
    for source in sources:
        what, nbytes = f"{source.name} of {relation}", source.bytes_in_pages
        try:
            memory, files[source.name] = share_memory(nbytes, device.numa_node)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):  # copies of their own would take more
                raise MemoryError(f"{what}: {no_memory(nbytes, error)}") from None
            raise
        held[source.name] = OnHost(device, source, what, "", memory)
        del memory


def _borrow(
    sources: Sequence[Original],
    files: dict[str, SharedFile],
    device: Device,
    relation: str,
    held: dict[str, OnHost],
) -> None:
    for source in sources:
        if source.name not in held:
            memory = open_shared(files[source.name], source.bytes_in_pages)
            what = f"{source.name} of {relation}"
            held[source.name] = OnHost(device, source, what, "", memory, borrowed=True)
            del memory


def _release(held: dict[str, OnHost]) -> None:
    while held:
        held.popitem()[1].release()
