"""Expert placement: which expert each slot of a layer has, so that devices have equal loads.

Pure functions of numpy arrays. After DeepSeek's EPLB: spare slots go to the experts with the highest load a copy,
copies to devices in falling load, and then single exchanges go on for as long as the fullest device gets less.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

Move = tuple[tuple[int, int], ...]
"""(slot whose expert is taken, slot that gets it) pairs that happen at once."""

ENOUGH = 1.02
"""Load of the fullest device over the mean, from which on no other start is tried."""
STARTS = 4
"""Shares of the spare slots that busy experts get, in turn."""
TRIED = 4
"""Experts, the heaviest of the fullest device and the lightest of all, that may get another copy in an exchange."""
_WORTH = 1e-9
"""Share of the mean load by which an exchange has to better the fullest device."""


def place(load_E: np.ndarray, n_devices: int, n_slots: int, now_S: np.ndarray) -> np.ndarray:
    """int[S]: the expert of each slot.

    Args:
        load_E: tokens of each expert; its copies share them equally.
        n_devices: that have ``n_slots / n_devices`` slots each, one after the other.
        n_slots: as many as experts or more, and at most ``n_devices`` an expert.
        now_S: the expert that each slot has; slots keep theirs where that changes no load.
    """
    E = len(load_E)
    assert E <= n_slots <= E * n_devices, "slots for every expert"
    assert n_slots % n_devices == 0, "as many on each device"
    load_E = np.asarray(load_E, float) + 1e-6 * (1.0 + np.sum(load_E)) / E
    spare, best = n_slots - E, (np.inf, [])
    for busy in sorted({spare * i // STARTS for i in range(STARTS + 1)}, reverse=True):
        copies_E = _copies(load_E, n_devices, busy, spare - busy)
        best = min(best, _from(copies_E, load_E, n_devices))
        if best[0] <= ENOUGH * load_E.sum() / n_devices:
            break
    devices = best[1]
    return _kept(devices, now_S.reshape(n_devices, -1))


def _from(
    copies_E: np.ndarray, load_E: np.ndarray, n_devices: int
) -> tuple[float, list[list[int]]]:
    """(load of the fullest device, experts of each device) that a start with so many copies leads to."""
    devices = _packed(load_E, copies_E, n_devices, copies_E.sum() // n_devices)
    _exchange(load_E, copies_E, devices)
    each_E = load_E / copies_E
    return max(each_E[own].sum() for own in devices), devices


def device_loads(load_E: np.ndarray, slot_S: np.ndarray, n_devices: int) -> np.ndarray:
    """float[n_devices]: tokens that each device computes with these experts in its slots."""
    copies_E = np.bincount(slot_S, minlength=len(load_E))
    return (load_E / copies_E)[slot_S].reshape(n_devices, -1).sum(axis=1)


def imbalance(load_E: np.ndarray, slot_S: np.ndarray, n_devices: int) -> float:
    """The load of the fullest device over the mean; 1 where there is none."""
    loads = device_loads(load_E, slot_S, n_devices)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def moves(now_S: np.ndarray, wanted_S: np.ndarray) -> Iterator[Move]:
    """Yields moves that bring the experts of ``now_S`` into the slots of ``wanted_S``, one after the other: a copy over
    an expert that another slot has too, or an exchange of two. Every expert has a slot after each."""
    now = now_S.copy()
    while wrong := np.flatnonzero(now != wanted_S).tolist():
        copies = np.bincount(now)
        to = next((slot for slot in wrong if copies[now[slot]] > 1), None)
        if to is not None:
            yield ((int(np.flatnonzero(now == wanted_S[to])[0]), to),)
            now[to] = wanted_S[to]
            continue
        a = wrong[0]
        b = next(slot for slot in wrong if wanted_S[slot] == now[a])
        yield ((a, b), (b, a))
        now[[a, b]] = now[[b, a]]


def slots_by_expert(slot_S: np.ndarray, E: int, R: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32[E, R] slots of each expert, int32[E] how many they are); the first one fills the rest."""
    n_E = np.bincount(slot_S, minlength=E).astype(np.int32)
    assert n_E.min() >= 1, "an expert has a slot"
    assert n_E.max() <= R, "and no more than the table has room for"
    slot_ER = np.empty((E, R), np.int32)
    for e in range(E):
        own = np.flatnonzero(slot_S == e)
        slot_ER[e] = own[0]
        slot_ER[e, : len(own)] = own
    return slot_ER, n_E


def _copies(load_E: np.ndarray, n_devices: int, busy: int, idle: int) -> np.ndarray:
    """int[E]: a slot for each, ``busy`` more one by one to whom has the highest load a copy, and ``idle`` more where
    they carry least: a busy expert that is whole may fit better than its copies."""
    copies_E = np.ones(len(load_E), int)
    for _ in range(busy):
        each = np.where(copies_E < n_devices, load_E / copies_E, -1.0)
        copies_E[each.argmax()] += 1
    for e in np.argsort(load_E):
        more = min(idle, n_devices - int(copies_E[e]))
        copies_E[e] += more
        idle -= more
    return copies_E


