"""From rewards to advantages: groups of rows that are compared, and how much better each did."""
