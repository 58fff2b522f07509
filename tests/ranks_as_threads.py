"""Ranks as threads of one process, for communicators that meet over the network."""

import socket
import threading

from sbp.comm.rendezvous import Environment


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def on_ranks(size, program):
    """Run `program(rank, environment)` in one thread per rank; raises the first failure."""
    port, failures, results = free_port(), [], {}

    def run(rank):
        try:
            results[rank] = program(rank, Environment(rank, size, rank, "127.0.0.1", port))
        except BaseException as error:
            failures.append((rank, error))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0][1]
    return results
