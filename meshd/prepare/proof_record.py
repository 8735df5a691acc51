"""What a proof found, so that it need not be run again for the same tokenizer by the same engines.

The proof takes seconds, and a leader that follows a dead one has workers to fork at once. Its predecessor's
result holds for it: ``key`` names the bytes of the file, the versions of the engines and of meshd.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_128_hexdigest

from meshd import __version__
from meshd.prepare.engine_proof import PROOF_SEED


@dataclass(frozen=True, slots=True)
class Proof:
    """``difference`` of the fast engine from the reference, empty for none; the others as in ``Cuts``."""

    key: str
    difference: str
    head: str
    pieces: str


class Proofs(Protocol):
    """Remembers proofs; ``TokenizerCopies`` is one."""

    def find(self, key: str) -> Proof | None: ...
    def keep(self, proof: Proof) -> None: ...


class NoProofs:
    """Remembers nothing."""

    def find(self, key: str) -> Proof | None:
        return None

    def keep(self, proof: Proof) -> None:
        pass


def file_digest(file: Path) -> str:
    """Return what tells one content of a file from another. Raises ``OSError``; reads the file whole."""
    return xxh3_128_hexdigest(file.read_bytes())


def proof_key(digest: str, engines: tuple[str, ...]) -> str:
    """Name the proof of a tokenizer's file, by its digest, by these engines."""
    versions = [f"{engine} {_version(engine)}" for engine in engines]
    return f"{digest} {PROOF_SEED} meshd {__version__} {' '.join(versions)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"
