"""The questions of the study, and the answers that the existing runs give."""
