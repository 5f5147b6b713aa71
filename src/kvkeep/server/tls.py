"""TLS: the server's certificate, and those that it asks of clients."""

from __future__ import annotations

import ssl
from pathlib import Path

from ..schema import ConfigError
from ..settings import flag
from .config import ServerConfig


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What connections are encrypted with; None: they are not.

    Clients need TLS 1.2 or newer, and a certificate if ``config`` names authorities.

    Raises:
        ConfigError: a file cannot be read, is no PEM, the key is not the certificate's, or there is
            no certificate for the other settings.
    """
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{flag(name)} needs {flag('ssl_certfile')}")
        return None
    key = config.ssl_keyfile or config.ssl_certfile
    _read("ssl_certfile", config.ssl_certfile)
    _read("ssl_keyfile", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    asked = False

    def password() -> str:
        """Called if the key has one; without it, OpenSSL would ask the terminal."""
        nonlocal asked
        asked = True
        return config.ssl_keyfile_password or ""

    try:
        context.load_cert_chain(config.ssl_certfile, key, password)
    except (ssl.SSLError, ValueError) as error:
        if asked:
            raise ConfigError(f"{flag('ssl_keyfile_password')} does not open {key}") from None
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key} is not the key of {config.ssl_certfile}") from None
        raise ConfigError(
            f"{config.ssl_certfile} and {key} must have a certificate and its key, in PEM"
        ) from None
    if config.ssl_ca_certs:
        _read("ssl_ca_certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError:
            raise ConfigError(f"{config.ssl_ca_certs} has no certificates in PEM") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read(name: str, file: Path) -> None:
    """Raise :class:`ConfigError` if ``file``, given by the setting ``name``, cannot be read."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{flag(name)}: cannot read {file}: {error.strerror}") from None
