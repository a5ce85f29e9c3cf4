"""Loading of the parts, players and stored policies that a configuration or run folder names."""
