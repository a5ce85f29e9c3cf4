"""Micro base models: every role of every workflow, learned from scripted transcripts.

    micro tasks ──► workflows played by scripted roles ──► token rows ──► next-token training ──► a base

The scripted roles are often wrong on purpose, so that RL has room to improve on the base.
"""
