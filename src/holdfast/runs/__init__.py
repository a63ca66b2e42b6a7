"""One run: its plan, its training, its checkpoints and its record."""
