"""Micro base models: every role of every workflow, learned from scripted transcripts.

    micro tasks ──► workflows played by scripted roles ──► token rows ──► next-token training ──► a base

The roles are scripted to be right often and not always: what they lack is what RL is to add.
"""
