"""HTTPS with certificates made here, client certificates, and what a real socket shows of keys."""

import datetime
import ssl
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from omni_server.api.config import TlsFiles
from omni_server.api.server import run_server
from omni_server.errors import ConfigError
from tests.unit.api.clients import URL, chat
from tests.unit.api.sse_validator import read_stream
from tests.unit.api.test_server import QUIET, Life, client_of, served


@dataclass
class Certificate:
    certfile: str
    keyfile: str


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Of 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "omni-server test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    certfile.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    keyfile.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return Certificate(str(certfile), str(keyfile))


async def test_https_serves_requests_and_streams(certificate: Certificate) -> None:
    life = Life()
    config = replace(QUIET, tls=TlsFiles(certificate.certfile, certificate.keyfile))
    trust = ssl.create_default_context(cafile=certificate.certfile)
    async with served(life, config):
        assert life.address.startswith("https://127.0.0.1:")
        async with client_of(life.address, verify=trust) as client:
            assert (await client.get("/health")).status_code == 200
            assert read_stream((await client.post(URL, json=chat(stream=True))).text).finish_reason == "stop"
        async with client_of(life.address) as distrustful:
            with pytest.raises(httpx2.ConnectError):
                await distrustful.get("/health")
        async with client_of(life.address.replace("https", "http")) as plain:
            with pytest.raises(httpx2.TransportError):
                await plain.get("/health")


async def test_clients_without_a_certificate_are_turned_away_where_one_is_required(
    certificate: Certificate,
) -> None:
    life = Life()
    files = TlsFiles(
        certificate.certfile, certificate.keyfile, ca_certs=certificate.certfile, cert_reqs=ssl.CERT_REQUIRED
    )
    async with served(life, replace(QUIET, tls=files)):
        trust = ssl.create_default_context(cafile=certificate.certfile)
        async with client_of(life.address, verify=trust) as client:
            with pytest.raises(httpx2.TransportError):
                await client.get("/health")
        trust.load_cert_chain(certificate.certfile, certificate.keyfile)
        async with client_of(life.address, verify=trust) as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("fault", ["no such file", "no certificate", "no key"])
async def test_files_that_cannot_be_used_are_found_before_the_model_loads(
    fault: str, certificate: Certificate, tmp_path: Path
) -> None:
    (tmp_path / "odd.pem").write_text("nothing")
    tls = {
        "no such file": TlsFiles(str(tmp_path / "none.pem")),
        "no certificate": TlsFiles(str(tmp_path / "odd.pem"), certificate.keyfile),
        "no key": TlsFiles(certificate.certfile),
    }[fault]
    life = Life()
    with pytest.raises(ConfigError, match=f"cannot use the TLS certificate or key {tls.certfile}"):
        await run_server(life.start, life.stop, replace(QUIET, tls=tls), life.on_ready)
    assert life.num_starts == 0
