"""Parts of study_fidelity.py: scenarios, the methods compared, the stepping loop, statistics and report."""
