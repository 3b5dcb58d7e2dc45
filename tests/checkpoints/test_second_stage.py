"""The second stage: runs that start from exported weights, and the skills they practise."""

import dataclasses
import itertools
import json
import re

import jax
import numpy as np
import pytest

from checkpoints.recipe import continued, export, packing, skills, storage, tokenizer, train
from checkpoints.recipe.chat import SEAM, Turn, prompt_and_answer, segments
from checkpoints.recipe.model import SIZES, init_params
from checkpoints.recipe.skills import everyday, scenes, structured
from checkpoints.recipe.skills.passage import NOT_SAID

TINY = SIZES["tiny"]
TASK = train.language_model(TINY)


@pytest.fixture(scope="module")
def tiny_tokenizer():
    return tokenizer.train_tokenizer(chats=300, vocab_size=TINY.vocab)


@pytest.fixture
def folder(tiny_tokenizer, tmp_path):
    """An exported model whose card names one stage."""
    export.export(init_params(TINY, 5), TINY, tiny_tokenizer, tmp_path / "first")
    card = "| context | 8 |\n| training | 10 tokens, 2 steps |\n"
    (tmp_path / "first" / "README.md").write_text(card)
    return tmp_path / "first"


def stored(out):
    fresh, _ = train.fresh_state(TASK, 1)
    return storage.load_state(out / "state.safetensors", fresh)


def plan(steps, **options):
    sizes = {"tokens": 1024, "length": 256, "long_from": 0, "curriculum_steps": 0}
    return train.Plan(TINY, 0.0, steps, mixture="second", save_every=1, **sizes, **options)


@pytest.mark.slow
def test_a_second_stage_starts_from_the_exported_weights(folder, tiny_tokenizer, tmp_path):
    """With no rate at all nothing moves but what weight decay would: the weights stay as they are."""
    task = continued.task_from(folder, TASK, TINY)
    train.run(plan(1, rate=0.0), task, tiny_tokenizer, tmp_path / "run")
    (params, _), _ = stored(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, params, export.import_params(folder, TINY))


@pytest.mark.slow
def test_a_second_stage_resumes_bit_for_bit(folder, tiny_tokenizer, tmp_path):
    task = continued.task_from(folder, TASK, TINY)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.run(plan(3), task, tiny_tokenizer, whole)
    with pytest.raises(KeyboardInterrupt):
        train.run(plan(3), task, tiny_tokenizer, parts, stop_after(1))
    train.run(plan(3), task, tiny_tokenizer, parts)
    jax.tree.map(np.testing.assert_array_equal, stored(whole)[0], stored(parts)[0])


def stop_after(step):
    def report(clock, loss):
        if clock.step > step:
            raise KeyboardInterrupt

    return report


@pytest.mark.slow
def test_the_stages_before_are_in_the_state(folder, tiny_tokenizer, tmp_path):
    before = continued.stages(folder)
    assert before == ("10 tokens, 2 steps",)
    train.run(plan(1, before=before), TASK, tiny_tokenizer, tmp_path / "run")
    _, about = stored(tmp_path / "run")
    assert about["plan"]["before"] == ["10 tokens, 2 steps"]


def test_another_shape_or_tokenizer_is_refused(folder, tmp_path):
    other = dataclasses.replace(TINY, ffn=64)
    with pytest.raises(SystemExit, match="another shape"):
        continued.task_from(folder, TASK, other)
    kept = tmp_path / "work" / "tokenizer.json"
    continued.keep_tokenizer(folder, folder, kept)
    assert kept.read_bytes() == (folder / "tokenizer.json").read_bytes()
    kept.write_text("{}")
    with pytest.raises(SystemExit, match="tokenizer"):
        continued.keep_tokenizer(folder, folder, kept)


def test_heads_take_the_tokenizer_of_their_target(folder, tmp_path):
    heads, kept = tmp_path / "heads", tmp_path / "work" / "tokenizer.json"
    heads.mkdir()
    continued.keep_tokenizer(heads, folder, kept)
    assert kept.read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_the_rate_is_a_share_of_the_full_rate(folder, tiny_tokenizer, tmp_path):
    moved = []
    for rate in (0.5, 1.0):
        task, out = continued.task_from(folder, TASK, TINY), tmp_path / str(rate)
        train.run(plan(1, rate=rate), task, tiny_tokenizer, out)
        start = export.import_params(folder, TINY)["layer_0"]["mlp"]["up"]["kernel"]
        (params, _), _ = stored(out)
        moved.append(np.abs(params["layer_0"]["mlp"]["up"]["kernel"] - start).sum())
    assert moved[0] == pytest.approx(moved[1] / 2, rel=1e-2)


def drawn(make, count=300, split="train"):
    rng = np.random.default_rng(4)
    return [make(rng, split) for _ in range(count)]


def test_the_second_mixture_practises_every_skill():
    assert set(skills.SECOND) == set(skills.SKILLS)
    assert sum(skills.SECOND.values()) == pytest.approx(1.0)
    seen = {chat.skill for chat in drawn(lambda r, s: skills.draw(r, s, mixture="second"), 600)}
    assert {"everyday", "owners", "json_request", "json_forced", "passage", "units"} <= seen


def test_everyday_answers_follow_from_their_sentences():
    """Every name, thing and number of an answer was told; the word "not" answers nothing else."""
    small = {
        "yes",
        "no",
        "there",
        "are",
        "is",
        "was",
        "has",
        "have",
        "in",
        "at",
        "the",
        "a",
        "an",
        "of",
        "to",
        "not",
        "he",
        "s",
        "years",
        "old",
    }
    for chat in drawn(everyday.generate, 600):
        told = words(chat.turns[0].text)
        for turn in chat.turns[1::2]:
            if turn.text != NOT_SAID and not turn.text.startswith("There are"):
                assert words(turn.text) <= told | small | forms(told), (chat.turns, turn)


