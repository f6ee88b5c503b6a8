"""gpulayer systemd: the unit that runs the daemon at boot. Writes one file; turning it on is left to the
administrator.
"""

from __future__ import annotations

import os
import shutil
import sys

from gpulayer.cli.render import note, say
from gpulayer.model.errors import GpulayerError, InvalidRequest, PermissionDenied

UNIT_PATH = "/etc/systemd/system/gpulayer.service"

# KillMode=process: stopping or restarting the daemon must not end replicas; their shims, in this unit's cgroup, go on,
# and a new daemon finds them again.
# Delegate=yes: the daemon makes cgroups of its own, one per replica.
# WatchdogSec: the daemon says every few seconds that its loop still turns.
# OOMScoreAdjust: the daemon is small and needed by all; let the kernel choose another. Replicas are set back to 0 at
# start. StartLimitIntervalSec=0: never give up on a host that nobody is looking at.
_UNIT = """\
# Made by `gpulayer systemd`. Overrides belong into `systemctl edit gpulayer`.
# Stopping or restarting this unit leaves replicas running; `gpulayer leave --stop-all` ends them.
[Unit]
Description=gpulayer node daemon (jobs and services on this host's GPUs)
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
Restart=on-failure
RestartSec=1
KillMode=process
Delegate=yes
WatchdogSec=30
TimeoutStartSec=120
TimeoutStopSec=30
LimitNOFILE=1048576
OOMScoreAdjust=-900

[Install]
WantedBy=multi-user.target
"""


def systemd(*, print: bool = False, data_dir: str | None = None, config: str | None = None) -> None:
    """Install the unit of the daemon (as root), or print it. Starts nothing.

    Parameters
    ----------
    print
        Print it instead.
    data_dir
        The daemon's data directory, written into the unit; left out, its default (/var/lib/gpulayer).
    config
        The daemon's configuration file, written into the unit.
    """
    unit = unit_text(data_dir, config)
    if print:
        say(unit.rstrip("\n"))
        return
    if os.geteuid() != 0:
        raise PermissionDenied(
            f"only root may write {UNIT_PATH}", hint="run it with sudo, or see it with gpulayer systemd --print"
        )
    try:
        # Whole or not at all: systemd may read it at any moment.
        temporary = UNIT_PATH + ".new"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(unit)
        os.chmod(temporary, 0o644)
        os.replace(temporary, UNIT_PATH)
    except OSError as error:
        raise GpulayerError(
            f"cannot write {UNIT_PATH}: {error.strerror}",
            hint="put what gpulayer systemd --print says where systemd looks",
        ) from error
    note(f"wrote {UNIT_PATH}; now:")
    say("systemctl daemon-reload")
    say("systemctl enable --now gpulayer")


def unit_text(data_dir: str | None, config: str | None) -> str:
    """The unit's file. Paths are made absolute: systemd starts in /."""
    words = [*_own_command(), "up"]
    for option, path in (("--data-dir", data_dir), ("--config", config)):
        if path is not None:
            words += [option, os.path.abspath(os.path.expanduser(path))]
    return _UNIT.format(command=" ".join(_quoted(word) for word in words))


def _own_command() -> list[str]:
    """This program by absolute path: the installed script if that is what runs, else the interpreter with the
    module.
    """
    program = sys.argv[0]
    if os.path.basename(program) == "gpulayer":
        found = os.path.abspath(program) if os.path.sep in program else shutil.which(program)
        if found and os.access(found, os.X_OK):
            return [found]
    return [sys.executable, "-m", "gpulayer"]


def _quoted(word: str) -> str:
    """As systemd.service(5) reads ExecStart: % and $ doubled, quotes around what has spaces."""
    if any(ord(char) < 32 for char in word):
        raise InvalidRequest(f"{word!r} cannot be written into a unit", hint="use a path without control characters")
    escaped = word.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if any(char in escaped for char in " '\";\\") or not escaped else escaped
