"""The certificate by which a server's own NATS, or a source of KV, proves who it is. It has an authority of its own."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY_NAME = "dynamo-local bus"
_SERVER_NAME = "NATS"
_VALID = datetime.timedelta(days=3650)
"""A certificate lasts as long as its server, which may run for years: it cannot be renewed."""
_CLOCKS_DIFFER = datetime.timedelta(days=2)
"""The clocks of other machines may be late by so much."""


@dataclass(frozen=True)
class Certificate:
    """All in PEM. `authority` is what clients must know, and no secret; `chain` and `key` are the server's."""

    authority: str
    chain: bytes
    key: bytes = field(repr=False)


def make_certificate(address: str) -> Certificate:
    """Make a certificate for a server at the address, also by this machine's name and on loopback. Nobody can sign
    another one: the authority's key is thrown away."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, subject = _name(_AUTHORITY_NAME), _name(_SERVER_NAME)
    names = dict.fromkeys((address, socket.gethostname(), "localhost", "127.0.0.1"))
    authority = (
        _builder(issuer, issuer, authority_key, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    server = (
        _builder(issuer, subject, authority_key, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Certificate(
        authority.public_bytes(serialization.Encoding.PEM).decode(),
        server.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    subject_key: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(subject_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(subject_key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
