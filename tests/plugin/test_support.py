from __future__ import annotations

import logging

import pytest
import torch

from sglang_replayssm.plugin import activation, support

SPECULATION = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}

PREFIX_CACHE = {"disable_radix_cache": False}


@pytest.fixture
def make_args(model_dir):
    """Real ServerArgs on a tiny config; fields that SGLang's own validation would reject here are set afterwards."""

    def make(config: dict | None = None, afterwards: dict | None = None, **kwargs):
        from sglang.srt.server_args import ServerArgs

        settings = SPECULATION | {"disable_radix_cache": True, "device": "cpu", "enable_gdn_replayssm_spec": True}
        args = ServerArgs(model_path=model_dir(**(config or {})), skip_tokenizer_init=True, **(settings | kwargs))
        for name, value in (afterwards or {}).items():
            setattr(args, name, value)
        return args

    return make


def test_a_gdn_hybrid_with_nextn_is_served_from_the_ring(make_args):
    assert support.why_not(make_args()) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_activation_dtypes(make_args, dtype):
    assert support.why_not(make_args(dtype=dtype)) == []


@pytest.mark.parametrize(
    ("afterwards", "words"),
    [
        ({"speculative_algorithm": None}, "no speculative decoding"),
        ({"speculative_algorithm": "NGRAM"}, "NGRAM"),
        ({"speculative_algorithm": "DFLASH"}, "DFLASH"),
        ({"speculative_algorithm": "STANDALONE"}, "STANDALONE"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk is 4"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"speculative_num_draft_tokens": 17}, "17"),
        ({"gdn_replayssm_cache_len": 65}, "65"),
        ({"disable_radix_cache": False, "enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"disable_radix_cache": False, "radix_cache_backend": "mine"}, "--radix-cache-backend is mine"),
        ({"linear_attn_backend": "flashinfer"}, "flashinfer"),
        ({"linear_attn_decode_backend": "cutedsl"}, "cutedsl"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
        ({"enable_page_major_kv_layout": True}, "--enable-page-major-kv-layout"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        ({"device": "npu"}, "npu"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_use_the_ring_is_named(make_args, afterwards, words):
    reasons = support.why_not(make_args(afterwards=afterwards))
    assert reasons and all(words in reason for reason in reasons)


@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer"])
def test_prefix_caching_is_served_from_the_ring(make_args, strategy):
    assert support.why_not(make_args(afterwards=PREFIX_CACHE | {"mamba_radix_cache_strategy": strategy})) == []


@pytest.mark.parametrize("name", ["SGLANG_ENABLE_UNIFIED_RADIX_TREE", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"])
def test_another_prefix_cache_is_named_if_it_would_be_used(make_args, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    (reason,) = support.why_not(make_args(afterwards=PREFIX_CACHE))
    assert name in reason
    assert support.why_not(make_args()) == []


def test_a_state_that_is_not_fp32(make_args):
    assert "bfloat16" in support.why_not(make_args(config={"mamba_ssm_dtype": "bfloat16"}))[0]


def test_head_sizes_that_the_kernels_do_not_take(make_args):
    assert "linear_key_head_dim is 96" in support.why_not(make_args(config={"linear_key_head_dim": 96}))[0]


def test_a_model_without_gdn_layers(make_args):
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6}
    assert "LlamaForCausalLM" in support.why_not(make_args(config=llama))[0]


def test_fallback_warns_once_and_hooks_only_report_and_repair(make_args, caplog, monkeypatch):
    applied = []
    monkeypatch.setattr(activation, "reasons", None)
    monkeypatch.setattr(activation, "_apply", applied.append)
    args = make_args(afterwards={"enable_pdmux": True})
    with caplog.at_level(logging.WARNING):
        activation.activate(args, announce=True)
        activation.activate(args, announce=False)  # another rank of the group
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING and "ring is not used" in r.message]
    assert len(warnings) == 1 and "--enable-pdmux" in warnings[0].message
    assert applied == [activation.seams.WITH_FLAG] * 2 and not activation.active()


def test_mixed_batches_are_turned_off_by_sglang(make_args):
    """A plain extend beside verify rows would be one more place that reads states."""
    args = make_args(enable_mixed_chunk=True)
    assert not args.enable_mixed_chunk and support.why_not(args) == []


HICACHE = {"disable_radix_cache": False, "enable_hierarchical_cache": True}
NOT_A_CHAIN = "is not one of EAGLE, EAGLE3, NEXTN"


@pytest.mark.parametrize(
    ("afterwards", "reason"),
    [
        pytest.param(HICACHE, "--enable-hierarchical-cache is on", id="HiCache"),
        pytest.param(
            {"disaggregation_mode": "decode"},
            "PD disaggregation is on (--disaggregation-mode decode)",
            id="PD decode",
        ),
        pytest.param(
            {"disaggregation_mode": "prefill"},
            "PD disaggregation is on (--disaggregation-mode prefill)",
            id="PD prefill",
        ),
        pytest.param({"pp_size": 2}, "pipeline parallelism is on (--pp-size 2)", id="pipeline parallelism"),
        pytest.param({"speculative_algorithm": "NGRAM"}, f"--speculative-algorithm NGRAM {NOT_A_CHAIN}", id="NGRAM"),
        pytest.param({"speculative_algorithm": "DFLASH"}, f"--speculative-algorithm DFLASH {NOT_A_CHAIN}", id="DFlash"),
        pytest.param(
            {"speculative_eagle_topk": 4},
            "--speculative-eagle-topk is 4 (tree verify); only 1 is a chain",
            id="tree verify",
        ),
    ],
)
def test_a_deployment_that_is_served_by_stock_is_told_so(make_args, caplog, monkeypatch, afterwards, reason):
    """The one warning, word for word, and no hook on the state's path."""
    applied = []
    monkeypatch.setattr(activation, "reasons", None)
    monkeypatch.setattr(activation, "_apply", applied.append)
    args = make_args(afterwards=afterwards)
    with caplog.at_level(logging.WARNING, logger=activation.__name__):
        activation.activate(args)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == activation.__name__]
    assert warning == (
        f"--enable-gdn-replayssm-spec: the ring is not used because {reason}. "
        "Serving through SGLang's recurrent verify."
    )
    assert applied == [activation.seams.WITH_FLAG] and not activation.active()


def test_support_reads_the_interpreter_on_the_cpu(make_args, monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    assert "the device is cpu" in support.why_not(make_args())[0]
