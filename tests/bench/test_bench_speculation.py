"""The arithmetic of bench.speculation, on runs made by hand, and its texts."""

from __future__ import annotations

import itertools

import pytest

from bench import acceptance, speculation
from bench.speculation import Ran, account
from jserve import build
from jserve.config import EngineConfig


def ran(seconds: float, rows: int, tokens: int, step_s: float, **more: float) -> Ran:
    counters = {
        "decode_rows_total": rows,
        "decode_tokens_total": tokens,
        "decode_steps_total": rows,
        "decode_step_seconds_total": step_s * rows,
        "decode_step_gap_seconds_total": more.pop("host_s", 0.0),
        "spec_decode_num_draft_tokens_total{proposer=ngram,lane=standard}": more.pop("drafted", 0),
        "spec_decode_num_accepted_tokens_total{proposer=ngram,lane=standard}": more.pop("stood", 0),
    }
    ended = {"0": seconds, "1": more.pop("last", seconds)}
    first = {name: more.get("ttft", 0.1) for name in ended}
    tokens_of = {"0": [1] * tokens}
    return Ran(seconds=seconds, tokens=tokens_of, first=first, ended=ended, counters=counters)


def test_predicted_is_tokens_per_step_over_what_a_step_costs_more():
    plain = ran(1.0, rows=100, tokens=100, step_s=0.010)
    more = {"host_s": 0.12, "drafted": 120, "stood": 60, "last": 2.0, "ttft": 0.4}
    spec = ran(0.5, rows=40, tokens=100, step_s=0.012, **more)
    found = account([(plain, spec)] * 3)
    assert found["acceptance"] == 0.5
    assert found["tokens_per_step"] == 2.5
    assert found["predicted"] == pytest.approx(2.5 * 0.010 / (0.012 + 0.12 / 40))
    assert found["speedup"] == 2.0
    assert found["slowest_request"] == 0.5
    assert (found["slowest_tokens"], found["slowest_first"]) == (0, 0.25)
    assert found["tok_s"] == 200.0
    assert account([(plain, plain)])["acceptance"] is None


def test_acceptance_alone_is_also_told_by_position():
    made = ran(1.0, rows=40, tokens=100, step_s=0.01, drafted=120, stood=60)
    for place, (n, accepted) in enumerate([(40, 30), (40, 20), (40, 10)]):
        for lane in ("standard", "bulk"):
            labels = f"{{proposer=device,lane={lane},position={place}}}"
            made.counters[f"spec_decode_num_draft_tokens_per_pos_total{labels}"] = n
            made.counters[f"spec_decode_num_accepted_tokens_per_pos_total{labels}"] = accepted
    found = acceptance.figures(made)
    assert found["acceptance"] == 0.5
    assert found["by_position"] == [0.75, 0.5, 0.25]
    assert found["tokens_per_step"] == 2.5


def test_decoding_is_the_time_after_the_first_token():
    plain = ran(1.0, rows=100, tokens=100, step_s=0.010, ttft=0.4)
    spec = ran(0.6, rows=50, tokens=100, step_s=0.010, ttft=0.3)
    found = account([(plain, spec)])
    assert found["speedup"] == pytest.approx(1.0 / 0.6)
    assert found["decode"] == pytest.approx(2.0)


def test_outputs_that_differ_end_the_run():
    class Says:
        def __init__(self, token: int, exact: bool = True) -> None:
            self.token, self.exact = token, exact

        def run(self, asked, concurrency, most):
            made = ran(1.0, rows=1, tokens=1, step_s=1.0)
            made.tokens, made.ended, made.first = {"0": [self.token]}, {"0": 1.0}, {"0": 0.5}
            return made

    with pytest.raises(SystemExit, match="changed an output"):
        speculation.paired(Says(1), Says(2), [((1,),)], 1, 1, 4)  # type: ignore[arg-type]
    same = speculation.paired(Says(1), Says(1), [((1,),)], 1, 1, 4)  # type: ignore[arg-type]
    assert same["differ"] == 0.0
    rounded = Says(1, exact=False)
    found = speculation.paired(rounded, Says(2), [((1,),)], 1, 1, 4)  # type: ignore[arg-type]
    assert found["differ"] == 1.0


@pytest.mark.parametrize("text", speculation.TEXTS)
def test_texts_are_the_same_for_a_seed(text):
    tokenizer = build.text_side(EngineConfig()).tokenizer
    first = speculation.conversations(text, 3, tokenizer)
    assert first == speculation.conversations(text, 3, tokenizer)
    assert first != speculation.conversations(text, 3, tokenizer, seed=1)
    assert all(4 < len(ids) <= 700 for talk in first for ids in talk)
    assert (max(map(len, first)) > 1) == (text == "dialogue")


def test_a_dialogue_is_asked_turn_by_turn_behind_what_was_said():
    tokenizer = build.text_side(EngineConfig()).tokenizer
    for talk in speculation.conversations("dialogue", 8, tokenizer):
        told = [tokenizer.decode(ids).rpartition("assistant\n")[0] for ids in talk]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(told))


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"method": "ngram", "speedup": 1.5}
    rows = [row | {"kind": "k", "text": "copy", "k": k} for k in (0, 3, "auto")]
    rows += [row | {"kind": "auto", "concurrency": n} for n in (1, 4)]
    speculation.draw({"rows": rows}, tmp_path / "a.svg")
    assert "drafts per step" in (tmp_path / "a.svg").read_text()


def test_acceptance_by_position_adds_up_runs_that_went_deeper_than_others():
    def tried(*at: int) -> dict[str, float]:
        name = (
            "spec_decode_num_{}_tokens_per_pos_total{{proposer=device,lane=standard,position={}}}"
        )
        counts = {name.format("draft", j): n for j, n in enumerate(at)}
        return counts | {name.format("accepted", j): n / 2 for j, n in enumerate(at)}

    runs = [ran(1.0, rows=1, tokens=1, step_s=1.0) for _ in range(2)]
    for run, at in zip(runs, ((4,), (4, 2, 2)), strict=True):
        run.counters |= tried(*at)
    found = account([(run, run) for run in runs])
    assert found["acceptance_by_position"] == [0.5, 0.5, 0.5]
