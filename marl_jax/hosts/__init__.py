"""Several processes that share one run: who is here, what they exchange, and arrays over all their devices.

    with joined(hosts, "10.0.0.1:7000", process):      every process plays its share of the problems,
        ...                                            and all take the same update

With one process everything here does nothing, and costs nothing.
"""

from marl_jax.hosts.joining import HostsError, joined, on_stop, request_stop
from marl_jax.hosts.talk import (
    after_first,
    any_of,
    count,
    from_all,
    from_first,
    index,
    is_first,
    local_errors,
    share,
    sharing_errors,
)

__all__ = [
    "HostsError",
    "after_first",
    "any_of",
    "count",
    "from_all",
    "from_first",
    "index",
    "is_first",
    "joined",
    "local_errors",
    "on_stop",
    "request_stop",
    "share",
    "sharing_errors",
]
