"""How processes find each other: torchrun's environment variables, and a small key-value store over TCP on rank 0.

The store carries short byte strings only (NCCL's unique ids); it holds nothing that is executed on receipt.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from sbp.comm.interface import CommunicationError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_HEADER = struct.Struct("!BII")
_SET, _GET = 1, 2
_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Environment:
    """This process' place among the others. `port` is where rank 0 listens on `address`."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """From the variables that torchrun sets.

        Under torchrun's own agent `MASTER_PORT` is taken by its store, so the next port is used; `SBP_PORT` overrides
        both.

        Raises
        ------
        CommunicationError
            A variable is missing or is not a number in range; the message names it.
        """
        environ = os.environ if environ is None else environ
        missing = [name for name in VARIABLES if not environ.get(name)]
        if missing:
            raise CommunicationError(
                f"the environment lacks {', '.join(missing)}; start the program with torchrun, or set "
                f"{', '.join(VARIABLES)} in every process."
            )
        size = _number(environ, "WORLD_SIZE", 1, 1 << 24)
        rank = _number(environ, "RANK", 0, size - 1)
        port = _number(environ, "MASTER_PORT", 1, 65535)
        if environ.get("SBP_PORT"):
            port = _number(environ, "SBP_PORT", 1, 65535)
        elif environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
            port = port + 1 if port < 65535 else port - 1
        return cls(rank, size, _number(environ, "LOCAL_RANK", 0, size - 1), environ["MASTER_ADDR"], port)


def _number(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = environ[name].strip()
    if not text.isdecimal() or not low <= int(text) <= high:
        raise CommunicationError(
            f"the environment variable {name} is {text!r}; expected a whole number from {low} to {high}."
        )
    return int(text)


class Store:
    """Keys and byte strings that all processes see; rank 0 serves them from a thread.

    Parameters
    ----------
    environment
        Where rank 0 listens, and which rank this is.
    timeout
        Seconds to wait for rank 0 to listen, and for a key to be set.
    """

    def __init__(self, environment: Environment, timeout: float = 300.0) -> None:
        self._environment = environment
        self._timeout = timeout
        self._server = _Server(environment, timeout) if environment.rank == 0 else None
        self._socket = self._connect()

    def set(self, key: str, value: bytes) -> None:
        """Set a key, once or again."""
        self._ask(_SET, key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, once some process has set it; `CommunicationError` if none does within the timeout."""
        found, value = self._ask(_GET, key, b"")
        if not found:
            raise CommunicationError(
                f"rank {self._environment.rank} waited {self._timeout:g} seconds for {key!r}, which no process set; "
                "check that all ranks were started and run the same program."
            )
        return value

    def close(self) -> None:
        """Close the connection, and on rank 0 the server."""
        self._socket.close()
        if self._server is not None:
            self._server.close()

    def _connect(self) -> socket.socket:
        place = (self._environment.address, self._environment.port)
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                connection = socket.create_connection(place, timeout=max(0.1, deadline - time.monotonic()))
                # The server answers a get after at most `timeout`; the connection waits a little longer than that.
                connection.settimeout(self._timeout + 10)
                return connection
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise CommunicationError(
                        f"rank {self._environment.rank} could not reach rank 0 at {place[0]}:{place[1]} within "
                        f"{self._timeout:g} seconds ({error}); check MASTER_ADDR, MASTER_PORT and that rank 0 runs."
                    ) from None
                time.sleep(0.05)

    def _ask(self, action: int, key: str, value: bytes) -> tuple[bool, bytes]:
        try:
            _send(self._socket, action, key.encode(), value)
            found, _, answer = _receive(self._socket)
        except (OSError, EOFError) as error:
            raise CommunicationError(
                f"rank {self._environment.rank} lost rank 0 at {self._environment.address}:{self._environment.port} "
                f"({error}); see rank 0's own error."
            ) from None
        return bool(found), answer


class _Server:
    """Accepts connections and answers each in a thread of its own."""

    def __init__(self, environment: Environment, timeout: float) -> None:
        self._values: dict[bytes, bytes] = {}
        self._changed = threading.Condition()
        self._timeout = timeout
        self._connections: list[socket.socket] = []
        self._listener = _listen(environment)
        threading.Thread(target=self._accept, name="sbp rendezvous", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._connections.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), connection:
            while True:
                action, key, value = _receive(connection)
                with self._changed:
                    if action == _SET:
                        self._values[key] = value
                        self._changed.notify_all()
                        found, answer = True, b""
                    else:
                        found = self._changed.wait_for(lambda key=key: key in self._values, self._timeout)  # type: ignore[misc]
                        answer = self._values.get(key, b"")
                _send(connection, int(found), b"", answer)

    def close(self) -> None:
        # Shutting down first wakes the accepting thread, which a bare close would leave waiting.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()


def _listen(environment: Environment) -> socket.socket:
    """Listen on the given address only; on all interfaces where this machine knows itself by another address."""
    failure: OSError | None = None
    for address, family in (
        (environment.address, socket.AF_INET),
        (environment.address, socket.AF_INET6),
        ("", socket.AF_INET),
    ):
        try:
            return socket.create_server((address, environment.port), family=family, backlog=environment.size)
        except OSError as error:
            # The first one says most: later ones fail because the address is of the other family.
            failure = error if failure is None or isinstance(failure, socket.gaierror) else failure
    raise CommunicationError(
        f"rank 0 cannot listen on {environment.address}:{environment.port} ({failure}); set SBP_PORT to a free port in "
        "every process."
    )


def _send(connection: socket.socket, action: int, key: bytes, value: bytes) -> None:
    connection.sendall(_HEADER.pack(action, len(key), len(value)) + key + value)


def _receive(connection: socket.socket) -> tuple[int, bytes, bytes]:
    action, key, value = _HEADER.unpack(_exactly(connection, _HEADER.size))
    if max(key, value) > _LIMIT:
        raise EOFError("a message longer than the store accepts")
    return action, _exactly(connection, key), _exactly(connection, value)


def _exactly(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise EOFError("the connection was closed")
        found += piece
    return bytes(found)
