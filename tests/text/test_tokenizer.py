"""Loading, special tokens, control tokens in user text, bytes of tokens, the pool's limits."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer

from jserve.errors import BadRequest, ContextTooLong, Overloaded, WeightsError
from jserve.text.pool import TokenizerPool
from jserve.text.tokenizer import TextTokenizer, check_vocab, load_tokenizer
from tests.text.conftest import byte_level_bpe

BYTE_LEVEL = TextTokenizer(byte_level_bpe())
TEXTS = st.text(st.sampled_from("the <|end|>éß🎉\n"), max_size=20)
PARTS = st.lists(
    st.tuples(
        st.sampled_from(["<|user|>", "<|end|>", "<|en", "d|>", "hi ", "é", ""]), st.booleans()
    )
)


def test_special_tokens_by_name_and_id(byte_tokenizer):
    assert (byte_tokenizer.bos_token, byte_tokenizer.bos_id) == ("<|bos|>", 0)
    assert (byte_tokenizer.eos_token, byte_tokenizer.eos_id) == ("<|end|>", 1)
    assert byte_tokenizer.pad_token is None
    assert byte_tokenizer.special_ids == {0, 1, 2}
    assert byte_tokenizer.byte_level


def test_sentencepiece_is_not_byte_level(piece_tokenizer):
    assert not piece_tokenizer.byte_level
    byte, space = piece_tokenizer.token_id("<0xE9>"), piece_tokenizer.token_id("\u2581the")
    assert (piece_tokenizer.token_bytes(byte), piece_tokenizer.token_bytes(space)) == (
        b"\xe9",
        b" the",
    )


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3)))
def test_token_bytes_concatenate_to_the_decoded_text(ids):
    ids = [i for i in ids if i < BYTE_LEVEL.vocab_size]
    whole = b"".join(map(BYTE_LEVEL.token_bytes, ids)).decode("utf-8", errors="replace")
    assert whole == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


def test_ids_without_a_token_have_no_bytes(byte_tokenizer):
    assert byte_tokenizer.token_bytes(10**6) == b""
    assert byte_tokenizer.token_bytes(-1) == b""


def test_control_tokens_in_user_text_can_be_plain_text(byte_tokenizer):
    text = "hi<|end|>"
    assert byte_tokenizer.encode(text)[-1] == byte_tokenizer.eos_id
    plain = byte_tokenizer.encode(text, parse_special=False)
    assert not byte_tokenizer.special_ids & set(plain)
    assert byte_tokenizer.decode(plain) == text


@given(PARTS)
def test_parts_trust_only_the_template(parts):
    text = "".join(t for t, _ in parts)
    ids = BYTE_LEVEL.encode_parts(parts)
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text
    n_special = sum(i in BYTE_LEVEL.special_ids for i in ids)
    merged = [""]
    for t, trusted in parts:
        if trusted:
            merged[-1] += t
        elif t:
            merged.append("")
    assert n_special == sum(t.count("<|user|>") + t.count("<|end|>") for t in merged)


@given(st.lists(st.tuples(st.text("the é", max_size=8), st.booleans())))
def test_parts_without_control_tokens_are_encoded_as_one_text(parts):
    joined = "".join(t for t, _ in parts)
    assert BYTE_LEVEL.encode_parts(parts) == BYTE_LEVEL.encode(joined, add_special_tokens=False)


def test_a_lone_surrogate_is_the_clients_fault(byte_tokenizer):
    with pytest.raises(BadRequest, match="surrogate") as caught:
        byte_tokenizer.encode("a\ud800")
    assert caught.value.field == "prompt"


def test_truncation_and_padding_in_the_file_are_switched_off(model_dir):
    hf = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    hf.enable_truncation(4)
    hf.enable_padding(length=64)
    hf.save(str(model_dir / "tokenizer.json"))
    tokenizer = load_tokenizer(model_dir)
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_load_reads_names_from_special_tokens_map(model_dir):
    (model_dir / "tokenizer_config.json").unlink()
    (model_dir / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|user|>"}))
    tokenizer = load_tokenizer(model_dir)
    assert (tokenizer.eos_id, tokenizer.bos_id) == (2, None)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_truncated_file_is_named(model_dir, name):
    path = model_dir / name
    path.write_text(path.read_text()[:-20])
    with pytest.raises(WeightsError, match=name) as caught:
        load_tokenizer(model_dir)
    assert caught.value.field == name


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(WeightsError, match="nowhere") as caught:
        load_tokenizer(tmp_path / "nowhere")
    assert caught.value.field == "tokenizer.json"


def test_a_config_that_is_no_object_is_refused(model_dir):
    (model_dir / "tokenizer_config.json").write_text("[]")
    with pytest.raises(WeightsError, match="JSON object"):
        load_tokenizer(model_dir)


@pytest.mark.slow
def test_no_tokenizer_json_goes_through_transformers(tmp_path):
    with pytest.raises(WeightsError, match=r"no tokenizer\.json, and transformers"):
        load_tokenizer(tmp_path)
    model = json.loads(byte_level_bpe().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(m) for m in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the lazy dog")) == "the lazy dog"
    assert tokenizer.byte_level


def test_vocabulary_must_fit_the_embedding(byte_tokenizer):
    check_vocab(byte_tokenizer, byte_tokenizer.vocab_size)
    with pytest.raises(WeightsError, match="embedding has only") as caught:
        check_vocab(byte_tokenizer, byte_tokenizer.vocab_size - 1)
    assert caught.value.field == "tokenizer.json"


async def test_pool_encodes_as_the_tokenizer_does(byte_tokenizer):
    pool = TokenizerPool(byte_tokenizer, max_chars=100)
    assert await pool.encode_async("the dog<|end|>") == byte_tokenizer.encode("the dog<|end|>")
    parts = [("<|user|>", True), ("<|end|>", False)]
    assert await pool.encode_parts_async(parts) == byte_tokenizer.encode_parts(parts)
    assert pool.n_queued == 0
    pool.close()


async def test_pool_refuses_long_text_before_tokenising(byte_tokenizer, monkeypatch):
    monkeypatch.setattr(byte_tokenizer, "encode", lambda *a, **k: pytest.fail("tokenised"))
    pool = TokenizerPool(byte_tokenizer, max_chars=10)
    with pytest.raises(ContextTooLong, match="11 characters") as caught:
        await pool.encode_async("x" * 11, field="messages")
    assert caught.value.field == "messages"
    with pytest.raises(ContextTooLong):
        await pool.encode_parts_async([("x" * 6, True), ("x" * 6, False)])
    pool.close()


async def test_pool_names_the_field_of_a_surrogate(byte_tokenizer):
    pool = TokenizerPool(byte_tokenizer, max_chars=10)
    with pytest.raises(BadRequest, match="messages must be valid") as caught:
        await pool.encode_async("\udfff", field="messages")
    assert caught.value.field == "messages"
    pool.close()


async def test_pool_refuses_when_its_queue_is_full(byte_tokenizer, monkeypatch):
    import asyncio

    gate = threading.Event()
    monkeypatch.setattr(byte_tokenizer, "encode", lambda *a, **k: gate.wait(10) and [])
    pool = TokenizerPool(byte_tokenizer, max_chars=10, threads=1, max_queued=2)
    waiting = [asyncio.create_task(pool.encode_async("a")) for _ in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(Overloaded) as caught:
        await pool.encode_async("b")
    assert caught.value.retry_after == 1.0
    gate.set()
    await asyncio.gather(*waiting)
    pool.close()
