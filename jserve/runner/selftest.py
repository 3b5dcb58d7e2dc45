"""Runs kernels on this machine's device before an engine relies on them.

A decode step and a chunk run beside ``ref``, the experts of a mixture beside XLA's loop, and products with quantised
weights beside XLA's, in a child process with a time limit: a kernel that is wrong gives numbers, one whose barriers do
not match waits for ever, and a refused copy descriptor aborts the process. The parent may hold its share of the device
already: the child takes what it needs and no more.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from jserve.xla import beside_parent

LIMIT_S = 120.0
"""For starting Python and jax, compiling two programs twice and running them."""
KILLED_S = 5.0
"""The seconds that a killed child may take to be gone: one that hangs in the driver may not go at all."""
WRONG = 4
"""Exit code of a child whose kernels gave other numbers than ``ref``."""
APART = 2e-2
"""Largest difference over the largest number, for 16-bit keys and values."""


LatentSizes = tuple[int, int, int, int]
"""Of latent attention: numbers of a head's own key, of the shared one, of a latent, of a head's value."""


def command(*case: Any) -> list[str]:
    """The command of a child that runs ``differs`` with these arguments."""
    return [sys.executable, "-c", f"from jserve.runner.selftest import main; main{case!r}"]


def command_of_products(forms: Sequence[Any]) -> list[str]:
    """The command of a child that runs ``products_differ`` with these forms."""
    cases = [dataclasses.asdict(dataclasses.replace(form, made_as=None)) for form in forms]
    called = f"from jserve.runner.selftest import main_of_products; main_of_products({cases!r})"
    return [sys.executable, "-c", called]


def fault(command: Sequence[str], *, limit_s: float = LIMIT_S) -> str:
    """Run the child; returns the reason why its kernels cannot be relied on, empty if they can."""
    child = subprocess.Popen(
        command,
        env=beside_parent(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, said = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(child)
        return f"no result within {limit_s:.0f} s"
    if child.returncode == 0:
        return ""
    lines = said.decode(errors="replace").strip().splitlines()
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"code {child.returncode}"
    return f"the test ended with {how}: {lines[-1][:200] if lines else 'it said nothing'}"


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    try:
        child.communicate(timeout=KILLED_S)
    except subprocess.TimeoutExpired:
        return


def differs(
    name: str,
    H: int,
    G: int,
    page_size: int,
    dtype: str,
    experts: tuple[int, int] | None = None,
    latent: LatentSizes | None = None,
) -> str:
    """Run the cases of an attention backend in this process; returns those that differ from ``ref``, and by how much.

    Args:
        name: of the backend.
        H: numbers of a head.
        G: query heads of a kv head.
        dtype: in which KV is stored, or the form of that name.
        experts: the width of the model, and a device's share of that of an expert; None: it has none.
        latent: of latents, which ``G`` heads share; None: attention is over heads.
    """
    import jax
    import numpy as np

    from jserve.model.attention import backend

    platform = jax.devices()[0].platform
    found, attends = [], not backend(name, platform).for_experts

    def judge(case: str, want: np.ndarray, got: np.ndarray) -> None:
        apart = float(np.abs(want - got).max() / np.abs(want).max())
        if not apart < APART:
            found.append(f"{case} differs from ref by {apart:.3g} of its largest number")

    for case, rows in CASES.items() if attends else ():
        heads = (H, G, page_size, dtype, latent)
        judge(case, *(_outputs(n, platform, rows, *heads) for n in ("ref", name)))
    if experts is not None:
        judge("experts", *(_experts(n, platform, *experts) for n in ("ref", name)))
    return ", ".join(found)


Spans = tuple[tuple[int, int], ...]
"""(start, count) of rows."""
CASES: dict[str, tuple[Spans, Spans]] = {
    "decode": (((300, 1), (0, 1), (127, 1)), ()),
    "prefill": ((), ((150, 130), (0, 70))),
}
"""Decode rows and prefill rows of a step."""


def _outputs(
    name: str,
    platform: str,
    rows: tuple[Spans, Spans],
    H: int,
    G: int,
    page_size: int,
    dtype: str,
    latent: LatentSizes | None,
):
    """float32[tokens, N, H] of a step over two kv heads, random KV of unit size; or [tokens, G, V] over latents."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jserve.model.attention import backend
    from jserve.model.hand import Row, pack
    from jserve.model.slots import empty
    from jserve.model.view import Bucket, StepDims, layout, unpack

    attn, M = backend(name, platform), -(-320 // page_size)
    dims = StepDims(C=4, M=M, Z=page_size, V=8)
    bucket = Bucket(D=4, P=0, F=0) if rows[0] else Bucket(D=0, P=256, F=2)
    rng, n_pages = np.random.default_rng(1), 4 * M + 1
    pages = iter(rng.permutation(n_pages - 1) + 1)
    made = [[Row([next(pages) for _ in range(M)], s, [1] * n) for s, n in part] for part in rows]
    run, drawn = (
        _over_heads(attn, dtype, H, G) if latent is None else _over_latents(attn, dtype, G, latent)
    )
    sizes = {True: (n_pages, page_size), False: (bucket.T,)}
    arrays = [rng.standard_normal((*sizes[in_pages], *s)) for in_pages, s in drawn]
    fields = layout(bucket, dims, attn.plan_shapes(bucket, dims))

    @jax.jit
    def step(buf, arrays):
        view = unpack(buf, fields, bucket, dims, empty(4, dims.V))
        return run(view, *arrays), view.pos_T

    arrays = [jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in arrays]
    out, pos_T = step(pack(bucket, dims, attn, *made), arrays)
    return np.asarray(out, np.float32)[np.asarray(pos_T) >= 0]


def _over_heads(attn, dtype: str, H: int, G: int):
    """A step's attention of two kv heads, as a function of the view and arrays, and of these whether they have pages
    or else tokens, and what an entry is."""
    import jax.numpy as jnp

    from jserve.kv_layout import KV_FORMS, stored_width
    from jserve.model.attention import AttendArgs
    from jserve.model.kv_bytes import BYTES
    from jserve.model.kv_quant import stored

    in_form = dtype in KV_FORMS
    kept = attn.kv_dtype(BYTES if in_form else jnp.dtype(dtype))
    width = stored_width(dtype, H) if in_form else H

    def run(view, keys, values, q, k, v):
        pools = ((x.swapaxes(1, 2) if attn.kv_axis == 1 else x) for x in (keys, values))
        kv = tuple(part for x in pools for part in attn.parts(stored(x, kept, width)))
        kv = attn.write_kv(kv, k, v, view)
        return attn.attend(AttendArgs(q_TNH=q, window=0, scale=H**-0.5), kv, view)

    K = 2
    return run, [(True, (K, H))] * 2 + [(False, (K * G, H)), (False, (K, H)), (False, (K, H))]


def _over_latents(attn, dtype: str, N: int, latent: LatentSizes):
    """``_over_heads`` of latents that N heads share. Their matrices are made of keys of their own."""
    import jax
    import jax.numpy as jnp

    from jserve.model import latent_pool
    from jserve.model.attention import LatentArgs
    from jserve.model.kv_quant import stored

    own, shared, A, V = latent
    kept = attn.kv_dtype(jnp.dtype(dtype))
    k_up, v_up = (
        jax.random.normal(jax.random.key(n), (N, n, A), jnp.bfloat16) * A**-0.5 for n in (own, V)
    )

    def run(view, pool, q, q_shared, x):
        args = LatentArgs(
            q_TNH=q, q_TNY=q_shared, k_up_NHA=k_up, v_up_NVA=v_up, scale=(own + shared) ** -0.5
        )
        return attn.attend_latent(args, latent_pool.write(stored(pool, kept), x, view), view)

    width = (A + shared,)
    return run, [(True, width), (False, (N, own)), (False, (N, shared)), (False, width)]


def _experts(name: str, platform: str, D: int, F: int):
    """float32[T, D]: random tokens through random experts, one of which nobody chooses."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jserve.model.arch import Moe
    from jserve.model.attention import backend
    from jserve.model.moe import routed

    moe, T = Moe(E=4, X=2, F=F), 40
    rng = np.random.default_rng(2)
    up, down = (2 * moe.E, F, D), (moe.E, D, F)
    drawn = {"expert_gate_up": (up, D), "expert_down": (down, F)}
    p = {k: rng.standard_normal(s) * n**-0.5 for k, (s, n) in drawn.items()}
    p = {k: jnp.asarray(x, jnp.bfloat16) for k, x in p.items()}
    expert_TX = np.stack([rng.permutation(moe.E - 1)[: moe.X] for _ in range(T)])
    expert_TX[::7] = moe.E  # padding
    x_TD = rng.standard_normal((T, D)).astype(np.float32)
    kernel = backend(name, platform).experts
    one = jax.jit(lambda p, x, chosen, weight: routed(moe, p, x, chosen, weight, kernel))
    weight_TX = np.full((T, moe.X), 0.5, np.float32)
    return np.asarray(one(p, x_TD, expert_TX.astype(np.int32), weight_TX))


PRODUCT_ROWS = (1, 16, 40)
"""Rows of the products that are tried: a tuning of the kernel for few, and one for more."""


def products_differ(forms: Sequence[Any]) -> str:
    """Run products with matrices in these forms by the kernel for few rows, in this process; returns those that differ
    from XLA's, and by how much. Matrices are random, of an odd number of rows."""
    import jax
    import numpy as np

    from jserve.model import quant, quant_hopper

    found = []
    for form in forms:
        w = _random_matrix(form)
        for T in PRODUCT_ROWS:
            x_TD = np.random.default_rng(T).standard_normal((T, w.shape[1])).astype(np.float32)
            want, got = (
                np.asarray(jax.jit(one)(x_TD, w)) for one in (quant.product, quant_hopper.product)
            )
            apart = float(np.abs(want - got).max() / np.abs(want).max())
            if not apart < APART:
                case = f"{form.name} in groups of {form.group}, {T} rows"
                found.append(
                    f"{case} differs from XLA's product by {apart:.3g} of its largest number"
                )
    return ", ".join(found)


def _random_matrix(form: Any) -> Any:
    """A matrix of four groups, at least 512 inputs, or of one of 512."""
    import jax.numpy as jnp
    import numpy as np

    from jserve.model.quant import HALF_BYTES, KINDS, QTensor

    rng, N, D = np.random.default_rng(3), 200, max(4 * form.group, 512)
    shape = (N, form.groups(D))
    if form.kind == "e4m3":
        q = jnp.asarray(rng.standard_normal((N, D)), KINDS["e4m3"])
    else:
        low, high = (0, 256) if form.kind in HALF_BYTES else (-127, 128)
        q = jnp.asarray(rng.integers(low, high, (N, form.stored(D))), KINDS[form.kind])
    scale, shift = (jnp.asarray(rng.uniform(0.5, 1.5, shape), jnp.float32) for _ in range(2))
    return QTensor(
        q=q,
        scale=scale,
        zero=jnp.asarray(rng.integers(-7, 8, shape), jnp.int8) if form.zeros else None,
        form=form,
        shift=shift if form.shifts else None,
        order=jnp.asarray(rng.permutation(D)[None], jnp.int32) if form.ordered else None,
        input_scale=jnp.asarray([0.05], jnp.float32) if form.static else None,
    )


def main(*case: Any) -> None:
    """The child's side, with arguments of ``command``: exits with 0, or with ``WRONG`` and what differs on stderr."""
    _end_with(differs(*case))


def main_of_products(cases: Sequence[dict[str, Any]]) -> None:
    """The same, with those of ``command_of_products``."""
    from jserve.model.quant import Form

    _end_with(products_differ([Form(**case) for case in cases]))


def _end_with(found: str) -> None:
    if found:
        print(found, file=sys.stderr)
    sys.exit(WRONG if found else 0)
