"""The distribution of tokens drawn with drafts, of every proposer and kind of sampling, against the
target's exact chances: 50,000 tokens each, judged given the two before them. And bugs planted in the step,
each of which this must see.

Acceptance here compares a draft with the target's own draw, so two of the bugs that rejection samplers have
look different: a residual that is not renormalised is a second draw where a draft fell, and drafts drawn
otherwise than the target's tokens change nothing, which a test says; what does is a target that filters
otherwise where there are drafts. ``tests/speculation/device/test_rejection_reference.py`` judges the textbook forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jserve.errors import BadRequest
from jserve.model import attn_blocks, draft_tree as tree, draws, step as step_module
from jserve.speculation.device import accepted_path, draft_passes, verify
from tests.speculation.device import host_drafts
from tests.speculation.device.chances import (
    CHAIN,
    SETTINGS,
    TREE,
    Dice,
    Kind,
    Setting,
    chances,
    device_kind,
    p_value,
)

N, P_MIN = 50_000, 1e-6
DRAFTERS = ("draft", "eagle3", "medusa")
DEVICE = [(name, parents) for name in DRAFTERS for parents in (CHAIN, TREE)]
DEVICE += [("lookup", CHAIN)]
HOST = ("ngram", "suffix", "corpus", "grammar", "synthetic")
ALONE = {"synthetic": ("bias", "allowed", "mask"), "grammar": ("mask",)}
"""Settings that a proposer refuses, or has a mask of its own in place of."""
NAMES = {CHAIN: "chain", TREE: "tree"}


@lru_cache(maxsize=1)
def dice(name: str, parents: tree.TreeShape = CHAIN) -> Dice:
    """Of a drafter on the device, or of the host ("host"); one at a time, in the order of the cases."""
    return Dice(Kind() if name == "host" else device_kind(name, parents))


def cases(kinds: list[tuple[Any, ...]]) -> list[Any]:
    return [
        pytest.param(
            *kind, setting,
            id="-".join([NAMES.get(p, p) for p in kind] + [setting]),
        )
        for kind in kinds
        for setting in SETTINGS
        if setting not in ALONE.get(kind[0], ())
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parents", "setting"), cases(DEVICE))
def test_drafts_of_the_device_leave_the_targets_chances(name, parents, setting):
    how = SETTINGS[setting]
    drawn = dice(name, parents).throw(how, N)
    assert drawn.n >= N
    assert drawn.n_stood > N / 20, "hardly a draft stood: nothing was tested"
    assert p_value(drawn, chances(how)) > P_MIN


@pytest.mark.slow
@pytest.mark.parametrize(("name", "setting"), cases([(name,) for name in HOST]))
def test_drafts_of_the_host_leave_the_targets_chances(name, setting):
    how = SETTINGS[setting]
    drawn = dice("host").throw(how, N, lambda: host_drafts.host(name))
    assert drawn.n >= N
    assert drawn.n_stood > N / 20, "hardly a draft stood: nothing was tested"
    assert p_value(drawn, host_drafts.expected(name, how)) > P_MIN


def test_synthetic_acceptance_refuses_what_it_would_overrule():
    for setting in ("bias", "allowed"):
        proposer = host_drafts.host("synthetic").proposer
        request = host_drafts.REQUEST
        asked = type(request)(id="s", prompt_ids=(0,), params=SETTINGS[setting].params)
        with pytest.raises(BadRequest, match="synthetic"):
            proposer.check(asked)


# --- planted bugs


def accept_always(token, drawn, count):
    return jnp.maximum(count, 1) + 0 * verify.accept(token, drawn, count)


def _of_drafts(real: Callable, changed: Callable) -> Callable:
    """``by_row`` with the tokens that go out changed: changed(view, drafts_DJ, drawn_DJ) -> drawn_DJ."""

    def by_row(view, x_E, fill):
        out = real(view, x_E, fill)
        if x_E.dtype != jnp.int32 or x_E.ndim > 1 or view.J == 1:
            return out
        D, J = view.D, view.J
        return out.at[:D].set(changed(view, view.tok_T[: D * J].reshape(D, J), out[:D]))

    return by_row


def _drafts_instead(view, token_DJ, drawn_DJ):
    return drawn_DJ.at[:, :-1].set(token_DJ[:, 1:])


def _at_the_end(view, token_DJ, drawn_DJ, instead_DJ, most: int):
    """``instead_DJ`` where the row ends, if it ends before place ``most``."""
    n_ok_D = verify.accept(token_DJ, drawn_DJ, view.count_R[: view.D])
    here_DJ = (jnp.arange(view.J) == n_ok_D[:, None] - 1) & (n_ok_D[:, None] <= most)
    return jnp.where(here_DJ, instead_DJ, drawn_DJ)


def _bonus_from_the_draft(view, token_DJ, drawn_DJ):
    """After the last draft that stands comes the next draft instead of the draw."""
    return _at_the_end(view, token_DJ, drawn_DJ, jnp.roll(token_DJ, -1, axis=1), view.J - 1)


class DrawnAnew:
    """A draft fell: the token in its place comes from the whole distribution, not from what is left of it
    once the drafts that stand are taken away (in a coupled scheme: from another draw)."""

    def __init__(self, real: Callable) -> None:
        self.real, self.other_E = real, None

    def sample(self, raw_EV, what, slots, flags):
        self.other_E = self.real(raw_EV, replace(what, pos_E=what.pos_E + 5000), slots, flags)[0]
        return self.real(raw_EV, what, slots, flags)

    def changed(self, view, token_DJ, drawn_DJ):
        other_DJ = self.other_E[: view.D * view.J].reshape(view.D, view.J)
        return _at_the_end(view, token_DJ, drawn_DJ, other_DJ, view.J - 1)


def _changed_draws(change: Callable) -> Callable:
    def draws_of(view):
        made = draws.draws_of(view)
        return replace(made, **change(made))

    return draws_of


def unfiltered(made):
    """Filters act on the first place of a row only."""
    at_draft = made.n_prefix_E > 0
    return {
        "top_k_E": jnp.where(at_draft, 0, made.top_k_E),
        "top_p_E": jnp.where(at_draft, 1.0, made.top_p_E),
    }


def unmasked(made):
    """The mask of the structure, too."""
    return {"mask_EW": jnp.where(made.n_prefix_E[:, None] > 0, -1, made.mask_EW)}


def uncounted(made):
    """Penalties do not know the drafts before them."""
    return {"prefix_EJ": jnp.full_like(made.prefix_EJ, -1)}


def one_key(made):
    return {"pos_E": made.pos_E - made.n_prefix_E}


def sees_all(mask):
    """A node sees all nodes before it, of other branches too."""
    J = len(mask.depth)
    sees = tuple(tuple(x <= j for x in range(J)) for j in range(J))
    return tree.DraftMask(sees, mask.depth)


def _attended(change: Callable) -> Callable:
    """``seen_in_tree`` of verified trees whose mask is changed on its way to attention."""

    def seen_in_tree(mask, *where):
        return tree.seen_in_tree(mask if mask.n_before else change(mask), *where)

    return seen_in_tree


WRONG_WALK = (0, 1, 1, 2, 2)
"""``TREE`` with its second branch taken for a child of the first."""
WRONG_VIEW = (0, 0, 1, 1, 2)
"""``TREE`` with a child of its second branch taken for one of the first."""


def plant(monkeypatch: Any, bug: str) -> None:
    set_ = monkeypatch.setattr
    by_row = step_module.by_row
    match bug:
        case "accept always":
            set_(step_module, "accept", accept_always)
            set_(step_module, "by_row", _of_drafts(by_row, _drafts_instead))
        case "bonus from the draft":
            set_(step_module, "by_row", _of_drafts(by_row, _bonus_from_the_draft))
        case "residual not renormalised":
            anew = DrawnAnew(step_module._SAMPLE)
            set_(step_module, "_SAMPLE", anew.sample)
            set_(step_module, "by_row", _of_drafts(by_row, anew.changed))
        case "filters forgotten":
            set_(step_module, "draws_of", _changed_draws(unfiltered))
        case "mask forgotten":
            set_(step_module, "draws_of", _changed_draws(unmasked))
        case "drafts not counted":
            set_(step_module, "draws_of", _changed_draws(uncounted))
        case "one key for all places":
            set_(step_module, "draws_of", _changed_draws(one_key))
        case "attention mask forgotten":
            set_(attn_blocks, "seen_in_tree", _attended(sees_all))
        case "branch with a wrong parent, accepted":
            wrong = tree.mask_of(WRONG_WALK)
            set_(accepted_path, "accept_tree", lambda *args: verify.accept_tree(*args[:3], wrong))
        case "branch with a wrong parent, attended":
            wrong = tree.mask_of(WRONG_VIEW)
            set_(
                attn_blocks,
                "seen_in_tree",
                _attended(lambda mask: wrong if len(mask.depth) == 6 else mask),
            )
        case "path not moved":
            set_(step_module, "straightened", lambda attn, view, kv, accepted_path: kv)
        case _:
            raise AssertionError(bug)


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """jax remembers a traced layer by its function and its arguments: without this a step would take the layer
    that was traced before the bug was planted, and later steps the one with it."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "parents", "setting"),
    [
        ("accept always", CHAIN, "plain"),
        ("bonus from the draft", CHAIN, "plain"),
        ("residual not renormalised", CHAIN, "plain"),
        ("filters forgotten", CHAIN, "top_k"),
        ("mask forgotten", CHAIN, "mask"),
        ("drafts not counted", CHAIN, "penalties"),
        ("one key for all places", CHAIN, "plain"),
        ("attention mask forgotten", TREE, "plain"),
        ("branch with a wrong parent, accepted", TREE, "plain"),
        ("branch with a wrong parent, attended", TREE, "plain"),
        ("path not moved", TREE, "plain"),
    ],
)
def test_a_planted_bug_changes_the_chances(monkeypatch, traced_anew, bug, parents, setting):
    plant(monkeypatch, bug)
    how = SETTINGS[setting]
    assert p_value(Dice(device_kind("draft", parents)).throw(how, N), chances(how)) < P_MIN


@pytest.mark.slow
def test_which_noise_a_drafter_adds_cannot_be_seen(monkeypatch):
    """With noise of its own its drafts are accepted less often and that is all: the tokens are the very same."""
    how: Setting = SETTINGS["plain"]
    right = Dice(device_kind("draft")).throw(how, 10_000)
    real = draft_passes.gumbel
    monkeypatch.setattr(draft_passes, "gumbel", lambda seed, pos, V: real(seed, pos + 5000, V))
    other = Dice(device_kind("draft")).throw(how, 10_000)
    assert other.n_stood / other.n < 0.8 * right.n_stood / right.n
    for a, b in zip(right.texts, other.texts, strict=True):
        n = min(len(a), len(b))
        np.testing.assert_array_equal(a[:n], b[:n])
