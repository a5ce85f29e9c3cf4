"""From rewards to advantages: groups of rows that are compared, and their advantages."""
