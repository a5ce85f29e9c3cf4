"""Alarms about roles or workflows that collapse: signs in a step's table, and monitors of the recorded rows."""
