"""The files of a run: config.json and its lock, metrics, checkpoints, boards, written atomically."""
