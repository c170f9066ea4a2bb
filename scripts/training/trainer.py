"""The training loop: resumable parts of bounded time, a JSONL log, a checkpoint at the end of every part."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from training.data import STORY_ROW, Batches, TaskSize
from training.display import Display
from training.model import DemoModel
from training.objective import losses
from training.schedule import CURRICULUM, Stage, learning_rate, stage_at
from training.shape import ModelShape

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
SAVE_SECONDS = 60


@dataclass(frozen=True)
class Settings:
    """What is trained and how; fixed when a run begins.

    Attributes:
        total_seconds: training time of all parts together; progress is the share of it that has passed.
        story_rows: rows of stories in a step, beside the long ones.
        peak_rate: of AdamW.
        draft_weight: of the mean draft loss beside the trunk's.
        dtype: of arithmetic; the master weights are fp32.
    """

    shape: ModelShape = field(default_factory=ModelShape)
    task: TaskSize = field(default_factory=TaskSize)
    total_seconds: float = 16.5 * 60
    story_rows: int = 48
    peak_rate: float = 2e-3
    weight_decay: float = 0.05
    draft_weight: float = 0.3
    dtype: str = "bfloat16"
    seed: int = 0
    stages: tuple[Stage, ...] = CURRICULUM


class Trainer:
    """One run in one directory.

    Args:
        directory: of log and checkpoint; a checkpoint that is there is resumed, with its own settings.
        settings: of a new run.
        device: "cuda" or "cpu".
    """

    def __init__(self, directory: Path, settings: Settings, device: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.device = directory, device
        saved = load_checkpoint(directory, device) if (directory / CHECKPOINT).exists() else None
        self.settings = saved["settings"] if saved else settings
        self.model = DemoModel(self.settings.shape, getattr(torch, self.settings.dtype), self.settings.seed).to(device)
        self.optimizer = _optimizer(self.model, self.settings, device)
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        if saved:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.seconds, self.tokens = saved["step"], saved["seconds"], saved["tokens"]

    @property
    def progress(self) -> float:
        return min(1.0, self.seconds / self.settings.total_seconds)

    def run(self, seconds: float, workers: int, display: Display) -> None:
        """Train until that much wall-clock time has passed or the run is complete, then save."""
        begin = saved = time.monotonic()
        settings = self.settings
        rng = random.Random(f"{settings.seed}/{self.step}")
        log = open(self.directory / LOG, "a", buffering=1)  # noqa: SIM115
        with Batches(f"{settings.seed}/{self.step}", settings.task, settings.story_rows, workers) as batches, log:
            stage = stage_at(self.progress, settings.stages)
            stream = batches.stream(stage.longest, stage.tokens)
            next(stream)  # the workers' start is not training time
            while self.progress < 1 and time.monotonic() - begin < seconds:
                started = time.monotonic()
                stage = stage_at(self.progress, settings.stages)
                batches.resize(stage.longest, stage.tokens)
                record = self._step(*next(stream), rng)
                self.seconds += time.monotonic() - started
                record.update(longest=stage.longest, progress=self.progress, seconds=self.seconds, tokens=self.tokens)
                log.write(json.dumps(record) + "\n")
                display.update(record)
                if time.monotonic() - saved > SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def _step(self, long, stories, rng: random.Random) -> dict[str, float]:
        rate = learning_rate(self.progress, self.settings.peak_rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        values = {}
        for name, batch in (("long", long), ("story", stories)):
            trunk, drafts = losses(self.model, batch, rng)
            (trunk + self.settings.draft_weight * drafts.mean()).backward()
            values[name], values[f"{name}_drafts"] = trunk.detach(), drafts.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if torch.isfinite(norm):  # waits for the device, so that a step's time is its own
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += long.tokens.size + len(stories.tokens) * STORY_ROW
        return {
            "step": self.step,
            "length": long.shape[1],
            "rate": rate,
            "norm": float(norm),
            **{name: value.tolist() for name, value in values.items()},
        }

    def save(self) -> None:
        """Write the checkpoint; an interrupted write leaves the old one."""
        state = {
            "settings": _plain(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in ("step", "seconds", "tokens")},
        }
        partial = self.directory / f"{CHECKPOINT}.partial"
        torch.save(state, partial)
        partial.rename(self.directory / CHECKPOINT)


def load_checkpoint(directory: Path, device: str) -> dict:
    """The checkpoint of a run, its settings as `Settings`."""
    saved = torch.load(directory / CHECKPOINT, map_location=device, weights_only=True)
    plain = saved["settings"]
    plain["shape"], plain["task"] = ModelShape(**plain["shape"]), TaskSize(**plain["task"])
    plain["stages"] = tuple(Stage(**stage) for stage in plain["stages"])
    saved["settings"] = Settings(**plain)
    return saved


def load_model(directory: Path, device: str, dtype: torch.dtype) -> tuple[DemoModel, Settings]:
    """The model of a run, computing in `dtype` with weights rounded to bf16 as they are exported."""
    saved = load_checkpoint(directory, device)
    rounded = {
        name: tensor if name.endswith("A_log") else tensor.bfloat16().float() for name, tensor in saved["model"].items()
    }
    model = DemoModel(saved["settings"].shape, dtype).to(device)
    model.load_state_dict(rounded)
    return model.eval(), saved["settings"]


def _plain(settings: Settings) -> dict:
    plain = dataclasses.asdict(settings)
    plain["stages"] = list(plain["stages"])
    return plain


def _optimizer(model: DemoModel, settings: Settings, device: str) -> torch.optim.AdamW:
    """Weight decay on matrices alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.peak_rate, betas=(0.9, 0.98), fused=device == "cuda")
