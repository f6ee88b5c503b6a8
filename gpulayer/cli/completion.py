"""gpulayer completion: the script that lets a shell complete our commands and options. cyclopts writes it."""

from __future__ import annotations

from typing import Literal

from gpulayer.cli.render import note, say
from gpulayer.model.errors import GpulayerError, InvalidRequest

Shell = Literal["bash", "zsh", "fish"]


def completion(shell: Shell | None = None, /, *, install: bool = False) -> None:
    """Print the completion script for a shell, or install it for this user.

    Parameters
    ----------
    shell
        bash, zsh or fish; left out, the one that runs this.
    install
        Put it where the shell looks for it, and say where.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    from gpulayer.cli.app import make_app

    if shell is None:
        try:
            found = detect_shell()
        except ShellDetectionError:
            raise InvalidRequest("cannot tell which shell this is", hint="write gpulayer completion bash") from None
        if found not in ("bash", "zsh", "fish"):
            raise InvalidRequest(f"no completion for {found}", hint="write gpulayer completion bash, zsh or fish")
        shell = found
    if not install:
        say(make_app().generate_completion(shell=shell))
        return
    try:
        path = make_app().install_completion(shell=shell)
    except OSError as error:
        raise GpulayerError(
            f"cannot write the completion: {error.strerror} ({error.filename})",
            hint=f"print it instead: gpulayer completion {shell}",
        ) from error
    note(f"installed {path}; it works in the next {shell} that is started")
