"""Proposers from options, and the synthetic one's rate."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jserve.config import DeviceOptions, EngineConfig, SpeculativeOptions
from jserve.errors import ConfigError
from jserve.sampling import SamplingParams
from jserve.speculation.host.methods import DEVICE, MAX_CORPUS_TOKENS, check, proposer_of
from jserve.speculation.host.synthetic import Synthetic
from jserve.types import Request, Sequence
from tests.sched.sched_drive import Drive, limits, request

V = 11


def sequence(tokens: list[int], seed: int = 0) -> Sequence:
    asked = Request(id="a", prompt_ids=tuple(tokens), params=SamplingParams(), eos_ids=(3,))
    return Sequence(
        request=asked, index=0, seed=seed, tokens=list(tokens), n_prompt=len(tokens), max_len=999
    )


@pytest.mark.parametrize("method", DEVICE)
def test_methods_of_the_device_need_a_model_and_leave_the_host_without_a_proposer(method):
    with pytest.raises(ConfigError) as error:
        check(SpeculativeOptions(method=method))
    assert error.value.field == "speculative.model"
    options = SpeculativeOptions(method=method, model="x")
    check(options)
    assert proposer_of(options, V) is None


def test_every_option_is_read_by_a_method_or_refused():
    for f in dataclasses.fields(SpeculativeOptions):
        if f.name in ("method", "num_tokens", "min_speed"):
            continue
        other = {int: 3, str: "x", float: 0.5}[type(f.default)]
        with pytest.raises(ConfigError, match=f.name):
            check(SpeculativeOptions(**{"method": "off", f.name: other}))
    for method in ("off", "ngram", "suffix", "synthetic"):
        check(SpeculativeOptions(method=method))


def test_a_drafter_is_split_as_the_model_is_or_not_at_all():
    """vLLM's name is understood; what is neither 1 nor the model's own is refused before anything is
    loaded."""
    for name in ("tensor_parallel_size", "draft_tensor_parallel_size"):
        for wished in (0, 1, 4):
            given = {"method": "eagle3", "model": "x", name: wished}
            options = EngineConfig.of(speculative=given).speculative
            assert options.tensor_parallel_size == wished
            check(options, 4)
    assert EngineConfig.of(**{"speculative.tensor_parallel_size": "2"}).device == DeviceOptions()
    for wished, tp in ((2, 4), (4, 1), (8, 4)):
        options = SpeculativeOptions(method="draft", model="x", tensor_parallel_size=wished)
        with pytest.raises(ConfigError, match=rf"is {wished}, but .* its {tp} devices") as caught:
            check(options, tp)
        assert caught.value.field == "speculative.tensor_parallel_size"


def test_lookups_propose_once_they_have_read_everything():
    for method in ("ngram", "suffix"):
        made = proposer_of(SpeculativeOptions(method=method), V)
        seq = sequence([1, 2, 3, 4, 1, 2])
        assert made.propose(seq, 3) == ()
        assert made.read(seq, 4) == 4
        assert made.propose(seq, 3) == ()
        assert made.read(seq, 99) == 2
        assert made.propose(seq, 2) == [3, 4]
        seq.tokens += [7, 8]
        assert made.propose(seq, 2) == (), "it has not seen the last tokens"
        made.forget(seq)
        assert len(made) == 0


def test_a_corpus_is_copied_from_where_the_text_itself_has_nothing():
    options = SpeculativeOptions(method="suffix")
    made = proposer_of(options, V, [5, 6, 7, 8, 9])
    seq = sequence([1, 5, 6])
    made.read(seq, 99)
    assert made.propose(seq, 3) == [7, 8, 9]
    own = sequence([1, 5, 6, 2, 1, 5, 6])
    made.read(own, 99)
    assert made.propose(own, 1) == [2], "its own longer match goes first"
    with pytest.raises(ConfigError, match="corpus"):
        proposer_of(options, V, range(MAX_CORPUS_TOKENS + 1))


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_synthetic_drafts_stand_at_their_rate(rate):
    """Through the fake device, whose draws obey masks as a real one's do."""
    lim = limits(max_drafts=3, max_model_len=900, n_pages=900)
    drive = Drive(lim, proposer=Synthetic(rate, V), depth=1, checks=False)
    drive._check_tokens = lambda *args: None  # not the model's tokens, by design
    for i in range(3):
        drive.add(request(f"r{i}", [1, 2], max_tokens=800, seed=i, temperature=1.0))
    drive.scheduler.speculation.choose = _always(drive.scheduler.speculation)
    told = drive.run()
    counters = drive.scheduler.counters()
    stood = [
        counters.get(
            f"spec_decode_num_{kind}_tokens_per_pos_total{{proposer=synthetic,lane=standard,position=0}}",
            0,
        )
        for kind in ("accepted", "draft")
    ]
    assert stood[0] / stood[1] == pytest.approx(rate, abs=0.06)
    assert all(len(tokens) == 800 for tokens in told.values()), "nothing ended early"


def _always(drafting):
    """All drafts of every row."""

    def choose(ready, load):
        return [drafting._found(seq) for seq in ready]

    return choose


def test_synthetic_masks_allow_what_stands_and_forbid_what_falls():
    made = Synthetic(0.5, 40)
    seq = sequence([1, 2], seed=9)
    seen = set()
    for _ in range(50):
        ids = made.propose(seq, 4)
        assert not set(ids) & {3}
        words = made.mask(seq, ids)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :40]
        n = next((j for j in range(4) if not bits[j, ids[j]]), 4)
        seen.add(n)
        assert all(bits[j].sum() == 1 for j in range(n))
        assert n == 4 or bits[n].sum() == 39
        assert (bits[n + 1 :] == 1).all()
    assert seen == {0, 1, 2, 3, 4}