def words(text):
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def forms(told):
    """What an answer may say in another form: where somebody is after going there."""
    return {"in"} if told else set()


def test_an_everyday_question_has_one_answer():
    """Two scenes told together share no name, so equal questions have equal answers."""
    rng = np.random.default_rng(2)
    for _ in range(500):
        answers = {}
        for asked, said in everyday.scene(rng, "train").asks:
            assert answers.setdefault(asked, said) == said, asked
            assert asked.endswith("?")
            assert said.endswith(".")


@pytest.mark.parametrize("make", scenes.SCENES)
def test_untold_questions_are_about_something_else(make):
    rng = np.random.default_rng(3)
    n_untold = 0
    for _ in range(50):
        scene = make(scenes.Cast(rng, "train"))
        told = {asked for asked, _ in scene.asks}
        n_untold += len(scene.untold)
        assert not told & set(scene.untold)
    assert n_untold


def test_json_requests_are_answered_with_their_own_values():
    for chat in drawn(structured.generate):
        asked, value = chat.turns[-2].text, json.loads(chat.turns[-1].text)
        for key, item in value.items():
            assert key in asked
            if isinstance(item, str | int | float) and not isinstance(item, bool):
                assert str(item) in asked
            for part in item if isinstance(item, list) else ():
                assert part in asked


def test_forced_json_is_json_in_the_style_of_the_grammars():
    """As ``json.dumps`` writes it, or without spaces: nothing else passes an engine's grammar."""
    for chat in drawn(structured.generate_forced):
        text = chat.turns[-1].text
        value = json.loads(text)
        assert text in (structured.write(value), structured.write(value, "compact"))


def test_forced_json_has_no_loss_where_it_begins_and_full_loss_where_it_ends(tiny_tokenizer):
    for chat in drawn(structured.generate_forced, 50):
        *_, (end, weight), _ = segments(chat)
        assert (end, weight) == ("<|im_end|>", 1.0)
        pieces = [piece for piece in chat.turns[-1].pieces if piece[0]]
        assert pieces[0][0].startswith("{")
        assert pieces[0][1] == 0.0
        assert "".join(text for text, _ in pieces) == chat.turns[-1].text
        begun = 1 if pieces[0][0] == '{"' else 2
        assert all(
            weight == 1.0 for text, weight in pieces[begun:] if text in ('"', "]", "}", ", ")
        )
        prompt, answer = prompt_and_answer(chat)
        assert prompt.endswith(("assistant\n", "</think>\n\n"))
        assert answer == chat.turns[-1].text


def test_json_may_end_after_any_key():
    """A grammar decides how many keys there are, so no count may be certain to be the last."""
    counts = [len(json.loads(chat.turns[-1].text)) for chat in drawn(structured.generate_forced)]
    for count in (1, 2, 3):
        longer = sum(n >= count for n in counts)
        assert 0.15 < counts.count(count) / longer < 0.6


def test_a_seam_parts_tokens_but_not_text(tiny_tokenizer):
    chat = skills.Chat(
        "x", (Turn("user", "hi"), Turn("assistant", "name", pieces=(("name", 1.0),)))
    )
    (whole, _), (parted, weights) = packing.encode(tiny_tokenizer, [chat, with_seam(chat)])
    texts = [tiny_tokenizer.decode(ids, skip_special_tokens=False) for ids in (whole, parted)]
    assert texts[0] == texts[1]
    assert len(parted) > len(whole)
    assert len(parted) == len(weights)
    assert weights.sum() > 0


def with_seam(chat):
    turn = dataclasses.replace(chat.turns[-1], pieces=(("n", 1.0), SEAM, ("ame", 1.0)))
    return dataclasses.replace(chat, turns=(*chat.turns[:-1], turn))


def test_the_first_mixture_draws_what_it_always_drew():
    """Stage one must stay the run that made the weights: its text depends on its seed alone."""
    rng = np.random.default_rng([1, 0])
    chats = [skills.draw(rng, "train") for _ in range(400)]
    assert not {"everyday", "owners", "json_request", "json_forced"} & {
        chat.skill for chat in chats
    }
    text = "".join(text for chat in chats[:40] for text, _ in segments(chat))
    assert skills.lx.zlib.crc32(text.encode()) == FIRST_TEXT


FIRST_TEXT = 4174337322


def test_all_pairs_of_scenes_can_be_told_together():
    rng = np.random.default_rng(6)
    for one, other in itertools.product([*dict.fromkeys(scenes.SCENES)] * 10, repeat=2):
        cast = scenes.Cast(rng, "train")
        assert one(cast).sentences
        assert other(cast).sentences


def test_owners_differ_in_the_colour_of_one_thing():
    """Each asked "who" has one owner in the sentences, and is answered with that owner."""
    for chat in drawn(everyday.generate_owners):
        asked = chat.turns[0].text.lower()
        for question, answer in zip(chat.turns[::2], chat.turns[1::2], strict=True):
            found = re.search(r"who .*?(?:the|an?) (\w+ \w+)\?", question.text.lower())
            if found and answer.text != NOT_SAID:
                owner = re.search(rf"((?:the )?\w+) [\w ]*?(?:the|an?) {found[1]}\.", asked)
                assert owner, (asked, question)
                assert answer.text.lower().startswith(owner[1]), (asked, answer)
