"""A Gated-DeltaNet hybrid small enough to make on the spot: what tests and the demo serve instead of a download."""

from sglang_replayssm.tiny.config import ARCHITECTURES, TinyShape
from sglang_replayssm.tiny.weights import ZERO_LOGIT_TOKEN
from sglang_replayssm.tiny.write import write_tiny_model

__all__ = ["ARCHITECTURES", "ZERO_LOGIT_TOKEN", "TinyShape", "write_tiny_model"]
