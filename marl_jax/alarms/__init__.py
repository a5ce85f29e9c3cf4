"""Signs that a role, or the whole workflow, collapses: numbers of a step's table, and alarms over the recorded rows."""
