"""The model card: what was measured, in the words a reader of the checkpoint needs.

Owns the README.md inside an exported folder. Every number comes from the training state and from
`evaluate.score`; nothing is typed in by hand.
"""

from pathlib import Path

from checkpoints.recipe.model import ModelConfig

_CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# {name}

{purpose} Trained from nothing by `python -m checkpoints.recipe` on text that the recipe generates
itself (grammars and small worlds); no other text was used, so there is no data licence to name.

| | |
|---|---|
| architecture | `Qwen3ForCausalLM`, {parameters:,} parameters, bf16 |
| shape | {layers} layers, width {hidden}, {heads} heads ({kv_heads} kv) of {head_dim}, ffn {ffn} |
| vocabulary | {vocab}, byte-level BPE, every digit its own token |
| context | {context} tokens |
{training}

## What it can do

Held-out accuracy: greedy decoding of the shipped bf16 weights in float32, {count} chats per skill
(a fifth of that for `passage_long`, passages of about 1500 tokens). An answer counts only if every
character is right. The chats come from other seeds than the training text, their invented names,
sums and conversions never occur in it. Times tables and facts are learnt by heart and not held out.

| skill | exact answers |
|---|---|
{accuracy}

Bits per byte on held-out chats: {all:.3f} over all text, {assistant:.3f} over what the assistant
says; {story:.3f} on stories, which have no single right answer.

## Format

ChatML turns (`<|im_start|>role ... <|im_end|>`) with `<think>`, `<tool_call>` and `<tool_response>`
as in Qwen3. The template takes `tools` (printed as one-line signatures) and `enable_thinking`
(default true: arithmetic and unit conversions are worked out between think tags; false: answered at
once). Greedy decoding is the default.

## Limits

It knows the phrasings of its recipe and little else; asked about the world it should say that it
does not know, and elsewhere it may answer nonsense fluently. Sums beyond three digits, passages
beyond about 100 sentences and languages other than English are out of reach. It exists to
demonstrate and test a serving engine; do not use it for decisions.
"""
_PURPOSES = {
    "main": "A very small chat model that demonstrates and tests the jserve engine.",
    "draft": "A draft model for speculative decoding with jserve-mini: same tokenizer, a tenth of "
    "the size. Not meant to be used alone.",
}


def training_rows(about: dict, where: str = "") -> str:
    """A row of the card per training stage: those the run went on from, then the run itself."""
    clock, plan = about["clock"], about["plan"]
    stages = [*plan.get("before", ())]
    minutes = clock["seconds"] / 60
    rate = plan.get("rate", 1.0)
    stages.append(
        f"{clock['tokens']:,} tokens, {clock['step']:,} steps, {minutes:.0f} minutes{where}, "
        f"seed {plan['seed']}" + (f", peak rate {rate:g}" if rate != 1.0 else "")
    )
    if len(stages) == 1:
        return f"| training | {stages[0]} |"
    return "\n".join(f"| training, stage {i} | {stage} |" for i, stage in enumerate(stages, 1))


def write_card(
    out: Path, size: str, config: ModelConfig, parameters: int, about: dict, scores: dict
) -> None:
    rows = [f"| {name} | {share:.1%} |" for name, share in scores["accuracy"].items()]
    text = _CARD.format(
        name=out.name,
        purpose=_PURPOSES.get(size, ""),
        parameters=parameters,
        **{k: getattr(config, k) for k in ("layers", "hidden", "heads", "kv_heads", "head_dim")},
        **{k: getattr(config, k) for k in ("ffn", "vocab", "context")},
        training=training_rows(about, f" on {about.get('machine', '2 CPU cores')}"),
        count=scores["count"],
        accuracy="\n".join(rows),
        **scores["bits_per_byte"],
    )
    (out / "README.md").write_text(text, encoding="utf-8")
