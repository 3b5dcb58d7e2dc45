"""``jserve convert``: writes any supported model as an Orbax directory.

It owns the order of the conversion: load on the host's CPU device, write, copy the text files. Needs host memory
for the whole model in the target dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from jserve.model.families import family_for
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.weights import orbax
from jserve.weights.hf import dtype_name
from jserve.weights.loader import load
from jserve.weights.place import Progress
from jserve.weights.quant.scheme import quantised, scheme_of
from jserve.weights.source import Source, resolve


def convert(
    src: str, dst: str | Path, *, dtype: Any = None, progress: Progress | None = None
) -> Source:
    """Write model ``src`` (as ``--model`` takes it) to the Orbax directory ``dst``; resolve that.

    ``dtype``: bfloat16, float16 or float32; None or "auto" keeps what config.json states. Tensors
    are checked for NaN and infinity in full on the way.

    Raises:
        ConfigError: ``src`` is not found or not supported, ``dst`` is not empty.
        WeightsError: a weight file of ``src`` is broken.
    """
    source = resolve(src)
    kind = jax.numpy.dtype(dtype if dtype not in (None, "auto") else dtype_name(source.config))
    scheme = scheme_of(source.config, kind)
    family = quantised(family_for(source.config), scheme)
    mesh = make_mesh(1, jax.local_devices(backend="cpu"))
    arch = family.arch(source.config)
    orbax.check_target(Path(dst))
    params = load(
        family,
        arch,
        source,
        mesh,
        ShardRules(),
        kind,
        progress=progress,
        scan_nan="full",
        scheme=scheme,
    )
    orbax.save(Path(dst), params, source.directory)
    return resolve(str(dst), load_format="orbax")
