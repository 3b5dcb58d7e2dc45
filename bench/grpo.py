"""``examples/grpo.py``: how the reward rises, how far sampled and recomputed log-probabilities differ, and its time.

Seconds of the processor, of all threads, are what it takes of a machine; on a quiet one with two cores its wall clock
is what the goal is about.

    python -m bench.grpo [--updates 20] [--json F] [--plot F.svg]
    python -m bench.grpo --record F --plot F.svg       draws a record, and runs nothing
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import probe
from jserve.sim import plot

EXAMPLE = Path(__file__).parent.parent / "examples" / "grpo.py"
LINE = re.compile(r"update \d+: reward ([\d.]+), log-probabilities differ by (\S+)")
END = re.compile(r"at the end: reward ([\d.]+)")


def figures(text: str) -> dict[str, Any]:
    """Of what the example printed."""
    updates = [(float(reward), float(drift)) for reward, drift in LINE.findall(text)]
    rewards = [*(reward for reward, _ in updates), float(END.findall(text)[0])]
    return {
        "updates": len(updates),
        "rewards": rewards,
        "rise": round(max(rewards[-5:]) - rewards[0], 4),
        "largest_difference": max(drift for _, drift in updates),
    }


def measure(updates: int) -> dict[str, Any]:
    """The figures of one run in a process of its own."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    model = EXAMPLE.parent.parent / "checkpoints" / "jserve-mini"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(model), str(updates)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    wall_s, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return figures(done.stdout) | {"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}


def draw(record: Mapping[str, Any], path: Path) -> None:
    """The reward before each update of a record's run, and at the end."""
    [found] = record["lines"]
    with plot.figure(path, 1, "examples/grpo.py") as [axis]:
        axis.plot(found["rewards"], marker=".")
        axis.set(xlabel="update", ylabel="mean reward of 128 samples", ylim=(0, 1))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.grpo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--plot", type=Path, help="file.svg to draw")
    parser.add_argument("--record", type=Path, help="file that --json wrote, in place of a run")
    args = parser.parse_args(argv)
    if args.plot is not None:
        plot.check(args.plot)
    if args.record is not None:
        record = json.loads(args.record.read_text())
    else:
        found = measure(args.updates)
        print(json.dumps(found))
        record = probe.record("grpo", {"updates": args.updates}, [found])
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot is not None:
        draw(record, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
