"""Streams against one full decode: random ids, byte garbage, every chunking, overlapping stop
strings."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings, strategies as st

from jserve.sampling import SamplingParams
from jserve.text.stream import StopFinder, TextStream
from jserve.text.tokenizer import TextTokenizer
from tests.text.conftest import byte_level_bpe, sentencepiece_like

BYTE = TextTokenizer(byte_level_bpe())
PIECE = TextTokenizer(sentencepiece_like())
WORDS = ["the dog", "naïve café", "你好", "👩‍👩‍👧", "🎉", "###", "\n\n", "<think>", "\ufffd", " "]


def ids_of(tokenizer):
    """Ids of words mixed with ids drawn at random, so that characters are cut anywhere."""
    word = st.sampled_from(WORDS).map(lambda w: tokenizer.encode(w, add_special_tokens=False))
    noise = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=4)
    return st.lists(word | noise, max_size=12).map(lambda runs: [i for run in runs for i in run])


def chunks(draw, ids):
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=6)) if ids else []
    edges = [0, *sorted(cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


def run(stream, parts):
    """Texts of all deltas, the flush included."""
    return [*(stream.push(part).text for part in parts), stream.flush().text]


def cut_at_stop(text, stops, include):
    """Reference: the text up to the first character at which a stop string is complete."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_stream_is_the_full_decode(data, skip):
    ids = data.draw(ids_of(BYTE))
    texts = run(TextStream(BYTE, skip_special_tokens=skip), chunks(data.draw, ids))
    assert "".join(texts) == BYTE.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300)
@given(data=st.data())
def test_no_delta_shows_half_a_character(data):
    text = data.draw(st.text(st.sampled_from("ab é你👩🎉\u200d"), max_size=12))
    for tokenizer in (BYTE, PIECE):
        ids = tokenizer.encode(text, add_special_tokens=False)
        texts = run(TextStream(tokenizer), chunks(data.draw, ids))
        assert not any("\ufffd" in t for t in texts)
        assert "".join(texts) == tokenizer.decode(ids)


