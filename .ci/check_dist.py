"""What `make dist` built: the wheel holds the package and nothing else, and works where there is nothing else.

python .ci/check_dist.py dist
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path


def contents(folder: Path) -> Path:
    """The wheel, after a look into it and into the sdist."""
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    strangers = [name for name in names if not name.startswith(("optax_fp16/", "optax_fp16-"))]
    code = [name for name in names if name.startswith("optax_fp16/") and not name.endswith((".py", "py.typed"))]
    if strangers or code or "optax_fp16/py.typed" not in names:
        raise SystemExit(f"the wheel should hold optax_fp16's modules and py.typed only; see {strangers + code}")
    with tarfile.open(sdist) as archive:
        packed = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    missing = {"LICENSE", "README.md", "pyproject.toml", "tests/conftest.py", "examples/quickstart.py"} - set(packed)
    generated = [name for name in packed if name.startswith(("site/", "runs/", "dist/")) or "__pycache__" in name]
    if missing or generated:
        raise SystemExit(f"the sdist lacks {sorted(missing)} and holds what is generated: {generated}")
    print(f"{wheel.name}: {len(names)} files; {sdist.name}: {len(packed)} files")
    return wheel


def works_in_an_empty_environment(wheel: Path) -> None:
    quickstart = (Path(__file__).parent.parent / "examples" / "quickstart.py").read_text()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel.resolve())], check=True)
        (Path(folder) / "quickstart.py").write_text(quickstart)
        # In that folder, so that it is the installed package which is imported.
        subprocess.run([python, "quickstart.py", "--steps", "60"], check=True, cwd=folder)


if __name__ == "__main__":
    works_in_an_empty_environment(contents(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")))
