"""lm-eval's local-completions against jserve, and its transformers model on the same checkpoint."""

from __future__ import annotations

import sys

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, model, directory = sys.argv[1:4]
served = LocalCompletionsAPI(
    base_url=url + "/v1/completions",
    model=model,
    tokenizer_backend="huggingface",
    tokenizer=directory,
    max_length=1024,
    batch_size=4,
    num_concurrent=2,
    max_retries=1,
)
own = HFLM(pretrained=directory, dtype="float32", device="cpu", batch_size=1, max_length=1024)


def asked(kind: str, arguments: list) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=i, metadata=("t", i, 1))
        for i, pair in enumerate(arguments)
    ]


STORY = "Once upon a time there was a fox who lived in a small house near the river. "
pairs = [
    ("The opposite of hot is", " cold"),
    ("The opposite of hot is", " warm"),
    ("3 km is", " 3000 m"),
    ("Monday, Tuesday,", " Wednesday, Thursday"),
    ("", "The sky is blue."),
    (STORY, "The fox was happy."),
    (STORY * 6, "One day it rained."),
    ("12 + 30 =", " 42"),
]
there = served.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
here = own.loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
worst = 0.0
for pair, (a, greedy_a), (b, greedy_b) in zip(pairs, there, here, strict=True):
    worst = max(worst, abs(a - b) / max(1.0, abs(b)))
    assert abs(a - b) <= 2e-3 * max(1.0, abs(b)), (pair, a, b)
    assert bool(greedy_a) == bool(greedy_b), pair

texts = [STORY, "The opposite of hot is", "12 + 30 =", "List three animals:\n1."]
until = {"until": ["\n\n", "zzz"], "max_gen_toks": 24, "temperature": 0.0, "do_sample": False}
wanted = [(text, dict(until)) for text in texts]
there = served.generate_until(asked("generate_until", wanted), disable_tqdm=True)
here = own.generate_until(asked("generate_until", wanted), disable_tqdm=True)
assert there == here, list(zip(there, here, strict=True))

rolled = [(STORY * 3,), ("The sky is blue.",)]
there = served.loglikelihood_rolling(asked("loglikelihood_rolling", rolled), disable_tqdm=True)
here = own.loglikelihood_rolling(asked("loglikelihood_rolling", rolled), disable_tqdm=True)
for a, b in zip(there, here, strict=True):
    assert abs(a - b) <= 2e-3 * max(1.0, abs(b)), (a, b)
print(f"ok: {len(pairs)} loglikelihoods, largest relative difference {worst:.1e}; texts equal")
