"""The step without a server: trained weights, greedy decoding, and the activations of every layer.

python examples/step_by_hand.py [MODEL]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jserve.model.ctx import Ctx
from jserve.model.hand import Row, pack, step_model
from jserve.model.points import entering
from jserve.model.shard import ShardRules
from jserve.model.step import StepModel, make_step
from jserve.model.view import Bucket, unpack
from jserve.runner.state import new_state
from jserve.text.tokenizer import load_tokenizer
from jserve.weights.hf import read_config
from jserve.weights.loader import load
from jserve.weights.source import resolve

SHIPPED = Path(__file__).parent.parent / "checkpoints" / "jserve-mini"
NOWHERE = ShardRules(vocab=None, kv_heads=None, ffn=None)
"""Nothing is split, so a forward pass needs no mesh around it."""


def main(model_dir: str = str(SHIPPED), load_format: str = "auto") -> None:
    directory = Path(model_dir)
    tokenizer = load_tokenizer(directory)
    model = step_model(read_config(directory), rules=NOWHERE)
    source = resolve(model_dir, "", load_format)
    params = load(model.family, model.arch, source, model.mesh, model.rules, model.dtype)
    prompt = tokenizer.encode("One, two, three,", add_special_tokens=False)
    pages = [1, 2, 3, 4]

    prefill = Bucket(D=2, P=len(prompt), F=1)  # two decode rows at least, here of padding
    buf = pack(prefill, model.dims, model.backend, [], [Row(pages, 0, prompt, slot=0)])
    for i, size in enumerate(sizes(model, prefill, params, buf)):
        print(f"entering layer {i}: {float(size):.3f}")

    state, out = jax.jit(make_step(model, prefill), donate_argnums=1)(params, new_state(model), buf)
    tokens = [int(out.packed_RX[prefill.D, 2])]
    decode = Bucket(D=2, P=0, F=0)
    step = jax.jit(make_step(model, decode), donate_argnums=1)
    buf = pack(decode, model.dims, model.backend, [Row(pages, -1, [-1], slot=0)], [])
    for _ in range(8):  # the same buffer every time: the device knows the length and the last token
        state, out = step(params, state, buf)
        tokens.append(int(out.packed_RX[0, 2]))
    print(tokenizer.decode(tokens))


def sizes(model: StepModel, bucket: Bucket, params: object, buf: object) -> jax.Array:
    """float32[L]: the mean size of the residual stream as it enters each layer."""
    state = new_state(model)
    points = [entering(i, model.arch.L) for i in range(model.arch.L)]
    forward = model.family.tapped
    assert forward is not None, "this family has no taps"

    @jax.jit
    def tapped(params, buf):
        view = unpack(buf, model.fields(bucket), bucket, model.dims, state.slots)
        ctx = Ctx.of(model.arch, view, model.backend, model.axes)
        _, _, found = forward(ctx, params, state.kv, points)
        return jnp.stack([jnp.abs(x_TD[-1]).mean() for x_TD in found])

    return tapped(params, buf)


if __name__ == "__main__":
    main(*sys.argv[1:])
