"""Gradients by role, interventions on them, statistics by role, and the report of a step."""
