"""One model over several devices, under sharding rules of your choice: the tokens are the same.

The devices are made of one CPU here; on a machine with accelerators drop the first lines. For whole servers there is
``jserve serve --tp N`` and ``LLM(tensor_parallel_size=N)``.

python examples/sharded.py
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=2"
)

import jax

from jserve.model.hand import Row, pack, step_model
from jserve.model.mesh import make_mesh
from jserve.model.shard import ShardRules
from jserve.model.step import make_step
from jserve.model.view import Bucket
from jserve.runner.state import new_state
from jserve.weights.dummy import draw_all

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
RULES = {
    "heads, ffn and vocabulary split": ShardRules(),
    "only heads split": ShardRules(ffn=None, vocab=None),
}


def tokens(rules: ShardRules, n_devices: int) -> list[int]:
    """The greedy tokens behind a prompt, over so many devices."""
    model = step_model(CONFIG, mesh=make_mesh(n_devices), rules=rules)
    params = draw_all(model.specs(), 0, model.mesh, model.rules, model.dtype)
    state = new_state(model)
    # Steps of one token a row: the prompt is fed through the program that decodes.
    bucket = Bucket(D=2, P=0, F=0)
    step = jax.jit(make_step(model, bucket), donate_argnums=1)
    found, prompt = [], [5, 17, 42, 8]
    for i in range(len(prompt) + 5):
        row = Row([1, 2, 3, 4], i, [prompt[i]]) if i < len(prompt) else Row([1, 2, 3, 4], -1, [-1])
        state, out = step(params, state, pack(bucket, model.dims, model.backend, [row], []))
        found.append(int(out.packed_RX[0, 2]))
    return found[len(prompt) - 1 :]


def main() -> None:
    alone = tokens(ShardRules(), 1)
    print(f"one device: {alone}")
    for name, rules in RULES.items():
        split = tokens(rules, 2)
        print(f"two devices, {name}: {split}")
        assert split == alone


if __name__ == "__main__":
    main()
