"""What a damaged recurrent state does to the answers: the task is worth its length only if this shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from sglang_replayssm.demo_task import RegisterProblem, vocabulary
from training.decode import generate
from training.gdn import GDNCache
from training.model import DemoModel

Damage = Callable[[torch.Tensor], torch.Tensor]

DAMAGES: dict[str, Damage] = {
    "none": lambda state: state,
    "1 % noise": lambda state: _noise(state, 0.01),
    "10 % noise": lambda state: _noise(state, 0.1),
    "50 % noise": lambda state: _noise(state, 0.5),
    "halved": lambda state: state * 0.5,
    "erased": torch.zeros_like,
    "another request's": lambda state: state.roll(1, dims=0),
}


def table(model: DemoModel, problems: Sequence[RegisterProblem]) -> Iterator[str]:
    """For every damage, once and halfway through: answers right, and solutions right in every step."""
    prompts = [vocabulary.prompt_ids(problem.question) for problem in problems]
    longest = max(len(vocabulary.answer_ids(problem.solution)) for problem in problems)
    for name, damage in DAMAGES.items():
        texts = generate(model, prompts, longest, on_step=damage_once(longest // 2, damage))
        grades = [p.grade(vocabulary.decode(text)) for p, text in zip(problems, texts, strict=True)]
        correct, exact = sum(g.correct for g in grades), sum(g.exact for g in grades)
        yield f"{name:>18}: {correct}/{len(grades)} answers right, {exact} exact"


def damage_once(at: int, damage: Damage) -> Callable[[int, list], None]:
    """For `generate`: after `at` tokens, damage every layer's recurrent state."""

    def on_step(written: int, caches: list) -> None:
        if written == at:
            for cache in caches:
                if isinstance(cache, GDNCache):
                    cache.state = damage(cache.state)

    return on_step


def _noise(state: torch.Tensor, share: float) -> torch.Tensor:
    """Gaussian, with that share of each head's root mean square."""
    size = state.pow(2).mean((-1, -2), keepdim=True).sqrt()
    generator = torch.Generator(state.device).manual_seed(0)
    return state + share * size * torch.randn(state.shape, generator=generator, device=state.device)
