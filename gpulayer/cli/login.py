"""gpulayer login, logout: which cluster this user talks to from elsewhere, how it is known, and with which token."""

from __future__ import annotations

import os
import re
import sys

from gpulayer.cli.known_nodes import endpoints_of
from gpulayer.cli.render import Row, fitted_table, note, say_json
from gpulayer.client import calls, logins
from gpulayer.client.address import Secure, Trust, https_url, parse_url
from gpulayer.client.logins import Login, forget, read_logins, save
from gpulayer.client.pinning import fetch_ca
from gpulayer.client.transport import Transport
from gpulayer.model.address import split_host_port
from gpulayer.model.errors import GpulayerError, InvalidRequest, NotFound, PermissionDenied
from gpulayer.model.places import API_PORT

_FINGERPRINT = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def login(
    url: str | None = None,
    /,
    *,
    fingerprint: str | None = None,
    token_file: str | None = None,
    list: bool = False,
    json: bool = False,
) -> None:
    """Keep a cluster's CA and a token, so that commands on this host talk to it.

    The token is asked for, or comes from --token-file or $GPULAYER_TOKEN. Without --fingerprint you are asked whether
    the CA is the right one.

    Parameters
    ----------
    url
        Of any node: https://10.0.0.5:7450 (the port may be left out).
    fingerprint
        sha256:… of the cluster's CA, as `gpulayer cluster status` on a node shows it.
    token_file
        A file with the token in it; - reads it from stdin.
    list
        Show the clusters that you are logged in to.
    json
        With --list: one JSON document, without the tokens.
    """
    if list:
        _list_logins(json)
        return
    if url is None:
        raise InvalidRequest("log in where?", hint="gpulayer login https://HOST:7450; --list shows what there is")
    address = _address(url)
    known = _known(address)
    ca_pem = _confirmed_ca(address, fingerprint, known)
    trust = Trust(cluster="", ca_pem=ca_pem, token=_token(token_file))
    made = _tried(address, trust)
    save(made, os.environ)
    note(f"logged in to cluster {made.cluster} at {address}; commands here ask it where no daemon of your own runs")


def logout(url: str, /) -> None:
    """Forget a cluster's CA and token. The token itself stays good: `gpulayer token revoke` ends it.

    Parameters
    ----------
    url
        Of any node of it that is known, or the cluster's id.
    """
    known = read_logins(os.environ)
    found = [each for each in known if each.cluster == url]
    found = found or [each for each in known if _address(url).endpoints[0] in each.endpoints]
    if not found:
        raise NotFound(f"you are not logged in to {url}", hint="gpulayer login --list shows what there is")
    for each in found:
        forget(each, os.environ)
        note(f"logged out of cluster {each.cluster}")


def _list_logins(json: bool) -> None:
    found = [
        {
            "cluster": each.cluster,
            "url": str(each.address),
            "urls": [https_url(host, port) for host, port in each.endpoints],
            "fingerprint": logins.fingerprint(each.ca_pem),
        }
        for each in read_logins(os.environ)
    ]
    if json:
        say_json(found)
        return
    rows = [Row((each["cluster"], each["url"], each["fingerprint"])) for each in found]
    fitted_table(("CLUSTER", "URL", "FINGERPRINT"), rows, is_whole_elsewhere=True)


def _address(url: str) -> Secure:
    if "://" in url:
        address = parse_url(url)
        if not isinstance(address, Secure):
            raise InvalidRequest(
                f"url: {url} needs no login", hint="it is on this host; say it with --url, and --token for http"
            )
        return address
    return Secure((split_host_port(url, API_PORT, "url"),))


def _known(address: Secure) -> Login | None:
    return next((each for each in read_logins(os.environ) if address.endpoints[0] in each.endpoints), None)


def _confirmed_ca(address: Secure, wanted: str | None, known: Login | None) -> str:
    """The CA, once it is certain that it is the right one."""
    said = _checked_fingerprint(wanted) if wanted is not None else ""
    ca_pem = fetch_ca(address)
    found = logins.fingerprint(ca_pem)
    if said:
        if said != found:
            raise PermissionDenied(
                f"the CA at {address} is {found}, not {said}",
                hint="is it another cluster? If not, somebody is in between: do not log in",
                code="wrong_authority",
            )
        return ca_pem
    if known is not None and logins.fingerprint(known.ca_pem) != found:
        raise PermissionDenied(
            f"the CA at {address} has changed: it was {logins.fingerprint(known.ca_pem)} and is {found}",
            hint=f"somebody may be in between; if the cluster was made anew, gpulayer logout {known.cluster} first",
            code="wrong_authority",
        )
    if known is None and not _asked(address, found):
        raise PermissionDenied(
            f"the CA at {address} was not confirmed", hint="gpulayer cluster status, on a node, shows the right one"
        )
    return ca_pem


def _checked_fingerprint(text: str) -> str:
    match = _FINGERPRINT.fullmatch(text.strip().lower().replace("sha256:", "", 1).replace(":", ""))
    if match is None:
        raise InvalidRequest(
            f"fingerprint: {text!r:.100} is none", hint="write sha256: and 64 hexadecimal digits, as the node shows it"
        )
    return f"sha256:{match[1]}"


def _asked(address: Secure, found: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidRequest(
            f"whether {found} is the CA of your cluster nobody can be asked here",
            hint=f"compare it with gpulayer cluster status on a node, then add --fingerprint {found}",
        )
    print(
        f"The CA at {address} is\n  {found}\nIs that the one gpulayer cluster status shows on a node?", file=sys.stderr
    )
    print("Type yes to go on: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("yes", "y")


def _token(path: str | None) -> str:
    if path is not None:
        return _token_in(path)
    if os.environ.get("GPULAYER_TOKEN"):
        return os.environ["GPULAYER_TOKEN"].strip()
    if sys.stdin.isatty():
        from getpass import getpass

        return getpass("Token (not shown): ").strip()
    raise InvalidRequest(
        "a token is needed", hint="--token-file FILE or GPULAYER_TOKEN; gpulayer token create, on a node, makes one"
    )


def _token_in(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.readline().strip()
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not text"
        raise InvalidRequest(
            f"token-file: cannot read {path}: {why}", hint="name a file with the token in it"
        ) from error


def _tried(address: Secure, trust: Trust) -> Login:
    """What is to be kept: the CA has issued the node's certificate, and the token is good."""
    if not trust.token:
        raise InvalidRequest("the token is empty", hint="gpulayer token create, on a node, makes one")
    if trust.token.startswith("gpj_"):
        raise InvalidRequest(
            "this is a token for hosts that join, not one of the API",
            hint="gpulayer token create --role submit, on a node, makes one",
        )
    transport = Transport(Secure(address.endpoints, (trust,)), None)
    status = transport.call(calls.status())
    cluster = status.get("cluster_id")
    if not isinstance(cluster, str):
        raise GpulayerError(f"what answers at {address} is not a gpulayer daemon", hint="check the URL")
    nodes = transport.call(calls.nodes())
    endpoints = dict.fromkeys((*address.endpoints, *endpoints_of(nodes)))
    return Login(cluster=cluster, endpoints=tuple(endpoints), ca_pem=trust.ca_pem, token=trust.token)
