"""Whose sockets listen on a port, so that another server's answer is not taken for ours."""

from __future__ import annotations

import os
import re
from pathlib import Path

LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp
SOCKET = re.compile(r"socket:\[(\d+)\]")


def listened_ports(pid: int) -> set[int] | None:
    """TCP ports on which the process listens; None where the system does not show its files."""
    try:
        inodes = _socket_inodes(pid)
        ports = set()
        for name in ("tcp", "tcp6"):
            table = Path(f"/proc/{pid}/net/{name}")
            for line in table.read_text().splitlines()[1:] if table.exists() else ():
                local, state, inode = (line.split()[column] for column in (1, 3, 9))
                if state == LISTENING and inode in inodes:
                    ports.add(int(local.rpartition(":")[2], 16))
        return ports
    except PermissionError:
        return None
    except (FileNotFoundError, ProcessLookupError):  # it ended
        return set()


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            try:
                match = SOCKET.fullmatch(os.readlink(entry.path))
            except FileNotFoundError:  # closed meanwhile
                continue
            if match:
                found.add(match[1])
    return found
