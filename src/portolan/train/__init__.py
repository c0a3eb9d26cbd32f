"""The training run: state, step, loop and checkpoints."""
