"""AIME accuracy of a running server, with loops, truncation, output length and acceptance length.

    python scripts/eval_aime.py --url http://127.0.0.1:30000 --repeats 8 --temperature 0.6 --top-p 0.95

Any server with the OpenAI API. The outputs are long, which is where drift and loops show. Interrupted, the same command
goes on where it stopped.
"""

from __future__ import annotations

import sys

from evaluation import answers, run
from evaluation.data import Source
from evaluation.task import Task

AIME = Task(
    name="aime",
    source=Source("math-ai/aime25", None, "test"),
    instruction=r"Reason step by step. The answer is an integer from 0 to 999: put it within \boxed{}.",
    extract=answers.aime,
    parse_reference=answers.number,
    max_tokens=32768,
)

if __name__ == "__main__":
    sys.exit(run.main(AIME, __doc__))
