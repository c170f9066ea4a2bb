from __future__ import annotations

import argparse
import pickle

import pytest

from sglang_replayssm.plugin import flags


def server_args(**kwargs):
    """ServerArgs of SGLang's dummy model: it skips everything that needs a model or a device."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(model_path="dummy", **kwargs)


def speculating(**kwargs):
    """Arguments that the ring would serve, but for `kwargs`."""
    chain = {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    return server_args(enable_gdn_replayssm_spec=True, **(chain | kwargs))


def parse(*argv: str):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return ServerArgs.from_cli_args(parser.parse_args(["--model-path", "dummy", *argv]))


def test_defaults_are_off():
    args = server_args()
    assert not flags.enabled(args)
    assert (args.gdn_replayssm_cache_len, args.gdn_replayssm_fold) == (16, "fp32")


def test_command_line_carries_every_flag():
    args = parse("--enable-gdn-replayssm-spec", "--gdn-replayssm-cache-len", "24", "--gdn-replayssm-fold", "fp32")
    assert flags.enabled(args) and args.gdn_replayssm_cache_len == 24 and args.gdn_replayssm_fold == "fp32"


@pytest.mark.parametrize("fold", ["fp32", "exact", "every-commit", "bf16"])
def test_every_fold_policy_is_a_choice(fold):
    args = parse("--enable-gdn-replayssm-spec", "--speculative-num-draft-tokens", "4", "--gdn-replayssm-fold", fold)
    assert args.gdn_replayssm_fold == fold
    flags.raise_on_contradiction(args)


def test_unknown_fold_policy_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        parse("--gdn-replayssm-fold", "magic")
    assert "magic" in capsys.readouterr().err


def test_yaml_config_file(tmp_path):
    from sglang.srt.server_args import prepare_server_args

    config = tmp_path / "server.yaml"
    config.write_text("model-path: dummy\nenable-gdn-replayssm-spec: true\ngdn-replayssm-cache-len: 20\n")
    args = prepare_server_args(["--config", str(config)])
    assert flags.enabled(args) and args.gdn_replayssm_cache_len == 20


def test_flags_survive_pickling_and_show_in_the_log_line():
    args = pickle.loads(pickle.dumps(server_args(enable_gdn_replayssm_spec=True, gdn_replayssm_cache_len=20)))
    assert flags.enabled(args) and args.gdn_replayssm_cache_len == 20
    assert "enable_gdn_replayssm_spec=True" in f"{args=}" and "gdn_replayssm_cache_len=20" in f"{args=}"


def test_adding_the_flags_twice_changes_nothing():
    from sglang.srt.server_args import ServerArgs

    before = ServerArgs.__init__
    flags.add_to_server_args()
    assert ServerArgs.__init__ is before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gdn_replayssm_cache_len": 3}, ["--gdn-replayssm-cache-len=3", "at least 4"]),
        ({"gdn_replayssm_cache_len": 0}, ["--gdn-replayssm-cache-len", "0"]),
        ({"gdn_replayssm_fold": "magic"}, ["--gdn-replayssm-fold", "magic"]),
        ({"enable_linear_replayssm": True}, ["--enable-linear-replayssm"]),
    ],
)
def test_contradictions_name_the_flag_and_the_cure(settings, words):
    args = speculating(**settings)
    with pytest.raises(ValueError) as error:
        flags.raise_on_contradiction(args)
    assert all(word in str(error.value) for word in words)


def test_window_equal_to_the_draft_length_is_allowed():
    flags.raise_on_contradiction(speculating(gdn_replayssm_cache_len=4))


def test_adaptive_drafts_count_with_their_maximum(monkeypatch):
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(ServerArgs, "max_speculative_num_draft_tokens", property(lambda self: 12))
    with pytest.raises(ValueError, match="12"):
        flags.raise_on_contradiction(speculating(gdn_replayssm_cache_len=8))


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_eagle_topk": 8, "speculative_num_draft_tokens": 64},
        {"speculative_num_draft_tokens": 32},
        {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 24},
        {"gdn_replayssm_fold": "every-commit", "gdn_replayssm_cache_len": 2},
    ],
    ids=str,
)
def test_a_short_window_is_no_contradiction_where_there_is_no_history(settings):
    """What falls back, or folds at every commit, has no use for W: refusing it would send the user in circles."""
    flags.raise_on_contradiction(speculating(**settings))
