"""Accuracy on real questions against any running server; the parts of eval_gsm8k.py, eval_aime.py, compare_evals.py."""
