"""One server of `--replicas N`, `python -m aserve.processes.replica`; its stdin is a socket to the
router.

It serves on a Unix socket. It sends one byte when it is ready, and drains when the router sends one
or closes its side, so it never outlives the router.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket

from aserve.cli import guarded
from aserve.config import set_environment
from aserve.frames import receive
from aserve.host.logs import start_logging
from aserve.host.memory import collect_rarely
from aserve.http.peers import Peers
from aserve.processes.engine_process import socket_of_stdin
from aserve.processes.link import END_OF_IMPORT, StartReplica
from aserve.program import end_process


def main() -> int:
    """Returns the exit code of the server."""
    collect_rarely()
    sock = socket_of_stdin()
    # NOTE: a larger buffer would take the byte that may follow the message.
    with sock.makefile("rb", buffering=1) as stream:
        start = receive(stream, StartReplica)
    if start is None:
        return 1
    return guarded(lambda: _serve(start, sock))


def _serve(start: StartReplica, router: socket.socket) -> int:
    os.chdir(start.directory)
    for name, value in start.environment.items():
        set_environment(name, value, wins=True)
    debug = start.resolved.debug
    start_logging(debug.log_level or "info", debug.log_format)
    from aserve.server import serve  # it imports what reads the environment

    signal.signal(END_OF_IMPORT, signal.SIG_IGN)  # from here on the router's byte is read

    router_pid = os.getppid()
    try:
        return serve(start.resolved, peers=Peers(token=start.token), parent=router)
    finally:
        # A killed router leaves the folder of the sockets, which is empty behind the last replica.
        if os.getppid() != router_pid:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(start.resolved.server.uds or ""))


if __name__ == "__main__":
    end_process(main())
