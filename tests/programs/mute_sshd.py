"""An ssh server that accepts every login and never answers a command. Argument: its host key."""

from __future__ import annotations

import socket
import sys
import threading

import paramiko


class Mute(paramiko.ServerInterface):  # type: ignore[misc]
    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return int(paramiko.AUTH_SUCCESSFUL)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Event().wait()
        return False


listener = socket.create_server(("", 22))
kept = []
while True:
    transport = paramiko.Transport(listener.accept()[0])
    transport.add_server_key(paramiko.PKey.from_path(sys.argv[1]))
    transport.start_server(event=threading.Event(), server=Mute())
    kept.append(transport)
