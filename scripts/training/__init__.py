"""Training the demo model: the parts of train_demo_model.py, one concept a file."""
