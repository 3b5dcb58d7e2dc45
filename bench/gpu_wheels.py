"""Packages that travel with ``bench.gpu`` as wheels, for a machine that has no network.

It owns the list of what is carried, and unpacking what the machine lacks. A wheel is a zip file; none of these has
scripts that are needed. ``bench/gpu_wheels.sh`` collects them into ``bench/wheels/``, which git ignores.

    python -m bench.gpu_wheels              names of the packages that jserve needs, one per line
    python -m bench.gpu_wheels flashinfer   and of those that a peer of ``attention_peers`` needs
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent / "wheels"
NEEDED = (
    # jserve's own needs beyond jax, flax, orbax, transformers, torch and aiohttp with theirs.
    *("msgspec", "llguidance", "prometheus-client", "orjson", "uvloop", "psutil"),
    *("pydantic", "pydantic-core", "annotated-types"),
    *("typing-inspection", "typer", "shellingham", "click", "rich", "pygments"),
    *("markdown-it-py", "mdurl", "jinja2", "markupsafe"),
)
PEERS = {
    "flash-attn3": ("flash-attn3-jax==0.2.3", "einops"),
    "flashinfer": ("flashinfer-python==0.6.6", "apache-tvm-ffi", "tabulate", "nvidia-ml-py"),
}
"""Attention kernels to compare with, and their needs: too large to travel together."""


def missing(folder: Path = FOLDER) -> list[Path]:
    """Wheels in ``folder`` that are for this interpreter, and whose distribution it has not in any
    version."""
    wheels = [w for w in sorted(folder.glob("*.whl")) if _is_for_this_python(w)]
    return [w for w in wheels if not _is_installed(w.name.split("-")[0])]


def _is_for_this_python(wheel: Path) -> bool:
    python, abi, _ = wheel.stem.split("-")[-3:]
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return abi in ("abi3", "none") or python == own


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def unpack(wheels: list[Path], target: Path) -> None:
    """Lay the wheels' files into ``target``, those that lie there already left alone."""
    for wheel in wheels:
        mark = target / f".{wheel.name}"
        if not mark.exists():
            with zipfile.ZipFile(wheel) as z:
                z.extractall(target)
            mark.touch()


def environment(folder: Path = FOLDER) -> dict[str, str]:
    """The environment of a child process that finds what is carried after what is installed."""
    wheels = missing(folder)
    if not wheels:
        return dict(os.environ)
    # A folder for each set of wheels: what another interpreter lacked may shadow what this one has.
    names = "\n".join([sys.version, *(w.name for w in wheels)])
    digest = hashlib.sha256(names.encode()).hexdigest()[:12]
    target = Path(tempfile.gettempdir()) / f"jserve-wheels-{os.getuid()}-{digest}"
    target.mkdir(mode=0o700, exist_ok=True)
    unpack(wheels, target)
    path = [os.environ.get("PYTHONPATH", ""), str(target)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


if __name__ == "__main__":
    asked = [name for peer in sys.argv[1:] for name in PEERS[peer]]
    sys.stdout.write("\n".join([*NEEDED, *asked]) + "\n")
