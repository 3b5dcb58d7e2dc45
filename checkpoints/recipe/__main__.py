"""Command line: `python -m checkpoints.recipe {data,tokenizer,train,eval,export}`."""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from checkpoints.recipe import skills
from checkpoints.recipe.chat import segments
from checkpoints.recipe.model import SIZES
from checkpoints.recipe.tokenizer import load_or_train

WORK = Path(__file__).parent.parent / "work"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="checkpoints.recipe", description=__doc__)
    parser.add_argument("command", choices=("data", "tokenizer", "train", "eval", "export"))
    parser.add_argument("--size", choices=("main", "draft", "tiny"), default="main")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall-clock training budget")
    parser.add_argument("--steps", type=int, default=None, help="budget in steps instead")
    parser.add_argument("--decay", type=float, default=0.5, help="annealed share of the budget")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="chats to print, items per skill")
    parser.add_argument("--fast-matmul", action="store_true", help="bf16 products while training")
    parser.add_argument("--work", type=Path, default=WORK, help="scratch folder with checkpoints")
    parser.add_argument("--out", type=Path, help="folder of the exported model")
    return parser.parse_args()


def data(args) -> None:
    rng = np.random.default_rng(args.seed)
    for _ in range(args.count):
        text = "".join(text for text, _ in segments(skills.draw(rng, "test")))
        Console().print(text, markup=False, highlight=False)


def train(args) -> None:
    from checkpoints.recipe import train as loop

    config = dataclasses.replace(SIZES[args.size], fast_matmul=args.fast_matmul)
    plan = loop.Plan(config, args.minutes, args.steps, args.seed, args.decay)
    loop.train(plan, load_or_train(args.work / "tokenizer.json"), args.work / args.size)


def _trained(args):
    """Parameters, configuration and training notes of the latest checkpoint in the work folder."""
    from checkpoints.recipe import storage, train as loop

    path = args.work / args.size / "state.safetensors"
    plan = loop.Plan(SIZES[args.size], args.minutes)
    state, about = storage.load_state(path, loop.fresh_state(plan)[0])
    return state[0], plan.model, about


def evaluate(args) -> None:
    """Judge the latest checkpoint, at any moment of the training."""
    from checkpoints.recipe.evaluate import score

    params, config, about = _trained(args)
    print(about["clock"], flush=True)
    scores = score(config, params, load_or_train(args.work / "tokenizer.json"), args.count, _say)
    (args.work / args.size / "scores.json").write_text(json.dumps(scores, indent=1))


def export(args) -> None:
    """Write the Hugging Face folder, judge what was written, and write its card."""
    from checkpoints.recipe import export as hf
    from checkpoints.recipe.card import write_card
    from checkpoints.recipe.evaluate import score
    from checkpoints.recipe.model import parameter_count

    params, config, about = _trained(args)
    tokenizer = load_or_train(args.work / "tokenizer.json")
    out = args.out or WORK.parent / {"main": "jserve-mini", "draft": "jserve-mini-draft"}[args.size]
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
