"""A trainer and an engine in one process: the trainer's weights go into the engine between two steps.

The trainer uses the very functions that the engine compiles, teaches a model of random weights one answer, and hands
over its parameters. Nothing is written to disk, nothing is compiled again.

python examples/live_weights.py [MODEL]
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jserve import LLM, SamplingParams
from jserve.model.ctx import Ctx
from jserve.model.hand import Row, pack, step_model
from jserve.model.shard import ShardRules
from jserve.model.view import Bucket, unpack
from jserve.runner.state import new_state
from jserve.weights.dummy import draw_all
from jserve.weights.hf import read_config

SHIPPED = Path(__file__).parent.parent / "checkpoints" / "jserve-mini"
PROMPT, ANSWER, STEPS, RATE = "Who are you?", " A model in training.", 60, 0.01


def main(model_dir: str = str(SHIPPED)) -> None:
    nowhere = ShardRules(vocab=None, kv_heads=None, ffn=None)
    model = step_model(read_config(Path(model_dir)), rules=nowhere, attention="ref")
    params = draw_all(model.specs(), 0, model.mesh, model.rules, model.dtype)
    sampling = SamplingParams(temperature=0, max_tokens=12)
    with LLM(model_dir, params=params, dtype="float32") as llm:
        tokenizer = llm.get_tokenizer()
        prompt, answer = (tokenizer.encode(t, add_special_tokens=False) for t in (PROMPT, ANSWER))
        print(f"before: {llm.generate(PROMPT, sampling)[0].outputs[0].text!r}")
        params = trained(model, params, prompt, answer)
        llm.update_weights(params)
        told = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=len(answer)))
        print(f"after: {told[0].outputs[0].text!r}")


def trained(model, params, prompt: list[int], answer: list[int]):
    """``params`` after some steps of Adam towards ``answer`` behind ``prompt``."""
    tokens = prompt + answer[:-1]
    bucket = Bucket(D=2, P=len(tokens), F=1)
    buf = pack(bucket, model.dims, model.backend, [], [Row([1, 2, 3, 4], 0, tokens, slot=0)])
    state, targets = new_state(model), jnp.array(answer)

    def loss(params):
        view = unpack(jnp.asarray(buf), model.fields(bucket), bucket, model.dims, state.slots)
        ctx = Ctx.of(model.arch, view, model.backend, model.axes)
        x_TD, _ = model.family.forward(ctx, params, state.kv)
        x_ED = x_TD[-len(answer) :]
        logprobs = jax.nn.log_softmax(model.family.logits(model.arch, params, x_ED, model.axes))
        return -logprobs[jnp.arange(len(answer)), targets].mean()

    @jax.jit
    def adam(i, params, first, second):
        value, grads = jax.value_and_grad(loss)(params)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, grads)

        def moved(p, m, v):
            m, v = m / (1 - 0.9**i), v / (1 - 0.99**i)
            return p - RATE * m / (jnp.sqrt(v) + 1e-8)

        return value, jax.tree.map(moved, params, first, second), first, second

    first = second = jax.tree.map(jnp.zeros_like, params)
    value = jnp.inf
    for i in range(1, STEPS + 1):
        value, params, first, second = adam(i, params, first, second)
    print(f"loss after {STEPS} steps: {float(value):.4f}")
    return params


if __name__ == "__main__":
    main(*sys.argv[1:])
