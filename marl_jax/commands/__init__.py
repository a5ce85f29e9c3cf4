"""The bodies of the commands; `experiments/*.py` are thin mains over these."""
