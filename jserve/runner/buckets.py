"""Lists the step shapes that are compiled, and chooses the one for a plan.

Few rungs, because each is a compiled program: decode rows 2, 8, 16, 32 and doubling; prefill tokens
64, 128 and doubling beside all decode rows, 32 and 128 beside few of them, and three quarters of
the largest, where padding costs most. No rung has fewer than two tokens, since XLA:CPU multiplies
one row many times slower than two.

Rows that verify drafts of the host are 4, 8 or 16 tokens wide (``policy.draft_count.widths``), in steps
without prefill 1, 4, 16, 64 ... of them, as far as there is arithmetic to spare: one row alone has the
most to gain, and is no single row to multiply; beside prefill only at full width, beside few rows or the
largest chunk. Any of these takes fewer rows and
narrower ones, so nothing is missing, only padded.

Where products and attention skip the rows that nobody uses (``skips_padding``: native kernels), fewer rungs do:
decode rows 2 and all, prefill tokens 64 beside few rows, 128 and doubling beside all rows, and one more that scores
prompts. Unless rows have drafts all of these take masks. Times of the steps in between are still measured one by one
(``Ladder.sizes``), because a program takes as long as its rows do.

Registered features are in the largest programs, and in so many of the plain ones that a step finds one of at most
``APART`` times the tokens of the next smaller: a row that asks alone pays for few rows beside it.

A drafter on the device is in some programs and not in others: those that draft verify as many drafts
as they leave, and beside prefill only the narrowest width has one. While the drafter is idle, steps
run in the very programs of an engine without one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jserve.model.draft_tree import TreeShape
from jserve.model.feature import StepFeature
from jserve.model.features import FEATURES, MASK, SCORE
from jserve.model.view import Bucket
from jserve.speculation.policy.draft_count import widths
from jserve.types import StepPlan

FEW_ROWS = 2
WITH_FEW = (32, 128)
"""Prefill rungs beside which idle decode rows cost enough to have a program without them."""
ONLY_FEW = 32
"""The prefill rung that is not worth a program beside all decode rows."""
SHORT, MIDDLE = 64, 128
"""The smallest prefill rungs beside few rows and beside all, where products and attention skip unused rows: a fifth of
their cost is left, in norms, activations and writes of KV."""
MOST_VERIFIED = 128
"""Tokens that decode rows have together in steps without prefill, but for the narrowest width: more of
them keep any device busy, so that guessing gains nothing."""
APART = 4
"""Tokens of a program with registered features over those of the next smaller one, at least: each is compiled a
second time."""
DRAFT_BESIDE_FEW, DRAFT_BESIDE_ALL = (32, 64, 128, 256), (64, 128, 256)
"""Prefill tokens of programs that draft: beside few rows, and beside all that may draft. The largest is
one more. A prompt that comes alone waits for its own padding, and pays for the drafter before it gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The bucket features that a plan needs."""

    D: int
    P: int
    F: int
    J: int = 1
    features: tuple[StepFeature, ...] = ()
    n_draft: int = 0
    chains: bool = False
    """Some row has drafts of the host, which are chains."""

    @classmethod
    def of(cls, plan: StepPlan, features: tuple[StepFeature, ...] = FEATURES) -> Needs:
        rows = plan.rows
        n_decode = count_decode(plan)
        counts = [row.count for row in rows]
        return cls(
            D=n_decode,
            P=sum(counts[n_decode:]),
            F=len(rows) - n_decode,
            J=max(counts[:n_decode], default=1),
            features=tuple(feature for feature in features if feature.needed(rows)),
            n_draft=plan.n_draft,
            chains=any([row.drafts and row.drafts[0] >= 0 for row in rows[:n_decode]]),
        )

    def fit(self, bucket: Bucket) -> bool:
        return (
            bucket.D >= self.D
            and bucket.P >= self.P
            and bucket.F >= self.F
            and bucket.J >= self.J
            and (not self.features or {*self.features} <= {*bucket.features})
            and bucket.n_draft >= self.n_draft
            and not (self.chains and bucket.tree)
        )


def count_decode(plan: StepPlan) -> int:
    """Rows read from slots; they come first."""
    return sum([row.from_slot for row in plan.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """All buckets of an engine, cheapest first."""

    buckets: tuple[Bucket, ...]
    between: tuple[Bucket, ...] = ()
    """Sizes without a program of their own whose steps are timed: those that a larger bucket takes in less time than
    when it is full, and, where all programs take masks, those of the buckets without."""

    @property
    def sizes(self) -> tuple[Bucket, ...]:
        """Steps whose times differ, cheapest first; each fits a bucket."""
        return tuple(sorted({*self.buckets, *self.between}, key=_cost))

    @property
    def plain(self) -> tuple[Bucket, ...]:
        """The buckets of steps of which no row asks for anything."""
        return tuple(_plain_of(self.buckets))

    @property
    def features(self) -> tuple[StepFeature, ...]:
        """All that a row may ask for, those included that no bucket has."""
        return tuple(sorted({*FEATURES, *(f for b in self.buckets for f in b.features)}))

    @classmethod
    def of(
        cls,
        *,
        max_decode_rows: int,
        max_prefill_tokens: int,
        max_prefill_rows: int,
        max_drafts: int = 0,
        scores: bool = True,
        masks: bool = False,
        masks_drafts: bool = False,
        device_drafts: int = 0,
        draft_rows: int = 0,
        tree: TreeShape = (),
        registered: tuple[StepFeature, ...] = (),
        skips_padding: bool = False,
    ) -> Ladder:
        """The rungs for these limits (those of ``RunnerLimits``). ``masks_drafts``: every verify
        program also takes masks, not only the widest. Programs that have ``registered`` features have
        all of them, whatever else they take. ``skips_padding``: products and attention skip unused rows; then all
        programs take masks, unless rows have drafts: on a CPU those that nobody asks for cost next to nothing, and a
        program takes seconds to compile.

        With a drafter that runs on the device the programs without it are those of an engine that
        does not speculate, and some that draft come on top: beside at most ``draft_rows`` decode rows (0:
        all), each leaving as many drafts as it verifies. With a ``tree`` one width is verified, the whole.
        """
        D, P, F = max(FEW_ROWS, max_decode_rows), max(2, max_prefill_tokens), max_prefill_rows
        J = 1 if device_drafts else 1 + max_drafts
        plain = _plain(D, P, F)
        found = _fewer(D, P, F) if skips_padding else {*plain}
        between = plain - found
        if J > 1:
            found |= _verifying(D, P, F, J)
        if scores:
            found.add(Bucket(D=D, P=P, F=F, J=J, features=(SCORE,)))
        if masks and skips_padding and J == 1 and not device_drafts:
            between, found = plain, {b.with_also(MASK) for b in found}
        elif masks:
            found |= {
                b.with_also(MASK)
                for b in found
                if _worth_a_mask(b, D, P, J) or (masks_drafts and b.J > 1)
            }
        if skips_padding and masks:
            found -= {b for b in found if b.features == (SCORE,)}
        if device_drafts:
            rows = min(D, max(FEW_ROWS, draft_rows or D))
            made = _drafting(rows, P, F, 1 + device_drafts, tree, masks=masks, scores=scores)
            found |= made
        if registered:
            most = {b for b in found if _takes_most(b, found)}
            sizes = {replace(b, features=()) for b in most}
            found |= {b.with_also(*registered) for b in most | (_thinned(found) - sizes)}
        return cls(buckets=tuple(sorted(found, key=_cost)), between=tuple(sorted(between)))

    def choose(self, needs: Needs) -> Bucket:
        """The cheapest bucket that takes ``needs``.

        Raises:
            ValueError: none does; the scheduler went past the runner's limits.
        """
        for bucket in self.buckets:
            if needs.fit(bucket):
                return bucket
        raise ValueError(f"no bucket takes {needs}")


def _cost(b: Bucket) -> tuple:
    """A step that drafts nothing takes no program that does while there is another. Masks that nobody asks for cost
    less than many tokens, which programs with registered features are few enough to choose between."""
    scores, masks, drafts = SCORE in b.features, MASK in b.features, b.n_draft > 0
    if not {*b.features} <= {*FEATURES}:
        return (True, scores, drafts, b.T, b.R, masks, b)
    return (False, scores, masks, drafts, b.T, b.R, b)


def beside_prefill(max_drafts: int) -> int:
    """Tokens of a row, at most, beside prefill in a program that drafts: padding of rows that have
    none is paid by every prompt."""
    return widths(max_drafts)[1]


def _plain(D: int, P: int, F: int) -> set[Bucket]:
    """One token per row."""
    few = min(FEW_ROWS, D)
    found = {Bucket(D=d, P=0, F=0) for d in _decode_rungs(D)}
    for p in _prefill_rungs(P):
        beside = ({few} if p in WITH_FEW else set()) | ({D} if p != ONLY_FEW else set())
        found |= {Bucket(D=d, P=p, F=_rows(p, F)) for d in beside}
    return found | {Bucket(D=D, P=P, F=F)}


def _fewer(D: int, P: int, F: int) -> set[Bucket]:
    """``_plain`` where products and attention skip unused rows."""
    few, short = min(FEW_ROWS, D), min(SHORT, P)
    found = {Bucket(D=d, P=0, F=0) for d in (few, D)} | {Bucket(D=few, P=short, F=_rows(short, F))}
    return (
        found
        | {Bucket(D=D, P=p, F=_rows(p, F)) for p in _doubling(MIDDLE, P)}
        | {Bucket(D=D, P=P, F=F)}
    )


def _verifying(D: int, P: int, F: int, J: int) -> set[Bucket]:
    """Rows with drafts of the host. The largest takes every row at once, whatever else there is."""
    found = {
        Bucket(D=d, P=0, F=0, J=j)
        for d in _verify_rungs(D)
        for j in widths(J - 1)[1:]
        if d * j <= max(MOST_VERIFIED, d * widths(J - 1)[1])
    }
    few = min(FEW_ROWS, D)
    beside = {Bucket(D=few, P=p, F=_rows(p, F), J=J) for p in _prefill_rungs(P) if p in WITH_FEW}
    return found | beside | {Bucket(D=D, P=P, F=F, J=J)}


def _drafting(
    D: int, P: int, F: int, J: int, tree: TreeShape, *, masks: bool, scores: bool
) -> set[Bucket]:
    """Programs that draft, beside at most ``D`` rows; the last ones take masks and scores."""
    wide = (J,) if tree else widths(J - 1)[1:]
    few, narrow = min(FEW_ROWS, D), wide[0]
    whole = Bucket(D=D, P=P, F=F, J=narrow)
    found = {Bucket(D=d, P=0, F=0, J=j) for d in _verify_rungs(D) for j in wide} | {whole}
    # Of few rows also few prompts: each is a row of every draft that is made.
    beside = [(p, few) for p in DRAFT_BESIDE_FEW] + [(p, D) for p in DRAFT_BESIDE_ALL]
    found |= {
        Bucket(D=rows, P=p, F=min(rows, _rows(p, F)), J=narrow) for p, rows in beside if p < P
    }
    if masks:
        found |= {whole.with_also(MASK), Bucket(D=D, P=0, F=0, J=wide[-1], features=(MASK,))}
    if scores:
        found.add(whole.with_also(SCORE, *([MASK] if masks else [])))
    return {replace(b, n_draft=b.J - 1, tree=tree) for b in found}


def _rows(p: int, F: int) -> int:
    """Prefill rows beside ``p`` of their tokens."""
    return max(1, min(F, p // 4))


def _worth_a_mask(b: Bucket, D: int, P: int, J: int) -> bool:
    """Few rungs take masks: each is one more program to compile, and guided rows are few."""
    if b.J not in (1, J):
        return False
    return b.D in (1, FEW_ROWS, D) if b.P == 0 else (b.D, b.P) == (D, P)


def _takes_most(b: Bucket, found: set[Bucket]) -> bool:
    """No other bucket takes all that this one takes, of those that draft, have prefill and score like it:
    scores of a whole prompt cost too much to be computed for nobody."""

    def kind(b: Bucket) -> tuple:
        return b.P > 0, SCORE in b.features, b.n_draft, b.tree

    def within(other: Bucket) -> bool:
        sizes = zip((b.D, b.P, b.F, b.J), (other.D, other.P, other.F, other.J), strict=True)
        return all(own <= most for own, most in sizes) and {*b.features} <= {*other.features}

    return not any(other != b and kind(other) == kind(b) and within(other) for other in found)


def _plain_of(found: Iterable[Bucket]) -> list[Bucket]:
    """Those without features, or with masks alone where all have some."""
    found = list(found)
    return [b for b in found if not b.features] or [b for b in found if b.features == (MASK,)]


def _thinned(found: set[Bucket]) -> set[Bucket]:
    """Plain ones, each of ``APART`` times the tokens of the one before: steps that decode, and those with prefill."""
    kept: set[Bucket] = set()
    plain = sorted([b for b in _plain_of(found) if b.J == 1 and not b.n_draft], key=_cost)
    for prefill in (False, True):
        most = 0
        for bucket in (b for b in plain if (b.P > 0) == prefill):
            if APART * most <= bucket.T:
                kept, most = kept | {bucket}, bucket.T
    return kept


def _doubling(first: int, last: int) -> list[int]:
    rungs = []
    while first < last:
        rungs.append(first)
        first *= 2
    return [*rungs, last]


def _prefill_rungs(last: int) -> list[int]:
    quarters = [last * 3 // 4] if last >= 256 else []
    return sorted({*_doubling(32, last), *quarters})


def _decode_rungs(last: int) -> list[int]:
    return [n for n in (2,) if n < last] + _doubling(min(8, last), last)


def _verify_rungs(last: int) -> list[int]:
    """1, 4, 16, 64 ... and the last."""
    return sorted({n for n in _doubling(1, last) if n.bit_length() % 2} | {last})
