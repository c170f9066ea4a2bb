"""The server flags: real fields of SGLang's ServerArgs, added in place, and the contradictions among them."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Annotated, Any

from sglang_replayssm.policies import FP32, POLICIES

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


@dataclasses.dataclass(frozen=True)
class Flag:
    """One command-line flag. `name` is the ServerArgs field; the option is `--` + name with dashes."""

    name: str
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


ENABLE = Flag(
    "enable_gdn_replayssm_spec",
    bool,
    False,
    "Verify the drafts of Gated-DeltaNet hybrids (Qwen3-Next, Qwen3.5) from a frozen checkpoint and a ring of rank-1 "
    "records instead of one state copy per draft token. A configuration that cannot use the ring is served by "
    "SGLang's own recurrent verify, with one warning that says why.",
)
CACHE_LEN = Flag(
    "gdn_replayssm_cache_len",
    int,
    16,
    "Ring window W of --enable-gdn-replayssm-spec: the number of committed tokens that a request keeps as records "
    "before they are folded into its state. At least the number of draft tokens.",
)
FOLD = Flag(
    "gdn_replayssm_fold",
    str,
    FP32.name,
    "Fold policy of --enable-gdn-replayssm-spec. "
    + "; ".join(f"{policy.name}: {policy.summary}" for policy in POLICIES.values())
    + ".",
    choices=tuple(POLICIES),
)
FLAGS = (ENABLE, CACHE_LEN, FOLD)


def enabled(server_args: ServerArgs) -> bool:
    """Whether the user asked for the ring. False for arguments that were made before the plugin was loaded."""
    return bool(getattr(server_args, ENABLE.name, False))


def add_to_server_args() -> None:
    """Add every flag to ServerArgs in place, so that the CLI, `Engine(...)`, YAML files, pickling and repr carry it.

    The class object stays the same: `Engine.server_args_class` and modules that imported ServerArgs see the fields.
    """
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.server_args import ServerArgs

    if ENABLE.name in ServerArgs.__dataclass_fields__:
        return
    for flag in FLAGS:
        hint = Annotated[flag.type, Arg(help=flag.help, choices=list(flag.choices) if flag.choices else None)]
        field = dataclasses.field(default=flag.default)
        field.name, field.type, field._field_type = flag.name, hint, dataclasses._FIELD
        setattr(ServerArgs, flag.name, flag.default)
        ServerArgs.__annotations__[flag.name] = hint
        ServerArgs.__dataclass_fields__[flag.name] = field

    stock_init, stock_repr = ServerArgs.__init__, ServerArgs.__repr__

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        for flag in FLAGS:  # before the stock __init__, whose __post_init__ may look at them
            setattr(self, flag.name, kwargs.pop(flag.name, flag.default))
        stock_init(self, *args, **kwargs)

    @functools.wraps(stock_repr)
    def __repr__(self):
        ours = ", ".join(f"{flag.name}={getattr(self, flag.name)!r}" for flag in FLAGS)
        return f"{stock_repr(self)[:-1]}, {ours})"

    ServerArgs.__init__, ServerArgs.__repr__ = __init__, __repr__


def raise_on_contradiction(server_args: ServerArgs) -> None:
    """Refuse what the user must resolve.

    Raises:
        ValueError: unknown fold policy, W smaller than the largest draft length (where there would be a ring with a
            history at all), or a conflict with --enable-linear-replayssm. One message that names the flags, what was
            found and what to do.
    """
    from sglang_replayssm.plugin.support import speculation_reasons  # needs torch; the flags do not

    fold = getattr(server_args, FOLD.name)
    if fold not in POLICIES:
        raise ValueError(f"{FOLD.option} must be one of {', '.join(POLICIES)}; got {fold!r}")
    window, drafts = getattr(server_args, CACHE_LEN.name), server_args.max_speculative_num_draft_tokens
    if window < 1:
        raise ValueError(f"{CACHE_LEN.option} must be at least 1; got {window}")
    if server_args.enable_linear_replayssm:
        raise ValueError(
            f"{ENABLE.option} and --enable-linear-replayssm both keep a ring on the same state: use only one of them"
        )
    ring_holds_history = POLICIES[fold].factors is not None and not speculation_reasons(server_args)
    if ring_holds_history and window < drafts:
        raise ValueError(
            f"{CACHE_LEN.option}={window} is smaller than the largest number of draft tokens a step may verify "
            f"({drafts}): set {CACHE_LEN.option} to at least {drafts}, or lower --speculative-num-draft-tokens"
        )