@settings(max_examples=300)
@given(
    data=st.data(),
    stops=st.lists(st.text("ab#\n🎉é", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_stop_strings_cut_the_full_decode(data, stops, include):
    text = data.draw(st.text(st.sampled_from("ab#\n🎉é"), max_size=30))
    ids = BYTE.encode(text, add_special_tokens=False)
    stream = TextStream(BYTE, stop=stops, include_stop=include)
    texts = run(stream, chunks(data.draw, ids))
    expected, stop = cut_at_stop(text, stops, include)
    assert ("".join(texts), stream.stopped) == (expected, stop)


@settings(max_examples=200)
@given(data=st.data(), stops=st.lists(st.sampled_from(["\ufffd", "\ufffd\ufffd", "t", "he", "d"])))
def test_stop_strings_in_byte_garbage(data, stops):
    ids = data.draw(ids_of(BYTE))
    texts = run(TextStream(BYTE, stop=stops), chunks(data.draw, ids))
    assert "".join(texts) == cut_at_stop(BYTE.decode(ids), stops, False)[0]


@settings(max_examples=200)
@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_text_is_held_back_only_as_a_proper_prefix_of_a_stop(text, stops):
    finder, shown = StopFinder(tuple(stops), False), ""
    for at, char in enumerate(text, start=1):
        shown += finder.feed(char)
        if finder.found:
            break
        held = text[len(shown) : at]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)
        longer = text[:at][-max(map(len, stops)) :]
        tails = [longer[k:] for k in range(len(longer))]
        longest = next((t for t in tails if any(s.startswith(t) for s in stops)), "")
        assert held == longest


@settings(max_examples=200)
@given(data=st.data())
def test_usage_counts_tokens_up_to_the_one_that_completes_the_stop(data):
    text = data.draw(st.text("ab#🎉", max_size=30))
    stop = data.draw(st.text("ab#🎉", min_size=1, max_size=3))
    ids = BYTE.encode(text, add_special_tokens=False)
    stream = TextStream(BYTE, stop=[stop])
    deltas = [stream.push(part) for part in chunks(data.draw, ids)]
    whole = [BYTE.decode(ids[:n]) for n in range(len(ids) + 1)]
    needed = next((n for n, t in enumerate(whole) if stop in t), len(ids))
    assert stream.n_tokens == sum(d.n_tokens for d in deltas) == needed


@settings(max_examples=200)
@given(data=st.data())
def test_sentencepiece_stream_is_the_full_decode_of_whole_characters(data):
    words = st.sampled_from(["the a", " b", "你好", "é🎉", ".", "  ", "<|end|>"])
    encoded = words.map(lambda w: PIECE.encode(w, add_special_tokens=False))
    ids = [i for run in data.draw(st.lists(encoded, max_size=10)) for i in run]
    texts = run(TextStream(PIECE), chunks(data.draw, ids))
    assert "".join(texts) == PIECE.decode(ids)


@settings(max_examples=300)
@given(data=st.data())
def test_sentencepiece_garbage_loses_and_invents_nothing(data):
    """HF shows a whole run of fallback bytes as U+FFFD when any of it is broken, which a stream
    cannot take back once a character was shown: only the text around the bytes must agree."""
    bytes_of_characters = ["C3", "A9", "E2", "82", "AC", "F0", "9F", "8E", "89", "FF"]
    high = st.sampled_from(bytes_of_characters).map(lambda b: PIECE.token_id(f"<0x{b}>"))
    plain = st.integers(
        PIECE.token_id("a"), PIECE.token_id("the" if PIECE.token_id("the") else "he")
    )
    ids = data.draw(st.lists(high | plain, max_size=20))
    got = "".join(run(TextStream(PIECE), chunks(data.draw, ids)))
    assert visible(got) == visible(PIECE.decode(ids))


def test_bytes_that_break_a_character_already_shown_do_not_end_the_stream():
    """DecodeStream raises here: with 0xFF the run is no UTF-8 any more, but its "é" was shown."""
    ids = [PIECE.token_id(t) for t in ("a", "<0xC3>", "<0xA9>", "<0xFF>", "b", "\u2581the")]
    stream = TextStream(PIECE)
    assert [stream.push([i]).text for i in ids] == ["a", "", "é", "", "\ufffdb", " the"]


def visible(text):
    """ASCII only: what did not come from high fallback bytes."""
    return re.sub(r"[^ -~]", "", text)


@settings(max_examples=100)
@given(
    prompt=st.text("the a🎉é", max_size=12),
    cut=st.integers(0, 3),
    text=st.text("the a🎉", max_size=8),
)
def test_prompt_context_keeps_the_leading_space_and_is_never_shown(prompt, cut, text):
    prompt_ids = PIECE.encode("x " + prompt, add_special_tokens=False)
    ids = PIECE.encode(text, add_special_tokens=False)
    before = PIECE.decode(prompt_ids)
    texts = run(TextStream(PIECE, prompt_ids=prompt_ids), [ids])
    assert before + "".join(texts) == PIECE.decode(prompt_ids + ids)
    cut_ids = prompt_ids[: len(prompt_ids) - cut]
    texts = run(
        TextStream(PIECE, prompt_ids=cut_ids), [PIECE.encode("th", add_special_tokens=False)]
    )
    assert "".join(texts).strip() == "th"


def test_an_incomplete_character_is_flushed_as_a_replacement_only_at_the_end():
    ids = BYTE.encode("a🎉", add_special_tokens=False)
    euro = [i for i in range(BYTE.vocab_size) if BYTE.token_bytes(i) == b"\xe2"]
    stream = TextStream(BYTE)
    assert stream.push([*ids, euro[0]]).text == "a🎉"
    assert stream.flush().text == "\ufffd"
    assert stream.flush().text == ""


def test_sentencepiece_flush_shows_the_incomplete_tail():
    stream = TextStream(PIECE)
    assert stream.push([PIECE.token_id("a"), PIECE.token_id("<0xE2>")]).text == "a"
    assert stream.flush().text == "\ufffd"


def test_held_back_text_is_flushed():
    stream = TextStream(BYTE, stop=["dog!"])
    pushed = stream.push(BYTE.encode("the dog")).text
    assert (pushed, stream.flush().text) == ("the ", "dog")


def test_ids_after_the_stop_are_not_consumed():
    ids = BYTE.encode("a#b###c")
    stream = TextStream(BYTE, stop=["#b#"], include_stop=True)
    delta = stream.push(ids)
    assert (delta.text, delta.stop) == ("a#b#", "#b#") or delta.text == "a#b#"
    assert delta.n_tokens < len(ids)
    assert stream.push(ids).n_tokens == 0
    assert stream.flush().text == ""


def test_min_tokens_keeps_stop_strings_out_of_the_first_tokens():
    ids = [BYTE.token_id("a"), BYTE.token_id("b"), BYTE.token_id("a"), BYTE.token_id("b")]
    stream = TextStream(BYTE, stop=["b"], min_tokens=2)
    delta = stream.push(ids)
    assert (delta.text, delta.n_tokens) == ("aba", 4)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a<|end|>")])
def test_the_terminator_is_counted_and_hidden(include, text):
    stream = TextStream(BYTE, skip_special_tokens=False, include_stop=include)
    delta = stream.push([BYTE.token_id("a"), 1], terminator=True)
    assert (delta.text, delta.n_tokens) == (text, 2)


def test_of_takes_the_fields_of_sampling_params():
    params = SamplingParams(
        stop=("b",), include_stop_str_in_output=True, min_tokens=1, skip_special_tokens=False
    )
    stream = TextStream.of(BYTE, params)
    ids = [BYTE.token_id("b"), 1, BYTE.token_id("b"), BYTE.token_id("a")]
    assert stream.push(ids).text == "b<|end|>b"
    assert stream.stopped == "b"
