"""Command line: `python -m checkpoints.recipe {data,tokenizer,train,eval,export}`."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from checkpoints.recipe import continued, skills
from checkpoints.recipe.chat import segments
from checkpoints.recipe.heads import HEADS
from checkpoints.recipe.model import SIZES
from checkpoints.recipe.tokenizer import load_or_train

WORK = Path(__file__).parent.parent / "work"
TARGET, DRAFT = WORK.parent / "jserve-mini", WORK.parent / "jserve-mini-draft"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="checkpoints.recipe", description=__doc__)
    parser.add_argument("command", choices=("data", "tokenizer", "train", "eval", "export"))
    parser.add_argument("--size", choices=(*SIZES, *HEADS), default="main")
    parser.add_argument("--target", type=Path, default=TARGET, help="model that heads draft for")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock training budget")
    parser.add_argument("--steps", type=int, default=None, help="budget in steps instead")
    parser.add_argument(
        "--from", dest="start", type=Path, help="exported folder whose weights the run starts from"
    )
    parser.add_argument("--rate", type=float, default=1.0, help="peak, as a share of the full rate")
    parser.add_argument("--decay", type=float, default=0.5, help="annealed share of the budget")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--mixture",
        choices=tuple(skills.MIXTURES),
        help="what is practised: by default first, and second with --from (data: second)",
    )
    parser.add_argument("--count", type=int, default=100, help="chats to print, items per skill")
    parser.add_argument("--fast-matmul", action="store_true", help="bf16 products while training")
    parser.add_argument("--work", type=Path, default=WORK, help="scratch folder with checkpoints")
    parser.add_argument("--out", type=Path, help="folder of the exported model")
    return parser.parse_args()


def data(args) -> None:
    rng = np.random.default_rng(args.seed)
    for _ in range(args.count):
        text = "".join(
            text for text, _ in segments(skills.draw(rng, "test", mixture=args.mixture or "second"))
        )
        Console().print(text, markup=False, highlight=False)


def train(args) -> None:
    from checkpoints.recipe import train as loop

    if args.start:
        continued.keep_tokenizer(args.start, args.target, args.work / "tokenizer.json")
    if args.size in HEADS:
        config, task, tokenizer = _heads(args)
    else:
        config = dataclasses.replace(SIZES[args.size], fast_matmul=args.fast_matmul)
        task, tokenizer = loop.language_model(config), load_or_train(args.work / "tokenizer.json")
    options: dict[str, Any] = {"mixture": args.mixture or ("second" if args.start else "first")}
    if args.start or args.size in HEADS:
        options |= _COPIES_ALREADY
    if args.start:
        task = continued.task_from(args.start, task, config)
        options["before"] = continued.stages(args.start)
    plan = loop.Plan(
        config, args.minutes, args.steps, args.seed, args.decay, rate=args.rate, **options
    )
    loop.train(plan, task, tokenizer, args.work / args.size)


# Heads and second stages start from a model that can copy: long rows at once, no curriculum.
_COPIES_ALREADY: dict[str, Any] = {"curriculum_steps": 0, "long_from": 0}


def _heads(args):
    """Configuration, task and tokenizer of heads for the target folder."""
    from checkpoints.recipe import export as hf
    from checkpoints.recipe.heads import head_task

    target = dataclasses.replace(hf.read_config(args.target), fast_matmul=args.fast_matmul)
    config = HEADS[args.size](target, fast_matmul=args.fast_matmul)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    return config, head_task(config, hf.import_params(args.target, target), tokenizer), tokenizer


def _trained(args):
    """Parameters, configuration and training notes of the latest checkpoint in the work folder."""
    from checkpoints.recipe import storage, train as loop

    path = args.work / args.size / "state.safetensors"
    config = SIZES[args.size]
    fresh, _ = loop.fresh_state(loop.language_model(config), args.seed)
    state, about = storage.load_state(path, fresh)
    return state[0], config, about


def _trained_heads(args):
    """Parameters, configuration, task, tokenizer and training notes of heads in the work folder."""
    from checkpoints.recipe import storage, train as loop

    config, task, tokenizer = _heads(args)
    fresh, _ = loop.fresh_state(task, args.seed)
    state, about = storage.load_state(args.work / args.size / "state.safetensors", fresh)
    return state[0], config, task, tokenizer, about


def _accepted(args, config, frozen, params, tokenizer) -> dict:
    """{temperature: acceptance.measure(...)} of heads, and of the shipped draft model."""
    from checkpoints.recipe import export as hf
    from checkpoints.recipe.acceptance import head_drafter, measure, model_drafter

    drafters = {args.size: head_drafter(config, frozen, params)}
    if args.target == TARGET:
        draft = hf.read_config(DRAFT)
        drafters["draft model"] = model_drafter(draft, hf.import_params(DRAFT, draft), config.steps)
    of = (config.target, frozen["target"], tokenizer, drafters, args.count)
    return {temperature: measure(*of, temperature, _say) for temperature in (0.0, 0.7)}


def evaluate(args) -> None:
    """Judge the latest checkpoint, at any moment of the training."""
    if args.size in HEADS:
        params, config, task, tokenizer, about = _trained_heads(args)
        print(about["clock"], flush=True)
        scores = _accepted(args, config, task.frozen, params, tokenizer)
    else:
        from checkpoints.recipe.evaluate import score

        params, config, about = _trained(args)
        print(about["clock"], flush=True)
        tokenizer = load_or_train(args.work / "tokenizer.json")
        scores = score(config, params, tokenizer, args.count, _say)
    (args.work / args.size / "scores.json").write_text(json.dumps(scores, indent=1))


def export(args) -> None:
    """Write the Hugging Face folder, judge what was written, and write its card."""
    if args.size in HEADS:
        _export_heads(args)
    else:
        _export_model(args)


def _export_heads(args) -> None:
    from checkpoints.recipe.head_card import write_head_card
    from checkpoints.recipe.head_export import export_head, import_head
    from checkpoints.recipe.model import parameter_count

    params, config, task, tokenizer, about = _trained_heads(args)
    out = args.out or WORK.parent / f"{args.target.name}-{args.size}"
    export_head(params, config, task.frozen["draft_ids"], args.target.name, out)
    params, draft_ids = import_head(out, config)
    frozen = {**task.frozen, "draft_ids": draft_ids}
    tables = _accepted(args, config, frozen, params, tokenizer)
    facts = {"target": args.target.name, "parameters": parameter_count(params)}
    write_head_card(out, args.size, config, about, {**facts, "prompts": args.count}, tables)


def _export_model(args) -> None:
    from checkpoints.recipe import export as hf
    from checkpoints.recipe.card import write_card
    from checkpoints.recipe.evaluate import score
    from checkpoints.recipe.model import parameter_count

    params, config, about = _trained(args)
    tokenizer = load_or_train(args.work / "tokenizer.json")
    out = args.out or {"main": TARGET, "draft": DRAFT}[args.size]
    hf.export(params, config, tokenizer, out)
    params = hf.import_params(out, config)
    scores = score(config, params, tokenizer, args.count, _say)
    write_card(out, args.size, config, parameter_count(params), about, scores)
    (args.work / args.size / "scores.json").write_text(json.dumps(scores, indent=1))


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    args = _arguments()
    jax.config.update("jax_compilation_cache_dir", str(args.work / "xla"))
    if args.command == "data":
        data(args)
    elif args.command == "tokenizer":
        load_or_train(args.work / "tokenizer.json")
    else:
        {"train": train, "eval": evaluate, "export": export}[args.command](args)


if __name__ == "__main__":
    main()
