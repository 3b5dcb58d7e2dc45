"""Many prompts in this process, without a server: any number of them, answered in their order.

python examples/offline_batch.py [MODEL]
"""

import sys

from jserve import LLM, SamplingParams


def main(model: str = "") -> None:
    questions = [f"What is {a} + {b}?" for a, b in ((2, 3), (12, 30), (7, 8))]
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=32)
    with LLM(model) as llm:
        for question, answer in zip(questions, llm.chat(chats, params), strict=True):
            print(f"{question}  {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
