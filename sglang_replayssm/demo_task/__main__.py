"""Questions and answers as JSONL, for any evaluation of a running server.

python -m sglang_replayssm.demo_task stories --count 200 > stories.jsonl
python -m sglang_replayssm.demo_task registers --count 50 --tokens 16384 > registers.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys

from sglang_replayssm.demo_task import SPLITS, draw_register, draw_story, registers


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_replayssm.demo_task",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=("stories", "registers"))
    parser.add_argument("--split", choices=SPLITS, default="test", help="default: %(default)s")
    parser.add_argument("--count", type=int, default=100, help="problems (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="most of a register solution (default: %(default)s)")
    options = parser.parse_args(argv)
    rounds = registers.rounds_within(options.tokens)
    if not 1 <= rounds <= registers.MAX_ROUNDS:
        low, high = (registers.solution_tokens(n) for n in (1, registers.MAX_ROUNDS))
        parser.error(f"--tokens: solutions have {low} to {high} tokens")
    for index in range(options.count):
        if options.kind == "stories":
            problem = draw_story(options.split, index)
        else:
            problem = draw_register(options.split, index, rounds)
        name = f"{options.kind}-{options.split}-{index}"
        print(json.dumps({"id": name, "question": problem.question, "answer": f"{problem.answer}"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
