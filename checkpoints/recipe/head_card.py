"""The card of trained heads: what they are, and how many of their drafts the target keeps.

Owns the README.md beside exported heads. Every number comes from the training state and from
`acceptance.measure`; nothing is typed in by hand.
"""

from pathlib import Path

from checkpoints.recipe.card import training_rows
from checkpoints.recipe.eagle import EagleConfig
from checkpoints.recipe.heads import HeadConfig

Table = dict[str, dict[str, float]]
"""{skill: {drafter: tokens per verify step}}"""

_CARD = """\
---
license: apache-2.0
language: en
base_model: {target}
---
# {name}

{purpose} Trained by `python -m checkpoints.recipe train --size {size}` on the generated text that the
target was trained on; only the distributions of the frozen target are learnt, not the text.

| | |
|---|---|
| format | {layout} |
| parameters | {parameters:,}, bf16 |
| shape | {shape} |
| loss | cross-entropy with the target's distribution, {steps} steps ahead, each weighing 0.8 of the one before |
{training}

## Acceptance

Tokens that one verify step yields, the target's own included (1: no draft was right; at most
{most}), over what the target itself says after {prompts} held-out prompts per skill, greedily and
drawn at temperature 0.7. Drafts are a chain of the likeliest tokens; one is kept if it equals what
the target says, as jserve verifies. Measured offline with the shipped bf16 weights in float32
(`recipe/acceptance.py`){compared}.

| skill | {headings} |
|---|{dashes}|
{rows}

Of use for {target} alone. What is drafted never changes what is said, only how fast.
"""


def write_head_card(
    out: Path, size: str, config: HeadConfig, about: dict, facts: dict, tables: dict[float, Table]
) -> None:
    """`facts`: target, parameters, prompts. `tables`: the measure at each temperature."""
    names = list(next(iter(next(iter(tables.values())).values())))
    columns = [(temperature, name) for temperature in tables for name in names]
    text = _CARD.format(
        name=out.name,
        size=size,
        **facts,
        **_words(config, facts["target"]),
        training=training_rows(about),
        most=config.steps + 1,
        headings=" | ".join(f"{name}, {_said(t)}" for t, name in columns),
        dashes="|".join("---" for _ in columns),
        rows="\n".join(_rows(tables, columns)),
        compared=_comparison(names),
    )
    (out / "README.md").write_text(text, encoding="utf-8")


def _said(temperature: float) -> str:
    return f"temperature {temperature}" if temperature else "greedy"


def _rows(tables: dict[float, Table], columns: list[tuple[float, str]]) -> list[str]:
    skills = list(next(iter(tables.values())))
    table = {skill: [tables[t][skill][name] for t, name in columns] for skill in skills}
    table["mean"] = [sum(column) / len(skills) for column in zip(*table.values(), strict=True)]
    return [f"| {s} | " + " | ".join(f"{x:.2f}" for x in row) + " |" for s, row in table.items()]


def _comparison(names: list[str]) -> str:
    others = [name for name in names if name not in ("eagle3", "medusa")]
    return f"; for comparison {', '.join(others)} with chains of the same length" if others else ""


def _words(config: HeadConfig, target: str) -> dict[str, str | int]:
    t = config.target
    if isinstance(config, EagleConfig):
        return {
            "purpose": f"An EAGLE-3 head that drafts for {target}.",
            "layout": "EAGLE-3 as SafeAILab/EAGLE and SpecForge write it; embedding of the target",
            "shape": f"one layer of width {t.hidden}, {t.heads} heads ({t.kv_heads} kv) of"
            f" {t.head_dim}, ffn {config.ffn}, reads the outputs of layers"
            f" {', '.join(map(str, config.taps))} of {t.layers}, drafts {config.vocab} of"
            f" {t.vocab} tokens",
            "steps": config.steps,
        }
    return {
        "purpose": f"Medusa heads (Medusa-1: the target is frozen) that draft for {target}.",
        "layout": "Medusa version 2 as FasterDecoding/Medusa writes it; lm_head of the target",
        "shape": f"{config.steps} heads, each one residual block of width {t.hidden}",
        "steps": config.steps,
    }
