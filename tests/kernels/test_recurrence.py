"""The recurrence against the formulas of the design, written once more as matrices."""

import torch

from sglang_replayssm.kernels.recurrence import recurrence, softplus


def test_recurrence_is_the_gated_delta_rule() -> None:
    torch.manual_seed(0)
    T, K, V = 5, 8, 6
    q, k, v = torch.randn(1, T, 1, K).double(), torch.randn(1, T, 1, K).double(), torch.randn(1, T, 1, V).double()
    a, b, A_log, dt_bias = torch.randn(1, T, 1), torch.randn(1, T, 1), torch.randn(1), torch.randn(1)
    state = torch.randn(1, 1, V, K).double()
    result = recurrence(q, k, v, a, b, A_log, dt_bias, state)
    S = state[0, 0]
    for t in range(T):
        key = k[0, t, 0] / (k[0, t, 0] @ k[0, t, 0] + 1e-6).sqrt()
        query = q[0, t, 0] / (q[0, t, 0] @ q[0, t, 0] + 1e-6).sqrt() * K**-0.5
        g = -A_log.double().exp() * torch.log(1 + torch.exp((a[0, t] + dt_bias).double()))
        beta = torch.sigmoid(b[0, t].double())
        S = g.exp() * S @ (torch.eye(K) - beta * torch.outer(key, key)) + beta * torch.outer(v[0, t, 0], key)
        torch.testing.assert_close(result.states[0, t, 0], S, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.out[0, t, 0], S @ query, rtol=1e-6, atol=1e-6)


def test_softplus_keeps_its_relative_accuracy() -> None:
    x = torch.tensor([-80.0, -30.0, -9.0, -1.0, 0.0, 5.0, 19.9, 20.1, 80.0])
    exact = torch.log1p(torch.exp(x.double()))
    torch.testing.assert_close(softplus(x).double(), exact, rtol=2e-7, atol=0)
