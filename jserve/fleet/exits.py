"""Notices replicas of this machine whose process is ending, from the moment on in which it is killed.

Linux frees the memory of a process before it closes its files, so whoever has a connection to one that was killed hears
of it only then, the later the more memory it had (docs/fleet.md). Its flags in ``/proc/PID/stat`` say so at once
(proc_pid_stat(5)).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from jserve.fleet.member import Member

log = logging.getLogger(__name__)

PF_EXITING = 0x4
"""Of ``include/linux/sched.h``: the process is ending."""
FLAGS = 6
"""Place of a process' flags in its line, behind the name in brackets."""


def machine_id() -> str:
    """Names this machine, since it booted, and the processes that can be seen here: process ids of one name are of the
    same processes. Empty where there is no ``/proc``."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def is_ending(pid: int) -> bool:
    """True while process ``pid`` of this machine ends. False for one that lives, one that is gone (its connections
    are closed by then) and where ``/proc`` says nothing."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    fields = line.rpartition(")")[2].split()
    return bool(int(fields[FLAGS]) & PF_EXITING)


def hang_up_on_ending(members: Iterable[Member], machine: str) -> None:
    """Hang up on those of ``members`` that have work and say nothing, whose process, of this ``machine``, is ending:
    what they work on then goes on elsewhere."""
    for member in members:
        near = machine and member.info.get("machine") == machine
        if near and member.is_quiet() and is_ending(member.info["pid"]):
            log.warning("replica %s: its process is ending", member.name)
            if member.client is not None:
                member.client.kill()
