"""What a configuration or the folder of a run names, loaded: parts, players, stored policies."""
