"""The recipe: what is trained is what is served, runs resume exactly, exports load elsewhere."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.recipe import export, packing, skills, storage, tokenizer, train
from checkpoints.recipe.chat import Chat, as_messages, prompt_and_answer, segments
from checkpoints.recipe.evaluate import held_out, judge
from checkpoints.recipe.model import SIZES, ModelConfig, init_params, packed_logits

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
SHIPPED = CHECKPOINTS / "jserve-mini"
DRAFT = CHECKPOINTS / "jserve-mini-draft"
TINY = SIZES["tiny"]
TASK = train.language_model(TINY)
# What the shipped weights reach with a margin for the few chats that are judged here.
FLOOR = 0.8
needs_weights = pytest.mark.skipif(
    not (SHIPPED / "model.safetensors").exists(), reason="no trained weights in this tree"
)


@pytest.fixture(scope="module")
def tiny_tokenizer():
    return tokenizer.train_tokenizer(chats=300, vocab_size=TINY.vocab)


def rendered(chat: Chat) -> str:
    return "".join(text for text, _ in segments(chat))


def some_chats(count: int, seed: int = 7) -> list[Chat]:
    rng = np.random.default_rng(seed)
    return [skills.draw(rng, "train") for _ in range(count)]


def test_a_seed_names_its_text():
    assert some_chats(50) == some_chats(50)
    assert some_chats(50) != some_chats(50, seed=8)


def test_held_out_names_never_occur_in_training():
    rng = np.random.default_rng(0)
    drawn = {
        split: {skills.lx.invented(rng, split) for _ in range(500)} for split in ("train", "test")
    }
    assert not drawn["train"] & drawn["test"]


@pytest.mark.parametrize("skill", skills.SKILLS)
def test_template_renders_what_was_trained_on(skill, tmp_path_factory, tiny_tokenizer):
    hf = _hf_tokenizer(tiny_tokenizer, tmp_path_factory)
    rng = np.random.default_rng(3)
    for split in ("train", "test"):
        for _ in range(20):
            chat = skills.SKILLS[skill](rng, split)
            messages, tools = as_messages(chat)
            options = {"tools": tools or None, "tokenize": False, "enable_thinking": chat.thinking}
            assert hf.apply_chat_template(messages, **options) == rendered(chat)
            prompt = hf.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
            assert prompt == prompt_and_answer(chat)[0]


_HF = {}


def _hf_tokenizer(tiny_tokenizer, tmp_path_factory):
    from transformers import AutoTokenizer

    if "tokenizer" not in _HF:
        folder = tmp_path_factory.mktemp("hf")
        export.export(init_params(TINY, 0), TINY, tiny_tokenizer, folder)
        _HF["tokenizer"] = AutoTokenizer.from_pretrained(folder)
    return _HF["tokenizer"]


def test_template_takes_what_clients_send(tmp_path_factory, tiny_tokenizer):
    """Content parts, arguments as a JSON string, tools without the function wrapper."""
    hf = _hf_tokenizer(tiny_tokenizer, tmp_path_factory)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    properties = {"x": {"type": "integer"}}
    tool = {"name": "f", "description": "Does f.", "parameters": {"properties": properties}}
    text = hf.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert "\nf(x: integer): Does f.<|im_end|>" in text
    assert "user\nhi<|im_end|>" in text
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>' in text


def test_tokenizer_round_trips_anything(tiny_tokenizer):
    texts = [
        "plain words",
        "12345 and 6.7",
        "  two  spaces\n\ttabs\r\n",
        "žluťoučký 日本語 🙂",
        "\x00\x7f",
    ]
    for text in [*texts, *(rendered(chat) for chat in some_chats(50))]:
        ids = tiny_tokenizer.encode(text).ids
        assert tiny_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone(tiny_tokenizer):
    assert len(tiny_tokenizer.encode("12345").ids) == 5


def test_markup_survives_skipping_special_tokens(tiny_tokenizer):
    ids = tiny_tokenizer.encode("<think>\nx\n</think>\n\ny<|im_end|>").ids
    assert tiny_tokenizer.decode(ids) == "<think>\nx\n</think>\n\ny"


def test_loss_falls_on_assistant_text_only(tiny_tokenizer):
    chat = next(chat for chat in some_chats(50) if chat.skill == "extract")
    ((ids, weights),) = packing.encode(tiny_tokenizer, [chat])
    _, answer = prompt_and_answer(chat)
    learnt = tiny_tokenizer.decode(ids[weights == 1.0].tolist(), skip_special_tokens=False)
    assert learnt == answer + "<|im_end|>"


@pytest.mark.slow
def test_packed_documents_do_not_see_each_other():
    params = init_params(TINY, 0)
    # Closing matrices start at zero, which would hide any mixing: use random ones.
    params = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.3, params
    )
    tokens_BT = np.arange(12)[None] % 7
    documents_BT = np.array([[1] * 5 + [2] * 7])
    other_BT = tokens_BT.copy()
    other_BT[0, :5] = 3
    a, b = (packed_logits(TINY, params, x, documents_BT)[0] for x in (tokens_BT, other_BT))
    np.testing.assert_array_equal(a[5:], b[5:])
    assert not np.array_equal(a[4], b[4])


def _plan(steps: int) -> train.Plan:
    return train.Plan(TINY, 0.0, steps, tokens=1024, length=128, long_from=1, long_every=2)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tiny_tokenizer, tmp_path):
    """Interrupted after every step, the parameters come out bit for bit the same."""
    plan = dataclasses.replace(_plan(3), save_every=1)
    train.run(plan, TASK, tiny_tokenizer, tmp_path / "whole")
    for stop in (1, 2, 3):
        _run_until(plan, tiny_tokenizer, tmp_path / "parts", stop)
    whole, parts = (_stored(plan, tmp_path / name) for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


def _run_until(plan: train.Plan, tiny_tokenizer, out: Path, stop: int) -> None:
    """Kill the run right after step `stop` was stored."""

    def report(clock, loss):
        if clock.step > stop:
            raise KeyboardInterrupt

    if stop < plan.steps:
        with pytest.raises(KeyboardInterrupt):
            train.run(plan, TASK, tiny_tokenizer, out, report)
    else:
        train.run(plan, TASK, tiny_tokenizer, out, report)


def _stored(plan: train.Plan, out: Path):
    fresh, _ = train.fresh_state(TASK, plan.seed)
    return storage.load_state(out / "state.safetensors", fresh)[0]


@pytest.mark.slow
def test_export_loads_in_transformers_with_equal_logits(tiny_tokenizer, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    params = init_params(TINY, 0)
    params = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(1), x.shape) * 0.1, params)
    export.export(params, TINY, tiny_tokenizer, tmp_path, dtype=jnp.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens_BT = np.random.default_rng(0).integers(0, TINY.vocab, (2, 40))
    with torch.no_grad():
        theirs = model(torch.tensor(tokens_BT)).logits.numpy()
    ours = np.asarray(packed_logits(TINY, params, tokens_BT, np.ones_like(tokens_BT)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())
    back = export.import_params(tmp_path, TINY)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def _shipped(folder: Path) -> tuple[ModelConfig, dict]:
    config = SIZES["draft" if folder == DRAFT else "main"]
    stored = json.loads((folder / "config.json").read_text())
    assert stored == export.hf_config(config)
    assert export.read_config(folder) == config
    return config, export.import_params(folder, config)


@needs_weights
@pytest.mark.slow
def test_shipped_model_keeps_its_promises():
    """A quick look at every skill on the card; the full table with larger counts is in the model card."""
    from tokenizers import Tokenizer

    config, params = _shipped(SHIPPED)
    shipped_tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    card = (SHIPPED / "README.md").read_text()
    promised = [skill for skill in skills.CLOSED if f"| {skill} |" in card]
    assert len(promised) >= 11
    chats = [chat for skill in promised for chat in held_out(skill, 10)]
    accuracy, misses = judge(config, params, shipped_tokenizer, chats)
    assert accuracy >= FLOOR, misses[:3]
    assert config.context >= 2048


@needs_weights
def test_shipped_files_are_small_and_share_a_tokenizer():
    files = [*SHIPPED.iterdir(), *DRAFT.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 20_000_000
    a, b = ((folder / "tokenizer.json").read_bytes() for folder in (SHIPPED, DRAFT))
    assert a == b


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("folder", [SHIPPED, DRAFT], ids=lambda folder: folder.name)
def test_transformers_says_the_same_greedily(folder):
    """Float32 torch and our decoder pick the same tokens for one prompt of each skill."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from checkpoints.recipe.decode import complete

    config, params = _shipped(folder)
    hf = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [prompt_and_answer(held_out(skill, 1)[0])[0] for skill in skills.SKILLS]
    ours = complete(config, params, hf.backend_tokenizer, prompts, new=24)
    for prompt, said in zip(prompts, ours, strict=True):
        inputs = hf(prompt, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        theirs = hf.decode(ids[0, inputs.input_ids.shape[1] :])
        assert theirs.split("<|im_end|>")[0].split("<|endoftext|>")[0] == said


def test_prompts_are_split_as_in_training(tiny_tokenizer):
    """Encoding a prompt alone gives the tokens it has when the answer follows."""
    for chat in some_chats(200):
        if chat.turns:
            prompt, _ = prompt_and_answer(chat)
            alone = tiny_tokenizer.encode(prompt).ids
            assert tiny_tokenizer.encode(rendered(chat)).ids[: len(alone)] == alone


@pytest.mark.slow
def test_a_world_that_tells_everything_still_has_questions():
    """Long passages may leave nothing untold to ask about; thousands are drawn in a training run."""
    for seed in range(400):
        chat = skills.draw_long(np.random.default_rng(seed), "train", 150)
        assert chat.turns
