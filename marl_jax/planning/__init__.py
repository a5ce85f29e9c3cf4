"""What a run needs of a machine, told before it begins."""
