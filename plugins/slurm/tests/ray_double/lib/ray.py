"""The Python side of the double of Ray: who is in the cluster at an address."""

import json
import socket

_ADDRESS = []


def init(address, **_):
    host, _, port = address.rpartition(":")
    _ADDRESS[:] = [(host, int(port))]


def nodes():
    print("(raylet, ip=192.0.2.7) what Ray prints of others")
    with socket.create_connection(_ADDRESS[0], timeout=10) as connection:
        connection.sendall(b"list\n")
        return json.loads(connection.makefile().readline())
