"""`python -I -S …/gpulayer/shim/__main__.py --fd N [--version V] [--tether N]`: the spawner, on one end of a
SOCK_SEQPACKET pair.

Started with -I -S, so that it takes milliseconds and nothing from the user's environment; hence it finds its own
package by the place of this file.
"""

import os
import sys


def main(arguments: list[str]) -> int:
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    if not options.get("--fd", "").isdigit() or len(arguments) % 2:
        sys.stderr.write(
            "usage: __main__.py --fd N [--version V] [--tether N]\nThe daemon starts this; it is of no use by hand.\n"
        )
        return 2
    package_home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if package_home not in sys.path:
        sys.path.insert(0, package_home)
    from gpulayer.shim import spawner

    version = options.get("--version") or _package_version()
    spawner.serve(int(options["--fd"]), version=version, tether_fd=int(options.get("--tether", "-1")))
    return 0


def _package_version() -> str:
    return str(getattr(sys.modules["gpulayer"], "__version__", "unknown"))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
