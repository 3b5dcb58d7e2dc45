"""Pages on disk: what is read is what was written, or nothing; never an error, never too much."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from jserve.runner import disk
from jserve.runner.disk import READ_ONLY_S, DiskStore

N = 64


def store(root: Path, *, pages: int = 4, identity: str = "m", clock=lambda: 0.0, n: int = N):
    return DiskStore(root, identity, page_bytes=n, max_bytes=pages * (n + 8), clock=clock)


def name(i: int) -> bytes:
    return bytes([i]) * 16


def page(i: int) -> bytes:
    return bytes((i + k) % 256 for k in range(N))


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file())


def test_what_is_written_is_read_also_after_a_restart(tmp_path):
    first = store(tmp_path)
    assert first.get(name(1)) is None
    for i in range(3):
        assert first.put(name(i), page(i))
    again = store(tmp_path)
    assert sorted(again.digests()) == [name(i) for i in range(3)]
    assert [again.get(name(i)) for i in range(3)] == [page(i) for i in range(3)]
    assert (again.n_read, again.n_broken) == (3, 0)


def test_the_directory_stays_within_its_bytes_and_forgets_the_oldest_use(tmp_path):
    kept = store(tmp_path, pages=3)
    for i in range(3):
        kept.put(name(i), page(i))
    kept.get(name(0))
    for i in (3, 4):
        kept.put(name(i), page(i))
    assert [kept.get(name(i)) is not None for i in range(5)] == [True, False, False, True, True]
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 3 * (N + 8)


def test_a_restart_with_less_room_keeps_the_newest(tmp_path):
    first = store(tmp_path)
    for i in range(4):
        first.put(name(i), page(i))
        os.utime(first._path(name(i).hex()), (i, i))
    assert store(tmp_path, pages=2).digests() == [name(2), name(3)]
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    "harm",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:7],
        lambda data: b"XXXX" + data[4:],
        lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
        lambda data: data[:4] + bytes(4) + data[8:],
    ],
)
def test_a_broken_or_torn_file_is_a_miss_and_is_removed(tmp_path, harm):
    kept = store(tmp_path)
    kept.put(name(1), page(1))
    (path,) = files(tmp_path)
    path.write_bytes(harm(path.read_bytes()))
    again = store(tmp_path)
    assert again.get(name(1)) is None
    assert again.n_broken == 1
    assert files(tmp_path) == []
    assert again.put(name(1), page(1))
    assert again.get(name(1)) == page(1)


def test_half_written_files_of_a_crash_are_swept_and_others_left_alone(tmp_path):
    kept = store(tmp_path)
    kept.put(name(1), page(1))
    folder = files(tmp_path)[0].parent
    (folder / "01.99999999.partial").write_bytes(b"half")
    (folder / "notes.txt").write_text("not ours")
    again = store(tmp_path)
    assert len(again) == 1
    assert sorted(p.suffix for p in files(tmp_path)) == [".kv", ".txt"]


def test_another_identity_or_size_is_never_read(tmp_path):
    store(tmp_path).put(name(1), page(1))
    assert store(tmp_path, identity="other").get(name(1)) is None
    assert store(tmp_path, n=N * 2).get(name(1)) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_makes_it_read_only_for_a_while(tmp_path, monkeypatch, code):
    now = [100.0]
    kept = store(tmp_path, clock=lambda: now[0])
    kept.put(name(1), page(1))
    write = Path.write_bytes

    def full(self, data):
        write(self, data[:5])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk.Path, "write_bytes", full)
    assert not kept.put(name(2), page(2))
    assert kept.read_only
    assert [p.suffix for p in files(tmp_path)] == [".kv"], "no half of a file stays"
    monkeypatch.undo()
    assert not kept.put(name(2), page(2)), "not tried again yet"
    assert kept.get(name(1)) == page(1), "reading goes on"
    now[0] += READ_ONLY_S
    assert kept.put(name(2), page(2))


def test_a_passing_fault_costs_one_page_only(tmp_path, monkeypatch):
    kept = store(tmp_path)
    monkeypatch.setattr(
        disk.Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "io"))
    )
    assert not kept.put(name(1), page(1))
    monkeypatch.undo()
    assert not kept.read_only
    assert kept.put(name(1), page(1))


def test_a_file_that_somebody_removed_is_a_miss(tmp_path):
    kept = store(tmp_path)
    kept.put(name(1), page(1))
    files(tmp_path)[0].unlink()
    assert kept.get(name(1)) is None
    assert len(kept) == 0


def test_pages_of_another_process_count_once_they_were_used(tmp_path):
    """Two stores share a directory: neither keeps more names, or files, than its bound."""
    ours, theirs = store(tmp_path), store(tmp_path, pages=20)
    for i in range(12):
        theirs.put(name(i), page(i))
        assert ours.get(name(i)) == page(i)
        assert len(ours) <= 4
    assert ours.put(name(11), page(11))
    assert len(ours) <= 4
    assert len(files(tmp_path)) == 4


def test_a_page_that_another_process_removed_is_written_again(tmp_path):
    ours = store(tmp_path)
    ours.put(name(1), page(1))
    for path in files(tmp_path):
        path.unlink()
    assert ours.put(name(1), page(1))
    assert ours.get(name(1)) == page(1)


def test_what_another_live_process_writes_is_left_alone(tmp_path):
    folder = tmp_path / "m" / "01"
    folder.mkdir(parents=True)
    theirs, ours = (folder / f"01.{pid}.partial" for pid in (os.getppid(), os.getpid()))
    theirs.write_bytes(b"half")
    ours.write_bytes(b"half")
    store(tmp_path)
    assert files(tmp_path) == [theirs]
