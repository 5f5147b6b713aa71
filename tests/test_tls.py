"""kvkeep.server.tls: certificates, and what is said of wrong ones."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from real_server import serving
from test_connections import GENERATE

from kvkeep.engine.config import EngineConfig
from kvkeep.schema import ConfigError
from kvkeep.server.config import ServerConfig
from kvkeep.server.tls import tls_context

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not shutil.which("openssl"), reason="needs the command openssl"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Self-signed certificates and their keys: ours.crt, ours.key, and so on."""
    at = tmp_path_factory.mktemp("tls")
    for name, secret in (("ours", []), ("other", []), ("locked", ["-passout", "pass:open"])):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"),
                *("ec_paramgen_curve:prime256v1", "-days", "2", "-subj", "/CN=localhost"),
                *("-addext", "subjectAltName=IP:127.0.0.1", *(secret or ["-nodes"])),
                *("-keyout", f"{at}/{name}.key", "-out", f"{at}/{name}.crt"),
            ],
            check=True,
            capture_output=True,
        )
    (at / "both.pem").write_bytes((at / "ours.crt").read_bytes() + (at / "ours.key").read_bytes())
    (at / "nonsense").write_text("no PEM")
    return at


def configured(files: Path, **names: str) -> ServerConfig:
    """With these files, by their settings without ``ssl_``."""
    given: dict[str, Any] = {
        f"ssl_{name}": value if name == "keyfile_password" else files / value
        for name, value in names.items()
    }
    return ServerConfig(engine=EngineConfig(model=Path("fake")), **given)


async def test_a_client_that_trusts_the_certificate(engine: FakeEngine, files: Path) -> None:
    given = {"ssl_certfile": files / "ours.crt", "ssl_keyfile": files / "ours.key"}
    with serving(engine, tls=given) as port:
        trust = ssl.create_default_context(cafile=files / "ours.crt")
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trust) as http:
            answer = await http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2})
            assert answer.json()["choices"][0]["text"] == "ab"
            body = {"prompt": "ab", "max_tokens": 2, "stream": True}
            events = (await http.post("/v1/completions", json=body)).text
            assert events.endswith("data: [DONE]\n\n")
        for verify, scheme in ((True, "https"), (True, "http")):
            url = f"{scheme}://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, verify=verify) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/ping")


async def test_clients_may_need_a_certificate(engine: FakeEngine, files: Path) -> None:
    given = {"ssl_certfile": files / "both.pem", "ssl_ca_certs": files / "other.crt"}
    with serving(engine, tls=given) as port:
        for name, allowed in (("other", True), ("ours", False), (None, False)):
            trust = ssl.create_default_context(cafile=files / "ours.crt")
            if name:
                trust.load_cert_chain(files / f"{name}.crt", files / f"{name}.key")
            url = f"https://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, verify=trust) as http:
                if allowed:
                    assert (await http.get("/ping")).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await http.get("/ping")


def test_who_does_not_read_is_cut_off_here_too(engine: FakeEngine, files: Path) -> None:
    engine.step_seconds = 0.05
    body = json.dumps({"prompt": "a", "n": 128, "max_tokens": 63, "stream": True}).encode()
    given = {"ssl_certfile": files / "both.pem"}
    with (
        serving(engine, 4096, given, write_timeout=0.3) as port,
        socket.socket() as plain,
    ):
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        plain.connect(("127.0.0.1", port))
        trust = ssl.create_default_context(cafile=files / "ours.crt")
        with trust.wrap_socket(plain, server_hostname="127.0.0.1") as client:
            client.sendall(GENERATE + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert engine.aborted()


@pytest.mark.parametrize(
    "names",
    [
        {"certfile": "ours.crt", "keyfile": "ours.key"},
        {"certfile": "both.pem"},
        {"certfile": "locked.crt", "keyfile": "locked.key", "keyfile_password": "open"},
        {"certfile": "both.pem", "ca_certs": "other.crt"},
    ],
)
def test_what_can_be_used(files: Path, names: dict[str, str]) -> None:
    context = tls_context(configured(files, **names))
    assert context
    assert (context.verify_mode == ssl.CERT_REQUIRED) == ("ca_certs" in names)
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"certfile": "none"}, "--ssl-certfile: cannot read .*none: No such file"),
        ({"certfile": "ours.crt", "keyfile": "none"}, "--ssl-keyfile: cannot read .*none"),
        ({"certfile": "ours.crt", "keyfile": "other.key"}, "other.key is not the key of .*ours"),
        ({"certfile": "ours.crt"}, "must have a certificate and its key, in PEM"),
        ({"certfile": "nonsense"}, "must have a certificate and its key, in PEM"),
        ({"certfile": "locked.crt", "keyfile": "locked.key"}, "--ssl-keyfile-password does not"),
        (
            {"certfile": "locked.crt", "keyfile": "locked.key", "keyfile_password": "wrong"},
            "--ssl-keyfile-password does not open .*locked.key",
        ),
        ({"certfile": "both.pem", "ca_certs": "none"}, "--ssl-ca-certs: cannot read"),
        ({"certfile": "both.pem", "ca_certs": "nonsense"}, "nonsense has no certificates in PEM"),
        ({"keyfile": "ours.key"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"ca_certs": "ours.crt"}, "--ssl-ca-certs needs --ssl-certfile"),
        ({"keyfile_password": "x"}, "--ssl-keyfile-password needs --ssl-certfile"),
    ],
)
def test_what_cannot(files: Path, names: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tls_context(configured(files, **names))


def test_the_password_is_shown_to_nobody(files: Path) -> None:
    config = configured(files, certfile="ours.crt", keyfile_password="hush")
    assert "hush" not in repr(config)
