"""The questions of the study, and what the runs there are answer."""
