"""A seal: the SHA-256 of every file in a folder, kept in the folder, so that a truncated or flipped byte is noticed."""

import hashlib
import json
import os
from pathlib import Path

SEAL = "seal.json"


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SEAL)
    digests = {}
    for path in files:
        with path.open("rb") as file:
            digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(folder: Path) -> None:
    """Write the seal of everything in `folder`, and have it all on the disk before returning."""
    (folder / SEAL).write_text(json.dumps(_digests(folder), indent=1))
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed `folder`, or None if every byte is as it was."""
    try:
        expected = json.loads((folder / SEAL).read_text())
        found = _digests(folder)
    except (OSError, ValueError) as error:
        return f"{SEAL} can't be read ({error})"
    if not isinstance(expected, dict) or not expected:
        return f"{SEAL} names no files"
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} doesn't belong there"
        if found[name] != expected[name]:
            return f"{name} has changed"
    return None
