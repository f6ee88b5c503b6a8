"""The CA of a cluster, from a node of it that is not believed yet. Nothing secret is sent; whether it is the right one
its fingerprint says, to a person or a program that knows it from elsewhere."""

from __future__ import annotations

import http.client
import socket
import ssl

from gpulayer.client.address import Secure
from gpulayer.client.exchange import CONNECT_SECONDS_MAX, error_in, not_connected
from gpulayer.model.errors import GpulayerError, Unreachable

PATH = "/v1/ca"
CA_BYTES_MAX = 64 * 1024


def fetch_ca(address: Secure) -> str:
    """PEM. Unreachable; GpulayerError where something else than a gpulayer daemon answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPConnection("localhost", timeout=CONNECT_SECONDS_MAX)
    try:
        connected = socket.create_connection(address.endpoints[0], timeout=CONNECT_SECONDS_MAX)
        connection.sock = connected
        connection.sock = context.wrap_socket(connected, server_hostname=address.endpoints[0][0])
        connection.request("GET", PATH, headers={"Host": str(address).removeprefix("https://")})
        response = connection.getresponse()
        content = response.read(CA_BYTES_MAX)
    except ssl.SSLError as error:
        raise Unreachable(
            f"what answers at {address} does not speak TLS as a gpulayer daemon does ({error.reason or error})",
            hint="is it the API port (7450) of a daemon that was started with --bind?",
        ) from error
    except OSError as error:
        raise not_connected(address, error) from error
    except http.client.HTTPException as error:
        raise GpulayerError(f"what answers at {address} is not a gpulayer daemon ({error!r:.80})") from error
    finally:
        connection.close()
    if response.status >= 400:
        raise error_in(content, response.status)
    try:
        return content.decode("ascii")
    except ValueError as error:
        raise GpulayerError(f"what answers at {address} is not a gpulayer daemon", hint="check the URL") from error
