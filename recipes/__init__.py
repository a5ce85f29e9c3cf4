"""Recipes: trained multi-agent systems, each a file with its claim, workflow, reward and arms; see docs/recipes.md."""
