"""Synthetic reasoning with checkable answers: what the small trained model is taught and judged by. Needs no torch.

Two kinds of problem: `stories` (short, the shape of GSM8K) and `registers` (long, the shape of AIME's chains).
"""

from sglang_replayssm.demo_task.grading import Grade
from sglang_replayssm.demo_task.registers import RegisterProblem
from sglang_replayssm.demo_task.splits import SPLITS, draw_register, draw_story
from sglang_replayssm.demo_task.stories import StoryProblem

__all__ = ["SPLITS", "Grade", "RegisterProblem", "StoryProblem", "draw_register", "draw_story"]
