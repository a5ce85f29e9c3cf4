"""What a run leaves on disk: config.json and its lock, metrics, checkpoints, boards; never half written."""
