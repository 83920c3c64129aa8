"""Signatures that prove that a question comes from the coordinator and belongs to the run in which it arrives.

Anyone who can reach a SuperLink's port can submit runs to it, and nodes would answer their messages. With TLS, the
coordinator therefore signs each question with the key of its certificate, and a site answers only questions that it can
verify against the authority's certificate (``ca.crt``), perhaps through intermediate authorities. The certificate must
be for the host that the site connects to: a hospital's authority also signs certificates of many other servers. The
signature (ECDSA with SHA-384) covers the facts, all bytes of the arrays, and Flower's run number, so that a recorded
question cannot be replayed in another run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ...utils.errors import UsageError
from .arrays import RefusedMessage
from .certificates import check_chain, is_for, list_hosts, read_certificates
from .exchange import Exchange, digest_record

SCHEME = ec.ECDSA(hashes.SHA384())


class Signer:
    """Signs questions of run ``run`` with ``server.key`` in ``directory``, and attaches ``server.crt``."""

    def __init__(self, directory: Path, run: int) -> None:
        key = serialization.load_pem_private_key((directory / "server.key").read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise UsageError(f"{directory / 'server.key'} is not an ECDSA key: make it with `fedshift pki init`")
        self._run = run
        self.key = key
        self._certificate = (directory / "server.crt").read_text(encoding="utf-8")

    def __call__(self, exchange: Exchange) -> Exchange:
        """Return ``exchange`` with its proof: certificate and signature."""
        signature = self.key.sign(_signed_content(exchange, self._run), SCHEME)
        proof = {"certificate": self._certificate, "signature": base64.b64encode(signature).decode()}
        return replace(exchange, facts={**exchange.facts, "proof": proof})


class Verifier:
    """Verifies that questions come from the coordinator at ``host``; file ``root``: the authority's certificate."""

    def __init__(self, root: Path, host: str) -> None:
        self._host = host
        self._roots = read_certificates(root)

    def __call__(self, exchange: Exchange, run: int) -> Exchange:
        """Return ``exchange`` without its proof and with its signer.

        Raises :class:`RefusedMessage` if the proof is invalid for ``run``.
        """
        facts = dict(exchange.facts)
        proof = facts.pop("proof", None)
        plain = replace(exchange, facts=facts)
        try:
            chain = x509.load_pem_x509_certificates(proof["certificate"].encode())
            key = chain[0].public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise TypeError("its key is of another kind")
            key.verify(base64.b64decode(proof["signature"]), _signed_content(plain, run), SCHEME)
        except (TypeError, KeyError, ValueError, AttributeError, InvalidSignature) as error:
            raise RefusedMessage(
                f"a question that the coordinator did not sign for this run ({type(error).__name__})"
            ) from error
        if not is_for(chain[0], self._host):
            raise RefusedMessage(
                f"a question signed with a certificate for {', '.join(list_hosts(chain[0])) or 'no host'}, where "
                f"the coordinator is {self._host}"
            )
        if not chain[0].not_valid_before_utc <= datetime.now(UTC) <= chain[0].not_valid_after_utc:
            raise RefusedMessage(
                f"the coordinator's certificate is not valid now (until {chain[0].not_valid_after_utc})"
            )
        try:
            check_chain(chain, self._roots)
        except ValueError as error:
            raise RefusedMessage(
                f"a question signed with a certificate for which ca.crt does not vouch ({error})"
            ) from error
        return replace(plain, signer=fingerprint(key))


def _signed_content(exchange: Exchange, run: int) -> bytes:
    """Return the bytes that the signature covers."""
    arrays = {record: digest_record(content) for record, content in sorted(exchange.arrays.items())}
    said: dict[str, Any] = {"kind": exchange.kind, "facts": exchange.facts, "arrays": arrays, "run": run}
    return json.dumps(said, sort_keys=True).encode()


def load_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the private key of a site in ``path``, as `fedshift pki` wrote it."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except ValueError as error:
        raise UsageError(
            f"{path} is not a private key of a site ({error}): take the file that `fedshift pki` made"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} is not an ECDSA key: make it with `fedshift pki`")
    return key


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return a key's fingerprint, as ``ssh-keygen -l`` prints it: ``SHA256:...``."""
    form = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(form.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"
