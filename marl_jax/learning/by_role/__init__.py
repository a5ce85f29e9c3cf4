"""What each role does to the weights: its gradients, interventions on them, its statistics, the report of a step."""