def _packed(load_E: np.ndarray, copies_E: np.ndarray, n_devices: int, room: int) -> list[list[int]]:
    """The experts of each device: the heaviest copies first, each on the least loaded device that has room and none
    of that expert. Where those that have room all have one, another device makes room."""
    each_E = load_E / copies_E
    devices: list[list[int]] = [[] for _ in range(n_devices)]
    full = np.zeros(n_devices)
    # All copies of an expert at once, those of most copies first: then there are devices enough.
    for e in sorted(range(len(load_E)), key=lambda e: (copies_E[e] < n_devices, -each_E[e])):
        for _ in range(copies_E[e]):
            open_ = [d for d in range(n_devices) if len(devices[d]) < room and e not in devices[d]]
            d = min(open_, key=lambda d: full[d]) if open_ else _make_room(devices, room, e)
            devices[d].append(e)
            full = np.array([each_E[own].sum() for own in devices])
    return devices


def _make_room(devices: list[list[int]], room: int, e: int) -> int:
    """A device without expert ``e`` that gave one of its own to a device with room."""
    for to in (d for d, own in enumerate(devices) if len(own) < room):
        for d, own in enumerate(devices):
            given = next((x for x in own if e not in own and x not in devices[to]), None)
            if given is not None:
                own.remove(given)
                devices[to].append(given)
                return d
    raise AssertionError("an expert has at most one copy on each device")


def _exchange(load_E: np.ndarray, copies_E: np.ndarray, devices: list[list[int]]) -> None:
    """Better ``devices`` and ``copies_E`` in place, by one slot or two at a time, while the fullest gets less."""
    for _ in range(4 * sum(map(len, devices))):
        each_E = load_E / copies_E
        full = np.array([each_E[own].sum() for own in devices])
        d = int(full.argmax())
        if not (_swap(each_E, full, devices, d) or _recopy(load_E, copies_E, devices)):
            return


def _swap(each_E: np.ndarray, full: np.ndarray, devices: list[list[int]], d: int) -> bool:
    """Exchange an expert of device ``d`` for a lighter one elsewhere, by the pair that leaves both the least full."""
    best, least = None, full[d] - _WORTH * full.mean()
    for other in (o for o in range(len(devices)) if o != d):
        mine, theirs = np.array(devices[d]), np.array(devices[other])
        given = each_E[mine][:, None] - each_E[theirs][None, :]
        after = np.maximum(full[d] - given, full[other] + given)
        twice = np.isin(mine, theirs)[:, None] | np.isin(theirs, mine)[None, :]
        after[twice] = np.inf
        i, j = np.unravel_index(after.argmin(), after.shape)
        if after[i, j] < least:
            best, least = (other, int(i), int(j)), after[i, j]
    if best is None:
        return False
    other, i, j = best
    devices[d][i], devices[other][j] = devices[other][j], devices[d][i]
    return True


def _recopy(load_E: np.ndarray, copies_E: np.ndarray, devices: list[list[int]]) -> bool:
    """Give a copy's slot to another expert, if that betters the fullest device."""
    each_E = load_E / copies_E
    full = np.array([each_E[own].sum() for own in devices])
    least, d, best = full.max() - _WORTH * full.mean(), int(full.argmax()), None
    ordered = np.argsort(each_E).tolist()
    tried = dict.fromkeys([*sorted(devices[d], key=lambda e: -each_E[e])[:TRIED], *ordered[:TRIED]])
    for other, own in enumerate(devices):
        for i, e in enumerate(own):
            for new in tried if copies_E[e] > 1 else ():
                if new in own:
                    continue
                copies = copies_E.copy()
                copies[e] -= 1
                copies[new] += 1
                trial = [
                    [*own[:i], new, *own[i + 1 :]] if o == other else x
                    for o, x in enumerate(devices)
                ]
                after = load_E / copies
                if (most := max(after[x].sum() for x in trial)) < least:
                    least, best = most, (other, trial[other], copies)
    if best is None:
        return False
    _, devices[best[0]], copies_E[:] = best
    return True


def _kept(devices: list[list[int]], now_DS: np.ndarray) -> np.ndarray:
    """``devices`` as slots: a device takes the set that has most of its own experts, and each of these stays in its
    slot."""
    left, found = list(range(len(devices))), np.empty_like(now_DS)
    for d, now in enumerate(now_DS):
        chosen = max(left, key=lambda i: len(set(devices[i]) & set(now.tolist())))
        left.remove(chosen)
        new = [e for e in devices[chosen] if e not in now]
        kept: set[int] = set()
        for s, e in enumerate(now.tolist()):
            stays = e in devices[chosen] and e not in kept
            found[d, s] = e if stays else new.pop()
            kept.add(e)
    return found.reshape(-1)
