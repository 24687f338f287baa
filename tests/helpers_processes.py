"""What the system knows about processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 90.0


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Until `condition` holds; AssertionError if it does not for long."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def rss_mib(process_id: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def num_files(process_id: int) -> int:
    """Open files of a process."""
    return len(os.listdir(f"/proc/{process_id}/fd"))


def state(process_id: int) -> str:
    """`R`, `S`, `T`, `Z`, …; empty if there is no such process."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def children(process_id: int) -> dict[int, str]:
    """States of a process's children."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == process_id:
                found[int(folder.name)] = fields[0]
    return found


def socket_folder(process_id: int) -> Path:
    """The folder in which a server's processes talk, by the command line of one of them."""
    for child in children(process_id):
        arguments = Path(f"/proc/{child}/cmdline").read_text()
        if "ipc://" in arguments:
            return Path(arguments.split("ipc://")[1].split('"')[0]).parent
    raise AssertionError("the server has no worker")
