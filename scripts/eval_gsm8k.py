"""GSM8K accuracy of a running server, with loops, truncation, output length and acceptance length.

    python scripts/eval_gsm8k.py --url http://127.0.0.1:30000 --out results/gsm8k-on.jsonl

Any server with the OpenAI API. Interrupted, the same command goes on where it stopped.
"""

from __future__ import annotations

import sys

from evaluation import answers, run
from evaluation.data import Source
from evaluation.task import Task

EXEMPLARS = (
    (
        "A baker fills 6 trays with 8 rolls each and sells all but 5 rolls. How many rolls does she sell?",
        "The trays hold 6 * 8 = 48 rolls. She sells 48 - 5 = 43 rolls.\n#### 43",
    ),
    (
        "Tickets for the tram cost $3 for adults and half of that for children. What do 4 adults and 6 children pay?",
        "A child pays 3 / 2 = 1.5 dollars. The adults pay 4 * 3 = 12 and the children 6 * 1.5 = 9 dollars. "
        "Together that is 12 + 9 = 21 dollars.\n#### 21",
    ),
    (
        "A tank holds 1,500 litres and is 40% full. A pump adds 75 litres a minute. After how many minutes is it full?",
        "The tank holds 1500 * 0.4 = 600 litres now, so 1500 - 600 = 900 are missing. "
        "The pump needs 900 / 75 = 12 minutes.\n#### 12",
    ),
    (
        "Noor is 4 years older than twice her brother's age. Together they are 31. How old is Noor?",
        "With the brother's age b, Noor is 2b + 4, and b + 2b + 4 = 31 gives 3b = 27, b = 9. Noor is 2 * 9 + 4 = 22."
        "\n#### 22",
    ),
    (
        "A hiker walks 5 km/h for 3 hours, rests, and walks the remaining 9 km of a trail in 2 hours. How long is the "
        "trail in kilometres?",
        "In the first part he walks 5 * 3 = 15 km. The trail is 15 + 9 = 24 km long.\n#### 24",
    ),
)

GSM8K = Task(
    name="gsm8k",
    source=Source("openai/gsm8k", "main", "test"),
    instruction="Work it out step by step, and end with a line `#### ` followed by the number alone.",
    extract=answers.gsm8k,
    parse_reference=answers.gsm8k,
    max_tokens=2048,
    exemplars=EXEMPLARS,
)

if __name__ == "__main__":
    sys.exit(run.main(GSM8K, __doc__))
