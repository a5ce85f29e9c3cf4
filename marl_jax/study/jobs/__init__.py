"""The jobs of a study: cells x seeds, each a run in a folder of its own, on this machine or on a cluster."""
