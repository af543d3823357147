"""Joins two processes of one machine into one JAX program that no other machine can reach."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator

import jax

# A C extension without type stubs.
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port, which until the block ends only a socket like gRPC's gets: SO_REUSEPORT."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((LOOPBACK, 0))
        yield holder.getsockname()[1]


def join(process: int, port: int, *, heartbeat: int = 100, shutdown: int = 300) -> None:
    """Connects this process to the other one; both listen on the loopback interface only.

    To be called before JAX starts its backend.

    Args:
      process: 0 or 1; process 0 is the coordinator.
      port: the coordinator's.
      heartbeat: the seconds after which a silent process counts as gone, and the other one ends.
      shutdown: the seconds that the first process to end waits for the other one.
    """
    # JAX has no option for the address that gloo listens on: that of the host's name.
    _jax.make_gloo_tcp_collectives = functools.partial(
        _jax.make_gloo_tcp_collectives, hostname=LOOPBACK
    )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"{LOOPBACK}:{port}",
        num_processes=2,
        process_id=process,
        # By default the coordinator listens on every interface.
        coordinator_bind_address=f"{LOOPBACK}:{port}",
        initialization_timeout=60,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=shutdown,
    )
